-- Payload in other slots that the ledger does not know: after a failover, the ledger may lack what was committed.
-- Seconds until it is deleted. A server that is about to learn that it is no longer the primary forgets it before.
local DOUBT_S = 15

-- Has clients delete the writes, up to CHUNK, to which no id refers now or later. Replies how many were not listed yet.
local function condemn(writes)
  if #writes == 0 then return 0 end
  local known = call('ZMSCORE', BASE .. ':pending', unpack(writes))
  local function look(set)
    for i, found in ipairs(call('SMISMEMBER', set, unpack(writes))) do known[i] = known[i] or found == 1 end
  end
  local epochs = call('HGETALL', BASE .. ':parts')
  if #epochs == 0 or call('EXISTS', BASE .. ':pending') == 0 then return 0 end  -- lost: nobody knows what is referred to
  for i = 2, #epochs, 2 do
    if epochs[i] ~= '' then  -- else it is that of the MARK
      local set = BASE .. ':e:' .. epochs[i] .. ':u'
      if call('EXISTS', set) == 0 then return 0 end
      look(set)
    end
  end
  for _, epoch in ipairs(call('SRANDMEMBER', BASE .. ':trash', 1e9)) do look(BASE .. ':trash:' .. epoch) end
  local gone = {}
  for i, write in ipairs(writes) do
    if not known[i] then gone[#gone + 1], gone[#gone + 2] = now() + DOUBT_S, write end
  end
  return #gone > 0 and call('ZADD', BASE .. ':gone', 'NX', unpack(gone)) or 0
end
