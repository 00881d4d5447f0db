-- Request: {mode, name, epoch ("" for any), ids, parts, tags ("", or a msgpack map or "" per row), capacity (0: none),
-- ttl_s, request (its id), write (16 bytes), known, wait_s (how long to wait for room)}. A part
-- is some fields of the put, which have rows of their own: {layout, sizes of its rows, for each id its row, from 0
-- ("": row i)}. Mode "begin" checks and reserves; "commit" checks again what may have changed and makes the rows visible;
-- "inline" does both, with the rows in ARGV[2...]. A put is identified by its random write id. So if the server restarted
-- from a state without the begin, the commit is refused; and no seq is used twice. A put whose request id is kept was
-- carried out: "begin" replies {"done"}, the others as if they had done it.
local total, num_rows = 0, 0
for _, part in ipairs(parts) do
  for i = 1, #part[2] do total = total + part[2][i] end
  part.first = num_rows
  num_rows = num_rows + #part[2]
end
local write_key, elsewhere = key_of_write(write), lies_elsewhere(write)

local function refuse(...)
  if mode == 'commit' then give_up(write) end
  return {...}
end

reap()
if is_done(request) then
  if mode == 'begin' then return {'done'} end
  leave_mark()
  if mode == 'commit' and call('ZSCORE', BASE .. ':pending', write) then return refuse('ok', '', SPREAD and 1 or 0) end
  return {'ok', '', 0}
end
if mode == 'commit' then
  if not call('ZSCORE', BASE .. ':pending', write) then return {'abandoned'} end
end
local P = open_partition(name, nil, {'r', 't', 'o', 's', 'l', 'u', 'n'})
if not P then
  if mode == 'commit' then return refuse('stale', '') end
  return unknown_partition()
end
if epoch ~= '' and epoch ~= P.epoch then return refuse('stale', '') end
local rows = hmget(P.at .. 'r', ids)
if mode == 'commit' then
  for i = 1, #ids do
    local was = string.sub(known, 8 * i - 7, 8 * i)
    if was ~= '\0\0\0\0\0\0\0\0' and (not rows[i] or string.sub(rows[i], 1, 8) ~= was) then
      return refuse('stale', ids[i])
    end
  end
