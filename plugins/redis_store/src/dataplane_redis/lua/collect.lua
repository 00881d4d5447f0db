-- Request: {limit, deleted}. Deletes up to `limit` writes of dropped registrations. Of payload in other slots, it replies
-- what the client must delete, up to `limit` entries of base:gone, and forgets the entries that the client has deleted.
-- What a client does not delete in time, another one gets. Replies also whether more is left, and in which history of the
-- server all payload was compared with the ledger, see sweep.lua.
-- Seconds until an entry is given to another client.
local GIVEN_S = 10
reap()
local listed, instance = BASE .. ':gone', BASE .. ':instance'
if SPREAD and not call('ZSCORE', listed, MARK) then  -- what it listed is found as after a failover
  call('ZADD', listed, '+inf', MARK)
  call('HDEL', instance, 'swept')
end
batched('ZREM', listed, deleted)
local trash = BASE .. ':trash'
local epoch = call('SRANDMEMBER', trash)
if epoch then
  local writes = call('SPOP', trash .. ':' .. epoch, limit)
  local keys, gone = {}, {}
  for _, write in ipairs(writes) do
    if lies_elsewhere(write) then gone[#gone + 1] = write else keys[#keys + 1] = key_of_write(write) end
  end
  list_gone(gone, 0)
  unlink(keys)
  if #writes < limit then call('SREM', trash, epoch) end
end
local given = {}
if SPREAD then
  given = call('ZRANGEBYSCORE', listed, '-inf', now(), 'LIMIT', 0, limit)
  list_gone(given, now() + GIVEN_S)
end
return {'ok', has_trash(), given, call('HGET', instance, 'swept') or ''}
