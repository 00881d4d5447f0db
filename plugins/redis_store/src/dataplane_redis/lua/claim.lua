-- Request: {partition, task, batch size, all_or_nothing, lease_s (-1: none), explain, required (sorted, as a layout),
-- conditions, rows to look at, state}. A script looks at about that many rows besides those that it gives. Where they do
-- not settle the claim it gives nothing and replies {"again", state}: the client asks again with that state ("" at
-- first), so that no single script holds the server for long.
local name, task_name, batch_size, all_or_nothing, lease_s, explain, required, conditions, budget, state =
  unpack(cmsgpack.unpack(ARGV[1]))
local P = open_partition(name)
if not P then return unknown_partition() end
local task = task_index(P, task_name)
if not task then return unknown_task(P) end
local per_unit = P.group or 1
if batch_size % per_unit ~= 0 then return {'batch', per_unit} end
expire(P)
local view_name = task .. ':' .. required
local mark = call('HGET', P.at .. 'vw', view_name)
if not mark then
  mark = '0'
  call('HSET', P.at .. 'vw', view_name, mark)
  P.views = nil  -- what ending leases loaded lacks this one
end
local view = open_view(P, view_name, mark)
local order, held_key = P.at .. 'o', P.at .. 'h:' .. task
local turn = call('HGET', P.meta, 'turn') or '0'

-- What the earlier scripts of this claim found: the turn at the first; the units chosen, each with its seq; the first
-- rows that lack fields; and the seqs up to which they looked at ready units, for more to come, and for lacking fields.
local S = {turn = turn, units = {}, lacking = {}, ready_at = '0', more_at = '0', lacking_at = '0'}
if state ~= '' then S = cmsgpack.unpack(state) end

