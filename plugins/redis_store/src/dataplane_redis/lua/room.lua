-- Request: {write, bytes, capacity, wait_s}. Whether there is room for a put that waits: {"ok"}, or as refuse_room
-- replies.
local write, bytes, capacity, wait_s = unpack(cmsgpack.unpack(ARGV[1]))
reap()
return refuse_room(write, bytes, capacity, wait_s, false) or {'ok'}
