-- Claims that wait, and how they are woken. The rule is that of dataplane_core.ledger.waiting: a change wakes only as
-- many claims as there are samples for, in the order in which they came. They ask again then: nothing is handed to a
-- client that may be gone. A claim also asks by itself from time to time, so a lost message only delays it.
--
--   wq            zset  questions; the next change looks at the first ones, which then go to the end
--   wq:<digest>   zset  the claims that ask it, in the order in which they came: the id of a client (ID bytes), and the
--                       token of its claim
--   wk:<digest>   hash  "": the question, {view, filter, units}; a claim that was told to ask again -> when
--
-- The last two expire when nobody asked for a while, since clients may die. A client listens on the channel
-- base:wake:<its id>. A message is the token of a claim, or the write of a put that waits for room.
local ID = 8
-- How many questions a change looks at, and how many of them with filters. The claims of the others ask by themselves.
local QUESTIONS, FILTERS = 16, 4
-- Rows that a change may look at. If they do not suffice, a claim is woken, and finds out.
local WAKE_ROWS = 1000
-- A claim that was told to ask again, and did not within this many seconds, no longer waits.
local TOLD_S = 1
-- A question that nobody asked for this many seconds is forgotten. Claims that wait ask sooner than half of it.
local ASKED_S = 120

-- Tells a claim to ask again. False if its client does not listen.
local function tell_claim(waiter) return tell(string.sub(waiter, 1, ID), string.sub(waiter, ID + 1)) end

local function next_turn(P) return call('HINCRBY', P.meta, 'turn', 1) end

local function forget_question(P, digest)
  call('UNLINK', P.at .. 'wq:' .. digest, P.at .. 'wk:' .. digest)
  call('ZREM', P.at .. 'wq', digest)
end

local function digest_of(view_name, filter, units)
  return redis.sha1hex(view_name .. '|' .. units .. '|' .. filter)
end

-- A claim waits, or still waits. It keeps its place. Replies whether each change will look at its question.
local function start_waiting(P, digest, view_name, filter, units, waiter)
  local line, known = P.at .. 'wq:' .. digest, P.at .. 'wk:' .. digest
  if call('ZSCORE', line, waiter) then
    call('HDEL', known, waiter)
  else
    call('ZADD', line, next_turn(P), waiter)
    if not (call('HGET', known, '') and call('ZSCORE', P.at .. 'wq', digest)) then
      call('HSET', known, '', cmsgpack.pack({view_name, filter, units}))
      call('ZADD', P.at .. 'wq', next_turn(P), digest)
    end
  end
  if call('PTTL', line) < ASKED_S * 500 then
    call('PEXPIRE', line, ASKED_S * 1000)
    call('PEXPIRE', known, ASKED_S * 1000)
  end
  return call('ZCARD', P.at .. 'wq') <= (filter == '' and QUESTIONS or FILTERS)
end

-- A claim no longer waits. Replies whether it did.
local function stop_waiting(P, digest, waiter)
  local line = P.at .. 'wq:' .. digest
  if call('ZREM', line, waiter) == 0 then return false end
  call('HDEL', P.at .. 'wk:' .. digest, waiter)
  if call('EXISTS', line) == 0 then forget_question(P, digest) end
  return true
end

-- How many units are ready for a question, up to `most`. Infinite if a claim can be answered however many are ready. Nil
-- if the budget was spent before this is known.
local function num_ready(P, Q, least, most)
  if not catch_up(P, Q) then return nil end
  local count
  if Q.F then
    local units = gather(P, Q, least, most)
    if not units then return nil end
    count = #units
  else
    count = num_queued(Q.view)
    while count < most do
      if Q.budget <= 0 then return count >= least and count or nil end
      if not scan(P, Q) then break end
      count = num_queued(Q.view)
    end
  end
  if count >= least then return count end
  local more = more_may_come(P, Q, 0)
  if more == nil then return nil end
  return more and count or math.huge
end

-- Wakes the claims that ask a question and can be answered now. Replies what is left of the budget.
local function wake_question(P, digest, name, filter, units, budget)
  local line, known = P.at .. 'wq:' .. digest, P.at .. 'wk:' .. digest
  local Q = open_question(P, name, filter, budget)
  local left = num_ready(P, Q, units, units * call('ZCARD', line)) or units
  save_question(P, Q)
  local told, flat = {}, call('HGETALL', known)
  for i = 1, #flat, 2 do told[flat[i]] = flat[i + 1] end
  local time, seen, gone = now(), 0, {}
  while left >= units do
    local waiters = call('ZRANGE', line, seen, seen + 99)
    if #waiters == 0 then break end
    for _, waiter in ipairs(waiters) do
      if left < units then break end
      if not told[waiter] and tell_claim(waiter) then
        call('HSET', known, waiter, time)
        left = left - units
      elseif told[waiter] and time - tonumber(told[waiter]) < TOLD_S then
        left = left - units
      else
        gone[#gone + 1] = waiter
      end
    end
    seen = seen + #waiters
  end
  for _, waiter in ipairs(gone) do stop_waiting(P, digest, waiter) end
  return Q.budget
end

local function wake_claims(P)
  local digests = call('ZRANGE', P.at .. 'wq', 0, QUESTIONS - 1)
  local budget, filters = WAKE_ROWS, 0
  for _, digest in ipairs(digests) do
    local question = call('HGET', P.at .. 'wk:' .. digest, '')
    if not question then
      forget_question(P, digest)
    else
      local name, filter, units = unpack(cmsgpack.unpack(question))
      if filter ~= '' then filters = filters + 1 end
      if filter == '' or filters <= FILTERS then
        if #digests > 1 then call('ZADD', P.at .. 'wq', next_turn(P), digest) end
        budget = wake_question(P, digest, name, filter, units, budget)
      end
    end
  end
end

-- Wakes claims after a change of the partition.
local function wake(P)
  if call('EXISTS', P.at .. 'wq') == 1 then wake_claims(P) end
end

-- The keys of all questions. Wakes all claims, since the partition is about to be dropped.
local function end_waiting(P)
  local keys = {P.at .. 'wq'}
  for _, digest in ipairs(call('ZRANGE', P.at .. 'wq', 0, -1)) do
    for _, waiter in ipairs(call('ZRANGE', P.at .. 'wq:' .. digest, 0, -1)) do tell_claim(waiter) end
    keys[#keys + 1], keys[#keys + 2] = P.at .. 'wq:' .. digest, P.at .. 'wk:' .. digest
  end
  return keys
end
