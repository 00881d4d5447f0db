-- Replies {"ok", announcement of a client, seconds since, seconds for which it was to be listed, ...} of all that are kept.
local found = {'ok'}
if call('HLEN', BASE .. ':clients') ~= call('ZCARD', BASE .. ':announced') then lost('clients') end
for _, client in ipairs(call('ZRANGEBYSCORE', BASE .. ':announced', '(' .. string.format('%.6f', now()), '+inf')) do
  local at, seconds, text = string.match(call('HGET', BASE .. ':clients', client), '^([^:]*):([^:]*):(.*)$')
  found[#found + 1], found[#found + 2] = text, string.format('%.6f', math.max(0, now() - tonumber(at)))
  found[#found + 1] = seconds
end
return found