-- Up to `count` members of a sorted set after a seq, and their seqs.
local function after(key, seq, count)
  local flat, members, seqs = call('ZRANGEBYSCORE', key, '(' .. seq, '+inf', 'WITHSCORES', 'LIMIT', 0, count), {}, {}
  for i = 1, #flat, 2 do
    members[#members + 1] = flat[i]
    seqs[#seqs + 1] = flat[i + 1]
  end
  return members, seqs
end

-- Offers the next rows in order of first write; false where there are none.
local function scan()
  local ids, seqs = after(order, string.format('%.0f', view.mark), CHUNK)
  if #ids == 0 then return false end
  view.mark = tonumber(seqs[#seqs])
  offer(P, {view}, ids, hmget(P.at .. 'r', ids))
  budget = budget - #ids
  return true
end

local function again()
  call('HSET', P.at .. 'vw', view_name, string.format('%.0f', view.mark))
  return {'again', cmsgpack.pack(S)}
end

local function rows_of(unit)
  return P.group and load_groups(P, {unit})[unit].members or {unit}
end

local function unit_matches(ids)
  if #conditions == 0 then return true end
  for _, packed in ipairs(hmget(P.at .. 't', ids)) do
    if not matches(packed, conditions) then return false end
  end
  return true
end

if P.group then  -- a group's place is that of its first member, so all must be seen before the first is given
  while scan() do
    if budget <= 0 then return again() end
  end
end
local want, units, ids = batch_size / per_unit, {}, {}
local chosen = S.units
S.units = {}

local function choose(unit, seq, members)
  units[#units + 1] = unit
  S.units[#S.units + 1] = unit
  S.units[#S.units + 1] = seq
  for _, id in ipairs(members) do ids[#ids + 1] = id end
end

for i = 1, #chosen, 2 do  -- others may have taken, cleared or changed them since
  local unit, seq = chosen[i], chosen[i + 1]
  if call('ZSCORE', view.ready, unit) == seq then
    local members = rows_of(unit)
    if unit_matches(members) then choose(unit, seq, members) end
  end
end
while #units < want do
  local part, seqs = after(view.ready, S.ready_at, math.min(CHUNK, math.max(want - #units, 100)))
  if #part == 0 and not scan() then break end
  local tags = #conditions > 0 and not P.group and hmget(P.at .. 't', part)
  for i, unit in ipairs(part) do
    if #units == want then break end
    local members = rows_of(unit)
    local good
    if tags then good = matches(tags[i], conditions) else good = unit_matches(members) end
    if good then choose(unit, seqs[i], members) else budget = budget - per_unit end
    S.ready_at = seqs[i]
  end
  if #units < want and budget <= 0 then return again() end
end
call('HSET', P.at .. 'vw', view_name, string.format('%.0f', view.mark))
local num_ready = #units * per_unit

-- Shows `look` the rows in order of first write, a chunk at a time, until it returns true: true. False where it has seen
-- all, nil where the budget was spent before; the next script goes on there.
local function walk(place, look)
  while budget > 0 do
    local part, seqs = after(order, S[place], CHUNK)
    if #part == 0 then return false end
    if look(part) then return true end
    S[place] = seqs[#seqs]
    budget = budget - #part
  end
  return nil
end

-- Whether a unit of these rows is not ready, not held and matches.
local function one_may_come(part)
  if P.group then
    local names = distinct_groups(part)
    local groups = load_groups(P, names)
    for _, unit in ipairs(names) do
      local g = groups[unit]
      if is_whole(P, g) and not call('ZSCORE', view.ready, unit) and none_held(hmget(held_key, g.members))
        and unit_matches(g.members) then return true end
    end
    return false
  end
  local held, tags = hmget(held_key, part), hmget(P.at .. 't', part)
  for i, id in ipairs(part) do
    if not held[i] and matches(tags[i], conditions) and not call('ZSCORE', view.ready, id) then return true end
  end
  return false
end

-- Whether such units are still to come; nil where the budget was spent before that was known.
local function more_may_come()
  local seen = tonumber(call('HGET', P.meta, 'seen') or 0)
  if not P.num or seen < P.num then return true end
  local rest
  if P.group then
    local m = call('HMGET', P.meta, 'whole', 'w:' .. task)
    rest = tonumber(m[1] or 0) - tonumber(m[2] or 0)
  else
    rest = call('ZCARD', order) - call('HLEN', held_key)
  end
  rest = rest - call('ZCARD', view.ready)
  if rest == 0 or #conditions == 0 then return rest ~= 0 end
  return walk('more_at', one_may_come)
end

-- Adds the rows that the task was not given and that lack fields, id and then the names; true where there are three.
local function find_lacking(part)
  local held, tags, rows = hmget(held_key, part), hmget(P.at .. 't', part), hmget(P.at .. 'r', part)
  for i, id in ipairs(part) do
    if not held[i] and matches(tags[i], conditions) then
      local lacking, has = {id}, fields_of(P, signature(rows[i]))
      for _, field in ipairs(view.required) do
        if not has[field] then lacking[#lacking + 1] = field end
      end
      if #lacking > 1 then S.lacking[#S.lacking + 1] = lacking end
      if #S.lacking == 3 then return true end
    end
  end
  return false
end

local exhausted = false
if num_ready < batch_size then
  local more = more_may_come()
  if more == nil then return again() end
  -- where rows came back or changed between the scripts, some may be ready behind these: the next claim finds them
  exhausted = not more and turn == S.turn
  if all_or_nothing == 1 and not exhausted then
    if explain == 1 and walk('lacking_at', find_lacking) == nil then return again() end
    return {'wait', num_ready, S.lacking}
  end
end
local token = ''
if #ids > 0 then
  for _, other in ipairs(views_of(P, task)) do batched('ZREM', other.ready, units) end
  local args, queue = {}, {}
  local hold = 'D'
  if lease_s >= 0 then
    token = string.format('%.0f.%.0f', P.epoch, call('HINCRBY', P.meta, 'token', 1))
    hold = 'L' .. token
    local until_s = string.format('%.6f', now() + lease_s)
    for _, id in ipairs(ids) do
      queue[#queue + 1] = until_s
      queue[#queue + 1] = task .. ':' .. id
    end
  else
    call('HINCRBY', P.meta, 'd:' .. task, #ids)
  end
  for _, id in ipairs(ids) do
    args[#args + 1] = id
    args[#args + 1] = hold
  end
  batched('HSET', held_key, args)
  batched('ZADD', P.at .. 'q', queue)
  if P.group then call('HINCRBY', P.meta, 'w:' .. task, #units) end
end
return {'ok', exhausted and 1 or 0, num_ready, token, ids, hmget(P.at .. 't', ids)}
