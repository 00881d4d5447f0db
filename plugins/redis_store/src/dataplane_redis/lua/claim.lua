-- Request: {partition, task, batch size, all_or_nothing, lease_s (-1: none), explain, required (sorted, as a layout),
-- conditions, rows to look at}. Replies "again" where a view was not yet caught up within that many rows: nothing is
-- given then, and the client asks again, so that no single script holds the server for long.
local name, task_name, batch_size, all_or_nothing, lease_s, explain, required, conditions, budget =
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
local order = P.at .. 'o'
local caught_up = false

-- Offers the next rows in order of first write; false where there are none.
local function scan()
  local low = '(' .. string.format('%.0f', view.mark)
  local found = call('ZRANGEBYSCORE', order, low, '+inf', 'WITHSCORES', 'LIMIT', 0, CHUNK)
  if #found == 0 then
    caught_up = true
    return false
  end
  local ids = {}
  for i = 1, #found, 2 do ids[#ids + 1] = found[i] end
  view.mark = tonumber(found[#found])
  offer(P, {view}, ids, hmget(P.at .. 'r', ids))
  budget = budget - #ids
  return true
end

local function again()
  call('HSET', P.at .. 'vw', view_name, string.format('%.0f', view.mark))
  return {'again'}
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
local want, units, ids, at = batch_size / per_unit, {}, {}, 0
while #units < want do
  local part = call('ZRANGE', view.ready, at, at + math.min(CHUNK, math.max(want - #units, 100)) - 1)
  if #part == 0 then
    if not scan() then break end
    if budget <= 0 and not caught_up then return again() end
  end
  at = at + #part
  local tags = #conditions > 0 and not P.group and hmget(P.at .. 't', part)
  for i, unit in ipairs(part) do
    if #units == want then break end
    local members = rows_of(unit)
    local good
    if tags then good = matches(tags[i], conditions) else good = unit_matches(members) end
    if good then
      units[#units + 1] = unit
      for _, id in ipairs(members) do ids[#ids + 1] = id end
    end
  end
end
call('HSET', P.at .. 'vw', view_name, string.format('%.0f', view.mark))

local held_key = P.at .. 'h:' .. task
local num_ready = #units * per_unit

-- Whether units that are not ready, not held and match are still to come.
local function more_may_come()
  local seen = tonumber(call('HGET', P.meta, 'seen') or 0)
  if not P.num or seen < P.num then return true end
  local ready = call('ZCARD', view.ready)
  if P.group then
    local m = call('HMGET', P.meta, 'whole', 'w:' .. task)
    local rest = tonumber(m[1] or 0) - tonumber(m[2] or 0) - ready
    if rest == 0 or #conditions == 0 then return rest ~= 0 end
    for _, unit in ipairs(call('HKEYS', P.at .. 'g')) do
      local g = load_groups(P, {unit})[unit]
      if is_whole(P, g) and not call('ZSCORE', view.ready, unit) and none_held(hmget(held_key, g.members))
        and unit_matches(g.members) then return true end
    end
    return false
  end
  local rest = call('ZCARD', order) - call('HLEN', held_key) - ready
  if rest == 0 or #conditions == 0 then return rest ~= 0 end
  local from = 0
  while true do
    local part = call('ZRANGE', order, from, from + CHUNK - 1)
    if #part == 0 then return false end
    from = from + #part
    local held, tags = hmget(held_key, part), hmget(P.at .. 't', part)
    for i, id in ipairs(part) do
      if not held[i] and matches(tags[i], conditions) and not call('ZSCORE', view.ready, id) then return true end
    end
  end
end

-- The first three rows that the task was not given and that lack fields: id, then the names.
local function missing()
  local found, from = {}, 0
  while #found < 3 do
    local part = call('ZRANGE', order, from, from + CHUNK - 1)
    if #part == 0 then break end
    from = from + #part
    local held, tags, rows = hmget(held_key, part), hmget(P.at .. 't', part), hmget(P.at .. 'r', part)
    for i, id in ipairs(part) do
      if #found == 3 then break end
      if not held[i] and matches(tags[i], conditions) then
        local lacking, has = {id}, fields_of(P, signature(rows[i]))
        for _, field in ipairs(view.required) do
          if not has[field] then lacking[#lacking + 1] = field end
        end
        if #lacking > 1 then found[#found + 1] = lacking end
      end
    end
  end
  return found
end

local exhausted = num_ready < batch_size and not more_may_come()
if all_or_nothing == 1 and num_ready < batch_size and not exhausted then
  return {'wait', num_ready, explain == 1 and missing() or {}}
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
