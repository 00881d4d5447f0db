-- Request: {partition, task, batch size, all_or_nothing, lease_s (-1: none), token, holder, required (sorted, as a
-- layout), filter (packed conditions, "": none), rows to look at, rows to give, lease ("" at first), client
-- ("": do not count it as a client that waits)}. "rows to look at" and "rows to give" are approximate limits of one
-- script, so that none blocks the server for long. Replies:
--
--   {"again"}                         ask again: the search is not finished, and its progress is kept
--   {"busy"}                          another claim of this task is still being given its parts: ask again
--   {"part", lease, ids, tags}        some of the samples: ask again with that lease for the next part
--   {"ok", exhausted, ids, tags}      the last samples of the claim
--   {"wait", epoch, change, seconds until a lease ends or "", clients that wait}   no samples. The answer stays the
--                                     same until the mark of the last change differs, or that lease ends
--   {"lost"}                          the parts given so far return to the pool: the next one was asked for too late,
--                                     or other clients cleared samples of it
local name, task_name, batch_size, all_or_nothing, lease_s, token, holder, required, filter, budget, most, number,
  client = unpack(cmsgpack.unpack(ARGV[1]))
-- A client that does not ask for the next part within this many seconds loses the parts that it was given.
local FILL_S = 5
-- Seconds for which a client is counted as one that waits.
local COUNTED_S = 15
local P = open_partition(name)
if not P then return unknown_partition() end
local task = task_index(P, task_name)
if not task then return unknown_task(P) end
local per_unit = P.group or 1
local UNITS = math.max(1, math.floor(CHUNK / per_unit))  -- units looked at per step
if batch_size % per_unit ~= 0 then return {'batch', per_unit} end
if not end_due(P, most) then return {'again'} end
local filling, lease = call('HGET', P.meta, 'r:' .. task), false
if filling then
  lease = read_lease(P, filling)
  if not lease or lease.kind ~= 'P' then
    call('HDEL', P.meta, 'r:' .. task)
    filling, lease = false, false
  end
end
if number ~= (filling or '') or (lease and lease.token ~= token) then return {number == '' and 'busy' or 'lost'} end

local view_name = task .. ':' .. required
local kept_mark = call('HGET', P.at .. 'vw', view_name)
local view = open_view(P, view_name, kept_mark or '0')
local order, held_key = P.at .. 'o', P.at .. 'h:' .. task
local F = filter ~= '' and open_filter(P, view, filter)
local want = batch_size / per_unit - (lease and lease.given / per_unit or 0)  -- units still to be given

