-- Request: {name, task_name, required (as a layout), filter (packed conditions, "": none), budget (rows to look at),
-- whose (count it is, "": that of all who ask the same)}. Finds why a claim gets no more samples, as
-- dataplane_core.errors.Shortfall describes it. Looks at about that many rows per call. Replies {"again", ...} with the
-- counts so far, or {"ok", ...} at the end: ready rows, leased rows, {{id, holder, seconds left}, ...} of the first, rows
-- that do not match the filter, {id, ...} of the last of these, rows in incomplete groups, {{group, members}, ...} of the
-- first, rows that lack fields, {{id, field, ...}, ...} of the first. Claims that ask the same share one count, and a
-- count that took several calls is kept for a short time. So if many claims time out at once, the rows are looked at only
-- once.
-- Milliseconds for which an unfinished count is kept, and the most for which a finished one is reused: one for each so
-- many rows that it looked at.
local KEEP_MS, ROWS_PER_MS = 2000, 20
local NAMED = 3
local P, task = open_partition(name, task_name, ALL_PARTS)
if not P then return unknown_partition() end
if not task then return unknown_task(P) end
local fields, held_key = strings_of(required), P.at .. 'h:' .. task
local conditions = filter ~= '' and cmsgpack.unpack(filter)
local S = {at = '0', ready = 0, leased = 0, first = {}, passed = 0, last = {}, incomplete = 0, groups = {}, lost = {},
  lacking = 0, cells = {}, rows = 0}
local question = P.epoch .. '|' .. task .. '|' .. #required .. '|' .. required .. filter .. whose
local kept_at = BASE .. ':why:' .. redis.sha1hex(question)
local kept = call('GET', kept_at)
if kept then S = cmsgpack.unpack(kept) end

-- Keeps the NAMED entries whose value at `key` is least, in this order.
local function keep_first(list, entry, key)
  local place = #list + 1
  while place > 1 and list[place - 1][key] > entry[key] do place = place - 1 end
  table.insert(list, place, entry)
  list[NAMED + 1] = nil
end

-- Whether a row is held. If it is leased, counts it. Keeps those whose leases end first.
local function is_held(id, hold)
  local lease = hold and unsettled_lease(P, hold)
  if not lease then return hold end
  if end_of(P, lease) <= now() then return false end  -- the next claim takes it back
  S.leased = S.leased + 1
  keep_first(S.first, {id, lease.holder, end_of(P, lease)}, 3)
  return true
end

