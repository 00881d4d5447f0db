-- Request: {action, version, id, owner, capacity_bytes ("": none), on_full, buckets}. "bootstrap" creates the instance,
-- or takes over an existing one: if it has an owner, only with equal options; else with any. "bootstrap alone" takes it
-- over only if it has no owner. An existing instance keeps its id, so that its clients can continue. "attach" finds it,
-- "end" removes the owner. Runs without common.lua, which refuses clients that do not know the instance's id yet.
local key = KEYS[1] .. ':instance'
local found = redis.call('HMGET', key, 'version', 'id', 'capacity_bytes', 'on_full', 'owner', 'clock', 'buckets')
if found[1] and found[1] ~= version then return {'version', found[1]} end
if action == 'end' then
  if found[5] == owner then redis.call('HDEL', key, 'owner') end
  return {'ok'}
end
-- The stored time plus what passed since it was stored, by the server's clock, if that did not go back.
local function time()
  local t = redis.call('TIME')
  local here = t[1] + t[2] / 1e6
  local kept, there = here, here
  if found[6] then kept, there = struct.unpack('<dd', found[6]) end
  local clock = struct.pack('<dd', kept + math.max(0, here - there), here)
  redis.call('HSET', key, 'clock', clock)
  return clock
end
if action == 'attach' then
  if not found[5] then return {'none'} end
  return {'ok', found[2], found[3], found[4], time(), found[7]}
end
local same = action == 'bootstrap' and found[3] == capacity_bytes and found[4] == on_full
if found[5] and not same then return {'other', found[3], found[4]} end
if not found[2] then  -- see MARK in common.lua
  redis.call('HSET', KEYS[1] .. ':parts', '\255', '')
  redis.call('ZADD', KEYS[1] .. ':pending', '+inf', '\255')
  if tonumber(buckets) > 1 then redis.call('ZADD', KEYS[1] .. ':gone', '+inf', '\255') end
end
id, buckets = found[2] or id, found[7] or buckets  -- its payload is already there
local options = {'capacity_bytes', capacity_bytes, 'on_full', on_full, 'buckets', buckets}
redis.call('HSET', key, 'version', version, 'id', id, 'owner', owner, unpack(options))
return {'ok', id, capacity_bytes, on_full, time(), buckets}
