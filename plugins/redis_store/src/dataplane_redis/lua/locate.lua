-- Request: {partition, ids, most bytes to send along}. Replies with rows, layouts and the epoch. If the payload of all
-- rows is small, also with the payload of every ref, in order.
local name, ids, most = unpack(cmsgpack.unpack(ARGV[1]))
local P = open_partition(name)
if not P then return unknown_partition() end
local rows = hmget(P.at .. 'r', ids)
local layouts = call('LRANGE', P.at .. 'l', 0, -1)
local payload, total = {}, 0
for i = 1, #ids do
  local row = rows[i]
  if not row then return {'missing', rows, layouts, P.epoch} end
  if total <= most then
    for at = 9, #row, REF do
      total = total + struct.unpack('<I8', row, at + 24)
      if lies_elsewhere(string.sub(row, at, at + 3)) then total = most + 1 end
    end
  end
end
if total <= most then
  for i = 1, #ids do
    for at = 9, #rows[i], REF do
      local write, position = struct.unpack('<c16I4', rows[i], at)
      payload[#payload + 1] = call('HGET', key_of_write(write), position)
    end
  end
end
return {'ok', rows, layouts, P.epoch, total <= most and payload or nil}