-- Returns the rows that are not held, and counts the others.
local function free_of(ids)
  local free = {}
  for i, hold in ipairs(hmget(held_key, ids)) do
    if not is_held(ids[i], hold) then free[#free + 1] = ids[i] end
  end
  return free
end

-- The fields that a row lacks.
local lacking_by_sig = {}
local function lacking_of(row)
  local sig = signature(row)
  if not lacking_by_sig[sig] then
    local has, lacking = fields_of(P, sig), {}
    for _, field in ipairs(fields) do
      if not has[field] then lacking[#lacking + 1] = field end
    end
    lacking_by_sig[sig] = lacking
  end
  return lacking_by_sig[sig]
end

-- Keeps the first cells.
local function note_cells(id, lacking)
  if #S.cells < NAMED then S.cells[#S.cells + 1] = {id, unpack(lacking)} end
end

-- Keeps the last units that do not match: one id of each.
local function note_passed(seq, id) keep_first(S.last, {-seq, id}, 1) end

-- Called when all rows of a group that lost a member were seen.
local function end_lost(found)
  local seq, group, count, free, tags = unpack(found)
  S.lost[group] = nil
  if conditions and not group_matches(tags, conditions) then
    S.passed = S.passed + free
    if free > 0 then note_passed(seq, found[7]) end
  elseif free > 0 then
    S.incomplete = S.incomplete + free
    keep_first(S.groups, {seq, group, count}, 1)
  end
end

-- A row of a group that lost a member. Its members are not listed, so its rows are collected as they are seen.
local function look_at_lost(id, group)
  local found = S.lost[group.name] or {group.seq, group.name, group.count, 0, {}, 0}
  S.lost[group.name] = found
  if not is_held(id, call('HGET', held_key, id)) then found[4] = found[4] + 1 end
  if conditions then
    local packed = call('HGET', P.at .. 't', id)
    found[5][#found[5] + 1] = packed
    if not matches(packed, conditions) then found[7] = id end
  end
  found[6] = found[6] + 1
  if found[6] >= group.count then end_lost(found) end
end

-- Rows without groups.
local function look_at_rows(ids, seqs)
  local free = free_of(ids)
  local rest = free
  if conditions then
    rest = {}
    local places = {}
    for i, id in ipairs(ids) do places[id] = tonumber(seqs[i]) end
    for i, packed in ipairs(hmget(P.at .. 't', free)) do
      if matches(packed, conditions) then rest[#rest + 1] = free[i] else note_passed(places[free[i]], free[i]) end
    end
    S.passed = S.passed + #free - #rest
  end
  for i, row in ipairs(hmget(P.at .. 'r', rest)) do
    local lacking = lacking_of(row)
    if #lacking == 0 then
      S.ready = S.ready + 1
    else
      S.lacking = S.lacking + 1
      note_cells(rest[i], lacking)
    end
  end
end

-- The rows of a group that lost no member.
local function look_at_group(ids, group)
  local free = free_of(ids)
  if #free == 0 then return end
  if conditions then
    local tags = hmget(P.at .. 't', ids)
    if not group_matches(tags, conditions) then
      local last = #ids
      while matches(tags[last], conditions) do last = last - 1 end
      S.passed = S.passed + #free
      note_passed(group.seq, ids[last])
      return
    end
  end
  if not is_whole(P, group) then
    S.incomplete = S.incomplete + #free
    keep_first(S.groups, {group.seq, group.name, group.count}, 1)
    return
  end
  local lacks = false
  for i, row in ipairs(hmget(P.at .. 'r', free)) do
    local lacking = lacking_of(row)
    if #lacking > 0 then
      lacks = true
      note_cells(free[i], lacking)
    end
  end
  if lacks then
    S.lacking = S.lacking + #free
  elseif #free == #ids then
    S.ready = S.ready + #free
  end
end

local done, count = S.done, P.group and math.max(1, math.floor(CHUNK / P.group)) or CHUNK
while not done and budget > 0 do
  local ids, seqs = members_after(P.at .. 'o', S.at, count)
  local names = {}
  if not P.group then
    look_at_rows(ids, seqs)
  else  -- a group is looked at with its first row, which has the group's seq
    local heads = load_heads(P, distinct_groups(ids))
    for i, id in ipairs(ids) do
      local group = heads[group_of(id)]
      group.name = group_of(id)
      if group.broken then
        look_at_lost(id, group)
      elseif group.seq == tonumber(seqs[i]) then
        names[#names + 1] = group.name
      end
    end
    local groups = load_groups(P, names)
    for _, unit in ipairs(names) do
      groups[unit].name = unit
      look_at_group(groups[unit].members, groups[unit])
      budget = budget - #groups[unit].members
    end
  end
  S.at = seqs[#seqs] or S.at
  S.rows = S.rows + #ids
  budget = budget - #ids
  done = #ids < count
end
if done and not S.done then
  S.done = true
  local left = {}
  for _, found in pairs(S.lost) do left[#left + 1] = found end
  for _, found in ipairs(left) do end_lost(found) end
  if kept then call('SET', kept_at, cmsgpack.pack(S), 'PX', math.min(KEEP_MS, math.ceil(S.rows / ROWS_PER_MS))) end
elseif not done then
  call('SET', kept_at, cmsgpack.pack(S), 'PX', KEEP_MS)
end
local groups = {}
for _, each in ipairs(S.groups) do groups[#groups + 1] = {each[2], each[3]} end
local leased, time = {}, now()
for _, each in ipairs(S.first) do
  leased[#leased + 1] = {each[1], each[2], string.format('%.6f', math.max(0, each[3] - time))}
end
local passed = {}
for _, each in ipairs(S.last) do passed[#passed + 1] = each[2] end
return {done and 'ok' or 'again', S.ready, S.leased, leased, S.passed, passed, S.incomplete, groups, S.lacking, S.cells}
