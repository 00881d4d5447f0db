-- Request: {action, version, id, owner, capacity_bytes ("": none), on_full}. "bootstrap" makes the instance, or takes
-- it over: one that has an owner with equal options, one that has none with any; "bootstrap alone" takes over only what
-- has no owner. What is there keeps its id, so that its clients go on. "attach" finds it, "end" takes the owner away.
-- Runs without the other scripts' common part, since that refuses who does not know the instance yet.
local action, version, id, owner, capacity_bytes, on_full = unpack(cmsgpack.unpack(ARGV[1]))
local key = KEYS[1] .. ':instance'
if redis.call('TYPE', key).ok == 'string' then return {'version', '1'} end
local found = redis.call('HMGET', key, 'version', 'id', 'capacity_bytes', 'on_full', 'owner', 'clock')
if found[1] and found[1] ~= version then return {'version', found[1]} end
if action == 'end' then
  if found[5] == owner then redis.call('HDEL', key, 'owner') end
  return {'ok'}
end
-- What passed since the time was kept last, while perhaps nobody was connected: by the server's clock, if that tells.
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
  return {'ok', found[2], found[3], found[4], time()}
end
local same = action == 'bootstrap' and found[3] == capacity_bytes and found[4] == on_full
if found[5] and not same then return {'other', found[3], found[4]} end
id = found[2] or id
local options = {'capacity_bytes', capacity_bytes, 'on_full', on_full}
redis.call('HSET', key, 'version', version, 'id', id, 'owner', owner, unpack(options))
return {'ok', id, capacity_bytes, on_full, time()}
