-- Request: {client, text (its announcement), seconds (for which it is listed; 0: it closes)}. Replies {"ok", listed
-- clients}. One that ended is kept ENDED_S longer, if these are not more than MOST_ENDED. Drops a few of the others.
local ENDED_S, MOST_ENDED = 600, 1000
local clients, ends = BASE .. ':clients', BASE .. ':announced'
if call('HLEN', clients) ~= call('ZCARD', ends) then call('UNLINK', clients, ends) end  -- one was lost: all announce again
call('HSET', clients, client, string.format('%.6f:%.6f:', now(), seconds) .. text)
-- a client that closes is not counted as listed, whatever the rounding
call('ZADD', ends, now() + ENDED_S + (seconds > 0 and seconds or -0.001), client)
keep_time()
local num_listed = call('ZCOUNT', ends, string.format('(%.6f', now() + ENDED_S), '+inf')
local over = call('ZRANGEBYSCORE', ends, '-inf', now(), 'LIMIT', 0, 3)
if #over == 0 and call('ZCARD', ends) - num_listed > MOST_ENDED then over = call('ZRANGE', ends, 0, 2) end
for _, each in ipairs(over) do
  call('HDEL', clients, each)
  call('ZREM', ends, each)
end
return {'ok', num_listed}
