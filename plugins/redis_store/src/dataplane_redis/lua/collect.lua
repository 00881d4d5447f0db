-- Request: {limit}. Deletes up to `limit` writes of dropped registrations. Replies whether more are left.
local limit = unpack(cmsgpack.unpack(ARGV[1]))
reap()
local trash = BASE .. ':trash'
local epoch = call('SRANDMEMBER', trash)
if epoch then
  local writes = call('SPOP', trash .. ':' .. epoch, limit)
  local keys = {}
  for i, write in ipairs(writes) do keys[i] = key_of_write(write) end
  for first = 1, #keys, CHUNK do
    call('UNLINK', unpack(keys, first, math.min(first + CHUNK - 1, #keys)))
  end
  if #writes < limit then call('SREM', trash, epoch) end
end
return {'ok', call('EXISTS', trash)}
