-- Request: {partition}. Replies {"ok", epoch, info, {field, spec, ...}, rows, cleared rows, bytes, seconds since the
-- oldest row was written or "", {task, rows that it was given for good, ...}}.
local name = unpack(cmsgpack.unpack(ARGV[1]))
local P = open_partition(name)
if not P then return unknown_partition() end
local m = call('HMGET', P.meta, 'info', 'cleared', 'bytes')
local tasks, flat = {}, call('HGETALL', P.meta)
for i = 1, #flat, 2 do
  if string.sub(flat[i], 1, 2) == 't:' then
    tasks[#tasks + 1] = string.sub(flat[i], 3)
    tasks[#tasks + 1] = tonumber(call('HGET', P.meta, 'd:' .. flat[i + 1]) or 0)
  end
end
local age, oldest = '', call('ZRANGE', P.at .. 'o', 0, 0, 'WITHSCORES')
if oldest[2] then
  local written = call('ZREVRANGEBYSCORE', P.at .. 'w', oldest[2], '-inf', 'LIMIT', 0, 1)[1]
  if written then age = string.format('%.6f', math.max(0, now() - tonumber(string.match(written, '^[^:]*')))) end
end
return {
  'ok', P.epoch, m[1], call('HGETALL', P.at .. 's'), call('ZCARD', P.at .. 'o'), tonumber(m[2] or 0),
  tonumber(m[3] or 0), age, tasks,
}
