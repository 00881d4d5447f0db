-- Request: {write}. Gives a begun put up; a committed one stays.
local write = string.format('%.0f', unpack(cmsgpack.unpack(ARGV[1])))
if call('ZREM', BASE .. ':pending', write) == 1 then
  local size = call('HGET', BASE .. ':reserved', write)
  call('HDEL', BASE .. ':reserved', write)
  call('INCRBY', BASE .. ':held', '-' .. size)
  call('UNLINK', BASE .. ':w:' .. write)
end
return {'ok'}
