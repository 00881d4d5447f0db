-- Request: {limit, deleted}. Deletes up to `limit` writes of dropped registrations. Of payload in other slots, it replies
-- what the client must delete, up to `limit` entries of base:gone, and forgets the entries that the client has deleted.
-- What a client does not delete in time, another one gets. Replies also whether more is left.
local limit, deleted = unpack(cmsgpack.unpack(ARGV[1]))
-- Seconds until an entry is given to another client.
local GIVEN_S = 10
reap()
batched('ZREM', BASE .. ':gone', deleted)
local trash = BASE .. ':trash'
local epoch = call('SRANDMEMBER', trash)
if epoch then
  local writes = call('SPOP', trash .. ':' .. epoch, limit)
  local keys, gone = {}, {}
  for _, write in ipairs(writes) do
    if lies_elsewhere(write) then
      gone[#gone + 1] = 0
      gone[#gone + 1] = write
    else
      keys[#keys + 1] = key_of_write(write)
    end
  end
  batched('ZADD', BASE .. ':gone', gone)
  unlink(keys)
  if #writes < limit then call('SREM', trash, epoch) end
end
local given, again = {}, {}
if SPREAD then
  given = call('ZRANGEBYSCORE', BASE .. ':gone', '-inf', now(), 'LIMIT', 0, limit)
  for i, entry in ipairs(given) do
    again[2 * i - 1] = now() + GIVEN_S
    again[2 * i] = entry
  end
  batched('ZADD', BASE .. ':gone', again)
end
return {'ok', has_trash(), given}
