-- The queue of puts that wait for room, in order of arrival. The rule is that of dataplane_core.ledger.room, but
-- waiting puts ask more often here, so a put whose client died is noticed sooner: after KEPT_S instead of 30 s. A put whose
-- client listens is told when there is room for it. It also asks by itself, since it may pass others, and since a message
-- may be lost.
--
--   base:line      zset  the writes of puts that wait, in the order in which they came
--   base:waiting   hash  write -> {bytes, when it came, until when it is kept, bytes of later puts that went ahead,
--                       the client that listens or ""}
--   base:freed     when room last became free
local LINE, WAITING = BASE .. ':line', BASE .. ':waiting'
-- A put that did not ask again for this many seconds is dropped from the queue.
local KEPT_S = 10
-- If no room became free for this many seconds, later puts may pass those that wait.
local QUIET_S = 1
-- Seconds until the next question: for the first put, for each put ahead of it in addition, and at most. If the client
-- listens, at least.
local PAUSE_S, PAUSE_MOST_S, PAUSE_LISTENS_S = 0.01, 2, 0.5

local function save_waiting(waiting)
  local packed = cmsgpack.pack({waiting.bytes, waiting.came, waiting.kept, waiting.passed, waiting.client})
  call('HSET', WAITING, waiting.write, packed)
end

-- A put leaves the queue. Replies whether it was there.
local function leave_line(write)
  if call('ZREM', LINE, write) == 0 then return false end
  call('HDEL', WAITING, write)
  return true
end

-- Whether a put that would fit may take its room: it leaves enough for those that wait ahead of it, or may pass them.
-- If it `enters`, its bytes are added to those that passed them.
local function may_enter(write, bytes, free, capacity, enters)
  local time, sum, quiet, may_pass, ahead, seen = now(), bytes, nil, true, {}, 0
  while true do
    local writes = call('ZRANGE', LINE, seen, seen + 99)
    for _, each in ipairs(writes) do
      if each == write then writes = {} break end
      local waiting = read_waiting(each)
      if not waiting or waiting.kept <= time then
        leave_line(each)
      else
        seen = seen + 1
        ahead[seen] = waiting
        sum = sum + waiting.bytes
        if quiet == nil then
          quiet = time - math.max(tonumber(call('GET', BASE .. ':freed') or 0), waiting.came) >= QUIET_S
        end
        may_pass = may_pass and quiet and waiting.passed + bytes <= capacity
        if sum > free and not may_pass then return false end
      end
    end
    if #writes == 0 then break end
  end
  if sum > free and enters then
    for _, waiting in ipairs(ahead) do
      waiting.passed = waiting.passed + bytes
      save_waiting(waiting)
    end
  end
  return true
end

-- Nil if a put may take its room now, as it will if it `enters`. Else it joins the queue for `wait_s` seconds (0: it
-- does not wait), and this is the reply: {"full", bytes held, puts ahead of it, seconds until it asks again}. `client`
-- is told when there is room; "": it does not listen.
local function refuse_room(write, bytes, capacity, wait_s, client, enters)
  local held = tonumber(call('HGET', BASE .. ':instance', 'held') or 0)
  if held + bytes <= capacity and may_enter(write, bytes, capacity - held, capacity, enters) then return nil end
  if wait_s <= 0 or bytes > capacity then return {'full', held, call('ZCARD', LINE), '0'} end
  local time = now()
  local waiting = call('ZSCORE', LINE, write) and read_waiting(write)
  if not waiting then
    local last = call('ZREVRANGE', LINE, 0, 0, 'WITHSCORES')
    call('ZADD', LINE, (tonumber(last[2]) or 0) + 1, write)
    waiting = {write = write, bytes = bytes, came = time, kept = 0, passed = 0, client = client}
  end
  if waiting.kept - time < KEPT_S / 2 or waiting.client ~= client then
    waiting.client = client
    waiting.kept = time + math.min(wait_s, KEPT_S)
    save_waiting(waiting)
  end
  local before = call('ZRANK', LINE, write)
  local pause_s = math.max(client == '' and 0 or PAUSE_LISTENS_S, PAUSE_S * (1 + before))
  return {'full', held, before, string.format('%.3f', math.min(PAUSE_MOST_S, pause_s))}
end
