-- Request: {name, task_name, batch_size, all_or_nothing, lease_s (-1: none), token, holder, required (sorted, as a
-- layout), filter (packed conditions, "": none), budget (rows to look at), most (rows to give), number (of the lease,
-- "" at first), client ("": it does not count as one that waits), waiter ("": it is not woken), stops (1: it stops
-- waiting now)}. "budget" and "most" are approximate limits of one script, so that none blocks the server for long.
-- Replies:
--
--   {"again"}                         ask again: the search is not finished, and its progress is kept
--   {"busy"}                          another claim of this task is still being given its parts: ask again
--   {"part", lease, ids, tags}        some of the samples: ask again with that lease for the next part
--   {"ok", exhausted, ids, tags}      the last samples of the claim
--   {"wait", epoch, change, seconds until a lease ends or "", clients that wait, whether it will be woken}   no
--                                     samples. The answer stays the same until the mark of the last change differs, or
--                                     that lease ends
--   {"lost"}                          the parts given so far return to the pool: the next one was asked for too late,
--                                     or other clients cleared samples of it
-- A client that does not ask for the next part within this many seconds loses the parts that it was given.
local FILL_S = 5
-- Seconds for which a client is counted as one that waits.
local COUNTED_S = 15
local P, task = open_partition(name, task_name, {'r', 't', 'o', 'l', 'k', 'q'})
if not P then return unknown_partition() end
if not task then return unknown_task(P) end
local per_unit = P.group or 1
if batch_size % per_unit ~= 0 then return {'batch', per_unit} end

-- Leases may have ended in this script, so others may be answered now.
local function reply(...)
  if P.is_changed then wake(P) end
  return {...}
end

if not end_due(P, most) then return reply('again') end
local filling, lease = call('HGET', P.meta, 'r:' .. task), false
if filling then
  lease = read_lease(P, filling)
  if not lease or lease.kind ~= 'P' then
    call('HDEL', P.meta, 'r:' .. task)
    filling, lease = false, false
  end
end
if number ~= (filling or '') or (lease and lease.token ~= token) then
  return reply(number == '' and 'busy' or 'lost')
end

local filled = lease and lease.given / per_unit or 0
local units_asked = batch_size / per_unit
local want = units_asked - filled  -- units still to be given
local view_name = task .. ':' .. required
local Q = open_question(P, view_name, filter, budget)
local digest
if waiter ~= '' then digest = digest_of(view_name, filter, units_asked) end

local function again()
  save_question(P, Q)
  return reply('again')
end

local function done(kind, ...)
  save_question(P, Q)
  if digest and (kind ~= 'wait' or stops == 1) then
    local waited = stop_waiting(P, digest, waiter)
    -- other questions may have no samples left either, and the change that woke this claim looked at a few of them only
    if waited and kind == 'ok' and (...) == 1 then P.is_changed = true end
  end
  return reply(kind, ...)
end

-- --- what is ready -------------------------------------------------------------------------------------------------

local step = math.min(want, math.max(1, math.floor(most / per_unit)))  -- the most that this script gives
if not catch_up(P, Q) then return again() end
local units, unqueued = gather(P, Q, all_or_nothing == 1 and want or 1, step)
if not units then return again() end
local exhausted = false
if #units < step then
  local more = more_may_come(P, Q, unqueued and #units or 0)
  if more == nil then return again() end
  exhausted = not more
  if all_or_nothing == 1 and more then
    if lease then
      end_lease(P, lease)  -- other clients cleared samples of this claim
      return done('lost')
    end
    if client ~= '' then
      call('ZREMRANGEBYSCORE', BASE .. ':waiters', '-inf', now())
      call('ZADD', BASE .. ':waiters', now() + COUNTED_S, client)
    end
    local is_woken = digest and stops == 0 and start_waiting(P, digest, view_name, filter, units_asked, waiter)
    return done('wait', P.epoch, call('HGET', P.meta, 'change') or '', next_end(P), call('ZCARD', BASE .. ':waiters'),
      is_woken and 1 or 0)
  end
  if exhausted and all_or_nothing == 1 then units, unqueued = gather(P, Q, 0, step) end
  if not units then return again() end
end

-- --- handing out -----------------------------------------------------------------------------------------------------

local ids = units
if P.group then
  ids = {}
  local groups = load_groups(P, units)
  for _, unit in ipairs(units) do
    for _, id in ipairs(groups[unit].members) do ids[#ids + 1] = id end
  end
end
local last = #units == want or #units < step
if #ids > 0 then
  leave_mark()
  for _, other in ipairs(views_of(P, task)) do
    if other ~= Q.view then batched('ZREM', other.ready, units) end
  end
  if not unqueued then batched('ZREM', Q.view.ready, units) end
  if Q.F then write_filter(Q.F, 'ZREM', Q.F.matching, units) end
  if P.group then call('HINCRBY', P.meta, 'w:' .. task, #units) end
  if lease_s >= 0 or lease or not last then
    lease = lease or new_lease(P, 'P', task, token, holder)
    add_rows(P, lease, ids)
  else
    hold_rows(P, task, ids, 'D')
    call('HINCRBY', P.meta, 'd:' .. task, #ids)
  end
  changed(P)
end
local tags = hmget(P.at .. 't', ids)
if not last then
  call('HSET', P.meta, 'r:' .. task, lease.number)
  save_lease(P, lease)
  ends_in(P, lease, FILL_S)
  return done('part', lease.number, ids, tags)
end
if lease then
  if filling then call('HDEL', P.meta, 'r:' .. task) end
  if lease_s >= 0 then
    lease.kind = 'L'
    save_lease(P, lease)
    ends_in(P, lease, lease_s)
  else
    give_for_good(P, lease, 'D')
  end
end
return done('ok', exhausted and 1 or 0, ids, tags)