end
local layouts, new_specs, wrong = {}, {}, {'schema'}
for i, part in ipairs(parts) do layouts[i] = part[1] end
for i, index in ipairs(hmget(P.at .. 'li', layouts)) do
  parts[i].layout = tonumber(index or nil)
  if not index or string.find(layouts[i], '::ints', 1, true) then  -- else its specs fit those that are kept
    local strings, fields = strings_of(layouts[i]), {}
    for k = 1, #strings, 2 do fields[#fields + 1] = strings[k] end
    for k, kept in ipairs(hmget(P.at .. 's', fields)) do
      local after = spec_after(kept, strings[2 * k])
      if not after then
        wrong[#wrong + 1], wrong[#wrong + 2] = fields[k], kept
      elseif after ~= kept then
        new_specs[#new_specs + 1], new_specs[#new_specs + 2] = fields[k], after
      end
    end
  end
end
if #wrong > 1 then return refuse(unpack(wrong)) end
local groups, group_names, joining = {}, {}, {}
if P.group then
  for i, id in ipairs(ids) do
    if not rows[i] then
      local key = group_of(id)
      if not key then return refuse('no_group', id) end
      add_to(joining, group_names, key, id)
    end
  end
  groups = load_heads(P, group_names)
  for _, key in ipairs(group_names) do
    local count = #joining[key] + (groups[key] and groups[key].count or 0)
    if count > P.group then return refuse('surplus', key, count, P.group) end
  end
end
local num_fresh = 0  -- ids that count for num
if P.num then
  local new_ids = {}
  for i, id in ipairs(ids) do
    if not rows[i] then new_ids[#new_ids + 1] = id end
  end
  num_fresh = #new_ids
  if num_fresh > 0 and call('HGET', P.meta, 'cleared') then
    for _, was in ipairs(ask_many('SMISMEMBER', P.at .. 'x', new_ids)) do num_fresh = num_fresh - was end
  end
  local count = num_fresh + tonumber(call('HGET', P.meta, 'seen') or 0)
  if num_fresh > 0 and count > P.num then return refuse('too_many', count, P.num) end
end
if mode ~= 'commit' and total > 0 then
  if capacity > 0 then
    local refused = refuse_room(write, total, capacity, wait_s, '', true)
    if refused then return refused end
    call('HINCRBY', BASE .. ':instance', 'held', total)
    if leave_line(write) then wake_puts() end
  else
    call('HINCRBY', BASE .. ':instance', 'held', total)
  end
end
if mode == 'begin' then
  call('ZADD', BASE .. ':pending', now() + ttl_s, write)
  call('HSET', BASE .. ':instance', 'r:' .. write, total)
  local seqs = {}
  for i = 1, #ids do seqs[i] = rows[i] and string.sub(rows[i], 1, 8) or '\0\0\0\0\0\0\0\0' end
  return {'ok', P.epoch, table.concat(seqs)}
end

if mode == 'commit' then
  if not elsewhere and call('HLEN', write_key) ~= num_rows then return refuse('incomplete') end
  call('ZREM', BASE .. ':pending', write)
  call('HDEL', BASE .. ':instance', 'r:' .. write)
  if elsewhere then call('HSET', P.at .. 'uc', write, num_rows) else call('PERSIST', write_key) end
elseif num_rows > 0 then
  local args = {}
  for i = 1, num_rows do args[#args + 1], args[#args + 2] = i - 1, ARGV[i + 1] end
  set_fields(write_key, args)
end

leave_mark()
keep_done(request, ttl_s + 60)
local new_sig = ''
if num_rows > 0 then
  batched('HSET', P.at .. 's', new_specs)
  for _, part in ipairs(parts) do
    if not part.layout then
      part.layout = call('RPUSH', P.at .. 'l', part[1]) - 1
      call('HSET', P.at .. 'li', part[1], part.layout)
    end
    new_sig = new_sig .. struct.pack('<I4', part.layout)
    if part[3] ~= '' then add_sharers(P, write, part) end
  end
  call('SADD', P.at .. 'u', write)
  call('HINCRBY', P.meta, 'bytes', total)
end

-- The refs of the put's rows of an id.
local function refs_of(i)
  local refs = {}
  for p, part in ipairs(parts) do
    local row = part[3] == '' and i - 1 or part[3][i]
    refs[p] = struct.pack('<c16I4I4I8', write, part.first + row, part.layout, part[2][row + 1])
  end
  return table.concat(refs)
end

-- For rows with the same signature: which refs stay, and the new signature.
local plans = {}
local function plan_of(sig)
  local plan = plans[sig]
  if not plan then
    plan = {stays = {}, sig = ''}
    local later = {}
    for _, part in ipairs(parts) do
      for _, field in ipairs(layout_names(P, part.layout)) do later[field] = true end
    end
    for at = #sig - 3, 1, -4 do
      local stays = false
      for _, field in ipairs(layout_names(P, struct.unpack('<I4', sig, at))) do
        if not later[field] then
          stays = true
          later[field] = true
        end
      end
      plan.stays[(at + 3) / 4] = stays
      if stays then plan.sig = string.sub(sig, at, at + 3) .. plan.sig end
    end
    plan.sig = plan.sig .. new_sig
    plans[sig] = plan
  end
  return plan
end

local first_seq = call('HINCRBY', BASE .. ':instance', 'seq', #ids) - #ids
local row_args, order_args, tag_args, freed = {}, {}, {}, {}
local new_ids, old_ids, old_rows, known_ids = {}, {}, {}, {}
local is_new = none_held(rows)
local views = {}
if not is_new then  -- new rows enter a view when a claim looks at them
  views = views_of(P)
end
local gained = {}
local old_tags, group_seqs = {}, {}
if tags ~= '' and not is_new then old_tags = hmget(P.at .. 't', ids) end
for i, id in ipairs(ids) do
  local row, ref = rows[i], ''
  if row then known_ids[#known_ids + 1] = id end
  if num_rows > 0 then ref = refs_of(i) end
  local after
  if not row then
    local seq = first_seq + i
    after = struct.pack('<I8d', seq, now()) .. ref
    new_ids[#new_ids + 1] = id
    order_args[#order_args + 1], order_args[#order_args + 2] = seq, id
    if P.group then
      local key = group_of(id)
      group_seqs[key] = group_seqs[key] or seq
    end
  elseif num_rows > 0 then
    local sig = signature(row)
    local plan = plan_of(sig)
    local parts = {string.sub(row, 1, HEAD)}
    for k, stays in ipairs(plan.stays) do
      local old = string.sub(row, HEAD + 1 + REF * (k - 1), HEAD + REF * k)
      if stays then parts[#parts + 1] = old else freed[#freed + 1] = old end
    end
    parts[#parts + 1] = ref
    after = table.concat(parts)
    if #views > 0 then
      local key = sig .. '|' .. plan.sig
      if gained[key] == nil then
        gained[key] = false
        for _, view in ipairs(views) do
          if holds_all(P, plan.sig, view) and not holds_all(P, sig, view) then gained[key] = true end
        end
      end
      if gained[key] then
        old_ids[#old_ids + 1] = id
        old_rows[#old_rows + 1] = after
      end
    end
  end
  if after then row_args[#row_args + 1], row_args[#row_args + 2] = id, after end
  if tags ~= '' and tags[i] ~= '' then
    local merged = tags[i]
    if old_tags[i] then
      local all = cmsgpack.unpack(old_tags[i])
      for key, value in pairs(cmsgpack.unpack(merged)) do all[key] = value end
      merged = cmsgpack.pack(all)
    end
    tag_args[#tag_args + 1], tag_args[#tag_args + 2] = id, merged
  end
end
set_fields(P.at .. 'r', row_args)
batched('ZADD', P.at .. 'o', order_args)
set_fields(P.at .. 't', tag_args)
local units = known_ids  -- those that are now whole or match may have an early seq
if P.group then
  join_groups(P, group_names, groups, joining, group_seqs)
  units = distinct_groups(ids)
end
if num_fresh > 0 then call('HINCRBY', P.meta, 'seen', num_fresh) end
if #freed > 0 then free_refs(P, freed) end
if #old_ids > 0 then offer(P, views, old_ids, old_rows) end
changed(P, units)
wake(P)
return {'ok', P.epoch, SPREAD and has_trash() or 0}
