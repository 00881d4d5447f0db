-- Payload in other slots that the ledger does not know: after a failover, the ledger may lack what was committed.
-- Seconds until it is deleted. A server that is about to learn that it is no longer the primary forgets it before.
local DOUBT_S = 15

-- Whether an id may refer to a write, now or later.
local function is_known(write)
  if call('ZSCORE', BASE .. ':pending', write) then return true end
  for _, name in ipairs(call('SMEMBERS', BASE .. ':parts')) do
    local epoch = call('HGET', BASE .. ':p:' .. name, 'epoch')
    if epoch and call('SISMEMBER', BASE .. ':e:' .. epoch .. ':u', write) == 1 then return true end
  end
  for _, epoch in ipairs(call('SMEMBERS', BASE .. ':trash')) do
    if call('SISMEMBER', BASE .. ':trash:' .. epoch, write) == 1 then return true end
  end
  return false
end

-- Has clients delete the writes that the ledger does not know. Replies how many were not listed yet.
local function condemn(writes)
  local count = 0
  for _, write in ipairs(writes) do
    if not is_known(write) then
      count = count + call('ZADD', BASE .. ':gone', 'NX', string.format('%.6f', now() + DOUBT_S), write)
    end
  end
  return count
end
