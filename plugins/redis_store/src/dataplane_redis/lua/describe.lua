-- Request: {partition}.
local name = unpack(cmsgpack.unpack(ARGV[1]))
local m = call('HMGET', BASE .. ':p:' .. name, 'epoch', 'info')
if not m[1] then return unknown_partition() end
return {'ok', m[1], m[2]}
