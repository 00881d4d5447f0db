-- Request: {write, bytes, capacity, wait_s, client}. Asks whether there is room for a put that waits. Replies {"ok"}, or
-- as refuse_room.
reap()
return refuse_room(write, bytes, capacity, wait_s, client, false) or {'ok'}
