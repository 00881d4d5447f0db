-- Request: {client, text (its announcement), seconds (for which it is listed; 0: it closes)}. Replies {"ok", listed
-- clients}. Drops a few clients whose time is over.
local clients, ends = BASE .. ':clients', BASE .. ':announced'
if call('HLEN', clients) ~= call('ZCARD', ends) then call('UNLINK', clients, ends) end  -- one was lost: all announce again
if seconds > 0 then
  call('HSET', clients, client, string.format('%.6f', now()) .. ':' .. text)
  call('ZADD', ends, now() + seconds, client)
else
  call('ZADD', ends, 'XX', '0', client)
end
keep_time()
for _, over in ipairs(call('ZRANGEBYSCORE', ends, '-inf', now(), 'LIMIT', 0, 3)) do
  call('HDEL', clients, over)
  call('ZREM', ends, over)
end
return {'ok', call('HLEN', clients)}
