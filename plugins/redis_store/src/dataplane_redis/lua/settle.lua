-- Request: {action, partition, task, ids, tokens, lease_s}. All of the rows or none.
local action, name, task_name, ids, tokens, lease_s = unpack(cmsgpack.unpack(ARGV[1]))
local P = open_partition(name)
if not P then return unknown_partition() end
local task = task_index(P, task_name)
if not task then return unknown_task(P) end
expire(P)
local key = P.at .. 'h:' .. task
local held, lost = hmget(key, ids), {}
for i, id in ipairs(ids) do
  local kind = held[i] and string.sub(held[i], 1, 1)
  if not kind or string.sub(held[i], 2) ~= tokens[i] or (kind ~= 'L' and action ~= 'ack') then lost[#lost + 1] = id end
end
if #lost > 0 then return {'lost', lost} end
if P.group then
  local counts, names = {}, distinct_groups(ids)
  for _, id in ipairs(ids) do
    local unit = group_of(id)
    counts[unit] = (counts[unit] or 0) + 1
  end
  local groups = load_groups(P, names)
  for _, unit in ipairs(names) do
    local present = 0
    local holds_of = hmget(key, groups[unit].members)
    for i = 1, #holds_of do
      if holds_of[i] then present = present + 1 end
    end
    if present ~= counts[unit] then return {'part', unit, counts[unit], present} end
  end
end
if action == 'nack' then
  give_back(P, task, ids)
elseif action == 'renew' then
  local until_s, args = string.format('%.6f', now() + lease_s), {}
  for _, id in ipairs(ids) do
    args[#args + 1] = until_s
    args[#args + 1] = task .. ':' .. id
  end
  batched('ZADD', P.at .. 'q', args)
else
  local args, marks, done = {}, {}, 0
  for i, id in ipairs(ids) do
    if string.sub(held[i], 1, 1) == 'L' then
      done = done + 1
      args[#args + 1] = id
      args[#args + 1] = 'A' .. tokens[i]
      marks[#marks + 1] = task .. ':' .. id
    end
  end
  batched('HSET', key, args)
  batched('ZREM', P.at .. 'q', marks)
  if done > 0 then call('HINCRBY', P.meta, 'd:' .. task, done) end
end
return {'ok', #ids}
