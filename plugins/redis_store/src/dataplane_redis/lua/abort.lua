-- Request: {write}. Aborts a begun put. A committed put stays.
local write = unpack(cmsgpack.unpack(ARGV[1]))
if call('ZREM', BASE .. ':pending', write) == 1 then
  local size = call('HGET', BASE .. ':reserved', write)
  call('HDEL', BASE .. ':reserved', write)
  free_room(tonumber(size))
  call('UNLINK', key_of_write(write))
end
leave_line(write)
return {'ok'}