-- Up to `count` members of a sorted set after a seq, and their seqs.
local function after(key, seq, count)
  local flat, members, seqs = call('ZRANGEBYSCORE', key, '(' .. seq, '+inf', 'WITHSCORES', 'LIMIT', 0, count), {}, {}
  for i = 1, #flat, 2 do
    members[#members + 1] = flat[i]
    seqs[#seqs + 1] = flat[i + 1]
  end
  return members, seqs
end

local function done(...)
  local mark = string.format('%.0f', view.mark)
  if mark ~= kept_mark then call('HSET', P.at .. 'vw', view_name, mark) end
  if F then save_filter(P, F) end
  return {...}
end

-- Offers the next rows to the view, in order of first write. False if there are none.
local function scan()
  local ids, seqs = after(order, string.format('%.0f', view.mark), UNITS)
  if #ids == 0 then return false end
  view.mark = tonumber(seqs[#seqs])
  budget = budget - #ids - offer(P, {view}, ids, P.group and {} or hmget(P.at .. 'r', ids))
  return true
end

-- --- filters ---------------------------------------------------------------------------------------------------------

-- For each unit: whether it exists, is whole, and all its rows match.
local function matching(units)
  local verdicts = {}
  if not P.group then
    local tags = hmget(P.at .. 't', units)
    for i = 1, #units do verdicts[i] = matches(tags[i], F.conditions) end
    return verdicts
  end
  local groups = load_groups(P, units)
  for i, unit in ipairs(units) do
    local g = groups[unit]
    verdicts[i] = is_whole(P, g)
    if verdicts[i] then
      for _, packed in ipairs(hmget(P.at .. 't', g.members)) do
        if not matches(packed, F.conditions) then verdicts[i] = false break end
      end
    end
  end
  return verdicts
end

local function unheld(unit)
  if not P.group then return call('HEXISTS', held_key, unit) == 0 end
  local g = load_groups(P, {unit})[unit]
  return g and none_held(hmget(held_key, g.members))
end

local function scores(key, units)
  local found = {}
  for first = 1, #units, CHUNK do
    local part = call('ZMSCORE', key, unpack(units, first, math.min(first + CHUNK - 1, #units)))
    for i = 1, #part do found[first + i - 1] = part[i] end
  end
  return found
end

local function write(command, key, args)
  if #args > 0 then
    batched(command, key, args)
    F.wrote = true
  end
end

-- Follows the changes of known units. False if the budget was spent before the end.
local function follow()
  while true do
    local units, notes = after(P.at .. 'c', F.seen, UNITS)
    if #units == 0 then return true end
    if budget <= 0 then return false end
    local ready, good, enter, leave, coming, known = scores(view.ready, units), matching(units), {}, {}, {}, {}
    for i, unit in ipairs(units) do
      if ready[i] and good[i] and tonumber(ready[i]) <= tonumber(F.at) then
        enter[#enter + 1] = ready[i]
        enter[#enter + 1] = unit
      else
        leave[#leave + 1] = unit
      end
      local list = P.num and good[i] and not ready[i] and unheld(unit) and coming or known
      list[#list + 1] = unit
    end
    write('ZADD', F.matching, enter)
    write('ZREM', F.matching, leave)
    write('SADD', F.coming, coming)
    write('SREM', F.coming, known)
    F.seen = notes[#notes]
    budget = budget - #units * per_unit
  end
end

-- Looks at the next ready units that the filter has not seen. False if there are none.
local function look(count)
  local units, seqs = after(view.ready, F.at, math.min(UNITS, math.max(count, 100)))
  if #units == 0 then return false end
  local enter = {}
  for i, good in ipairs(matching(units)) do
    if good then
      enter[#enter + 1] = seqs[i]
      enter[#enter + 1] = units[i]
    end
  end
  write('ZADD', F.matching, enter)
  F.at = seqs[#seqs]
  budget = budget - #units * per_unit
  return true
end

-- Whether some unit matches and is neither ready nor held. Nil if the budget was spent before this is known.
local function one_is_coming()
  while true do
    local some = call('SRANDMEMBER', F.coming, math.min(UNITS, 100))
    if #some > 0 then
      local ready, good, gone = scores(view.ready, some), matching(some), {}
      for i, unit in ipairs(some) do
        if good[i] and not ready[i] and unheld(unit) then return true end
        gone[#gone + 1] = unit
      end
      write('SREM', F.coming, gone)
      budget = budget - #some * per_unit
      if budget <= 0 then return nil end
    else
      local rows, seqs = after(order, F.more, UNITS)
      if #rows == 0 then return false end
      if budget <= 0 then return nil end
      local units, found = units_of(P, rows), {}
      local good = matching(units)
      for i, unit in ipairs(units) do
        if good[i] and unheld(unit) then found[#found + 1] = unit end
      end
      write('SADD', F.coming, found)
      F.more = seqs[#seqs]
      budget = budget - #units * per_unit
    end
  end
end

-- --- what is ready -------------------------------------------------------------------------------------------------

local step = math.min(want, math.max(1, math.floor(most / per_unit)))  -- the most that this script gives

-- The first ready units, up to `step`. Empty if there are fewer than `least`. Nil if the budget was spent.
local function gather(least)
  local source = F and F.matching or view.ready
  while true do
    local count = call('ZCARD', source)
    while count < math.max(least, step) do
      if budget <= 0 then return nil end
      if not (F and look(want - count) or scan()) then break end
      count = call('ZCARD', source)
    end
    if count < least then return {} end
    local flat, units, gone = call('ZRANGE', source, 0, step - 1, 'WITHSCORES'), {}, {}
    for i = 1, #flat, 2 do units[#units + 1] = flat[i] end
    if not F then return units end
    local ready, still = scores(view.ready, units), {}
    for i, unit in ipairs(units) do  -- other clients may have claimed or cleared them
      local list = ready[i] == flat[2 * i] and still or gone
      list[#list + 1] = unit
    end
    if #gone == 0 then return still end
    write('ZREM', F.matching, gone)
    budget = budget - #gone * per_unit
  end
end

-- Whether there are units that are neither held nor ready, and may become ready. Nil if the budget was spent before.
local function more_may_come()
  if not P.num or tonumber(call('HGET', P.meta, 'seen') or 0) < P.num then return true end
  local rest
  if P.group then
    local m = call('HMGET', P.meta, 'whole', 'w:' .. task)
    rest = tonumber(m[1] or 0) - tonumber(m[2] or 0)
  else
    rest = call('ZCARD', order) - call('HLEN', held_key)
  end
  rest = rest - call('ZCARD', view.ready)
  if rest == 0 or not F then return rest ~= 0 end
  return one_is_coming()
end

if P.group then  -- a group has the place of its first member, so all rows must be seen before the first group is given
  while scan() do
    if budget <= 0 then return done('again') end
  end
end
if F and not F.is_new and not follow() then return done('again') end
local units = gather(all_or_nothing == 1 and want or 1)
if not units then return done('again') end
local exhausted = false
if #units < step then
  local more = more_may_come()
  if more == nil then return done('again') end
  exhausted = not more
  if all_or_nothing == 1 and more then
    if lease then
      end_lease(P, lease)  -- other clients cleared samples of this claim
      return done('lost')
    end
    if client ~= '' then
      call('ZREMRANGEBYSCORE', BASE .. ':waiters', '-inf', string.format('%.6f', now()))
      call('ZADD', BASE .. ':waiters', string.format('%.6f', now() + COUNTED_S), client)
    end
    return done('wait', P.epoch, call('HGET', P.meta, 'change') or '', next_end(P), call('ZCARD', BASE .. ':waiters'))
  end
  if exhausted and all_or_nothing == 1 then units = gather(0) end
  if not units then return done('again') end
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
  for _, other in ipairs(views_of(P, task)) do batched('ZREM', other.ready, units) end
  if not kept_mark then batched('ZREM', view.ready, units) end
  if F then write('ZREM', F.matching, units) end
  if P.group then call('HINCRBY', P.meta, 'w:' .. task, #units) end
  if lease_s >= 0 or lease or not last then
    lease = lease or new_lease(P, 'P', task, token, holder)
    add_rows(P, lease, ids)
  else
    local holds = {}
    for i, id in ipairs(ids) do
      holds[2 * i - 1] = id
      holds[2 * i] = 'D'
    end
    batched('HSET', held_key, holds)
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
