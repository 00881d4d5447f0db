-- Request: {write}. Aborts a begun put. A committed put stays. Replies also whether `collect` has something to do.
local write = unpack(cmsgpack.unpack(ARGV[1]))
if call('ZREM', BASE .. ':pending', write) == 1 then
  local size = call('HGET', BASE .. ':reserved', write)
  call('HDEL', BASE .. ':reserved', write)
  free_room(tonumber(size))
  delete_write(write)
elseif lies_elsewhere(write) then
  condemn({write})
end
if leave_line(write) then wake_puts() end
return {'ok', SPREAD and has_trash() or 0}
