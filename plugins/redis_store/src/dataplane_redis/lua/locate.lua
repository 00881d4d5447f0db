-- Request: {name, ids, fields, most (bytes to send along)}. Replies with rows, layouts and the epoch. If what the fields
-- need is small, the rows have only the refs whose layout has any of the fields, and the payload of these refs follows,
-- in order.
local P = open_partition(name, nil, {'r', 'l'})
if not P then return unknown_partition() end
local rows = hmget(P.at .. 'r', ids)
local layouts = call('LRANGE', P.at .. 'l', 0, -1)
local has_any  -- the layouts that have any of the fields, by their packed numbers; nil: all that there are
if most >= 0 and #layouts > 1 then
  local asked = {}
  has_any = {}
  for _, field in ipairs(fields) do asked[field] = true end
  for number, layout in ipairs(layouts) do
    local strings = strings_of(layout)
    for k = 1, #strings, 2 do
      if asked[strings[k]] then has_any[struct.pack('<I4', number - 1)] = true end
    end
  end
end
local payload, needed, total = {}, {}, 0
for i = 1, #ids do
  local row = rows[i]
  if not row then return {'missing', rows, layouts, P.epoch} end
  if total <= most then
    local kept = string.sub(row, 1, HEAD)
    for at = HEAD + 1, #row, REF do
      if not has_any or has_any[string.sub(row, at + 20, at + 23)] then
        local write, position, _, size = struct.unpack('<c16I4I4I8', row, at)
        total = total + size
        if lies_elsewhere(write) then total = most + 1 end
        payload[#payload + 1] = {write, position}
        kept = kept .. string.sub(row, at, at + REF - 1)
      end
    end
    needed[i] = kept
  end
end
if total > most then return {'ok', rows, layouts, P.epoch} end
for i, place in ipairs(payload) do payload[i] = call('HGET', key_of_write(place[1]), place[2]) end
return {'ok', needed, layouts, P.epoch, payload}
