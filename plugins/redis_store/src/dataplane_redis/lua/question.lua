-- What a claim asks: the ready units of a view, or those of them that match a filter, in order of first write.
-- `Q.budget` is about how many rows a script may still look at for it.
--
--   Q.view, Q.F   the view, and the filter's state (nil: no filter)
-- Seconds after which a queue expires whose view saw no new rows. If the list of the views was lost, nothing else names
-- it. The next claim makes it again.
local QUEUE_S = 24 * 3600
local function open_question(P, view_name, filter, budget)
  local Q = {budget = budget}
  for _, view in ipairs(views_of(P)) do Q.view = view.name == view_name and view or Q.view end
  if not Q.view then
    Q.view = open_view(P, view_name)
    P.views[#P.views + 1] = Q.view
  end
  Q.units = math.max(1, math.floor(CHUNK / (P.group or 1)))  -- units looked at per step
  Q.held = P.at .. 'h:' .. Q.view.task
  local is_listed, is_there = Q.view.kept ~= nil, call('EXISTS', Q.view.ready) == 1
  if is_listed ~= is_there then unlink(filter_keys(P)) end  -- one was lost: what filters have seen of it is not so now
  if not (is_listed and is_there) then  -- all rows are offered to it, again if it was lost
    Q.view.mark, Q.view.kept = 0, nil
    call('UNLINK', Q.view.ready)
    call('ZADD', Q.view.ready, '0', MARK)
  end
  if filter ~= '' then Q.F = open_filter(P, Q.view, filter) end
  return Q
end

local function save_question(P, Q)
  local view = Q.view
  if view.mark ~= view.kept then
    call('HSET', P.at .. 'vw', view.name, view.mark)
    call('PEXPIRE', view.ready, QUEUE_S * 1000)
  end
  view.kept = view.mark
  if Q.F then save_filter(P, Q.F) end
end

-- The next rows that the view has not seen, in order of first write. Nil if there are none.
local function next_ids(P, Q)
  local ids, seqs = members_after(P.at .. 'o', Q.view.mark, Q.units)
  if #ids == 0 then return nil end
  Q.view.mark = tonumber(seqs[#seqs])
  Q.budget = Q.budget - #ids
  return ids
end

-- Offers the next rows to the view. False if there are none.
local function scan(P, Q)
  local ids = next_ids(P, Q)
  if not ids then return false end
  Q.budget = Q.budget - offer(P, {Q.view}, ids, P.group and {} or hmget(P.at .. 'r', ids))
  return true
end

-- --- filters ---------------------------------------------------------------------------------------------------------

-- For each unit: whether it exists, is whole, and all its rows match.
local function judged(P, F, units)
  local verdicts = {}
  if not P.group then
    local tags = hmget(P.at .. 't', units)
    for i = 1, #units do verdicts[i] = matches(tags[i], F.conditions) end
    return verdicts
  end
  local groups = load_groups(P, units)
  for i, unit in ipairs(units) do
    local g = groups[unit]
    verdicts[i] = is_whole(P, g) and group_matches(hmget(P.at .. 't', g.members), F.conditions)
  end
  return verdicts
end

local function unheld(P, Q, unit)
  if not P.group then return call('HEXISTS', Q.held, unit) == 0 end
  local g = load_groups(P, {unit})[unit]
  return g and none_held(hmget(Q.held, g.members))
end

local function write_filter(F, command, key, args)
  if #args > 0 then
    batched(command, key, args)
    F.wrote = true
  end
end

-- Follows the changes of known units. False if the budget was spent before the end.
local function follow(P, Q)
  local F, ready_key = Q.F, Q.view.ready
  while true do
    local units, notes = members_after(P.at .. 'c', F.seen, Q.units)
    if #units == 0 then return true end
    if Q.budget <= 0 then return false end
    local ready, good, enter, leave, coming, known = ask_many('ZMSCORE', ready_key, units), judged(P, F, units), {}, {}, {}, {}
    for i, unit in ipairs(units) do
      if ready[i] and good[i] and tonumber(ready[i]) <= tonumber(F.at) then
        enter[#enter + 1], enter[#enter + 2] = ready[i], unit
      else
        leave[#leave + 1] = unit
      end
      local list = P.num and good[i] and not ready[i] and unheld(P, Q, unit) and coming or known
      list[#list + 1] = unit
    end
    write_filter(F, 'ZADD', F.matching, enter)
    write_filter(F, 'ZREM', F.matching, leave)
    write_filter(F, 'SADD', F.coming, coming)
    write_filter(F, 'SREM', F.coming, known)
    F.seen = notes[#notes]
    Q.budget = Q.budget - #units * (P.group or 1)
  end
end

-- Looks at the next ready units that the filter has not seen. False if there are none.
local function look(P, Q, count)
  local F = Q.F
  local units, seqs = members_after(Q.view.ready, F.at, math.min(Q.units, math.max(count, 100)))
  if #units == 0 then return false end
  local enter = {}
  for i, good in ipairs(judged(P, F, units)) do
    if good then enter[#enter + 1], enter[#enter + 2] = seqs[i], units[i] end
  end
  write_filter(F, 'ZADD', F.matching, enter)
  F.at = seqs[#seqs]
  Q.budget = Q.budget - #units * (P.group or 1)
  return true
end

-- Whether some unit matches and is neither ready nor held. Nil if the budget was spent before this is known.
local function one_is_coming(P, Q)
  local F = Q.F
  while true do
    local some = call('SRANDMEMBER', F.coming, math.min(Q.units, 100))
    if #some > 0 then
      local ready, good, gone = ask_many('ZMSCORE', Q.view.ready, some), judged(P, F, some), {}
      for i, unit in ipairs(some) do
        if good[i] and not ready[i] and unheld(P, Q, unit) then return true end
        gone[#gone + 1] = unit
      end
      write_filter(F, 'SREM', F.coming, gone)
      Q.budget = Q.budget - #some * (P.group or 1)
      if Q.budget <= 0 then return nil end
    else
      local rows, seqs = members_after(P.at .. 'o', F.more, Q.units)
      if #rows == 0 then return false end
      if Q.budget <= 0 then return nil end
      local units, found = units_of(P, rows), {}
      local good = judged(P, F, units)
      for i, unit in ipairs(units) do
        if good[i] and unheld(P, Q, unit) then found[#found + 1] = unit end
      end
      write_filter(F, 'SADD', F.coming, found)
      F.more = seqs[#seqs]
      Q.budget = Q.budget - #units * (P.group or 1)
    end
  end
end

-- --- what is ready -------------------------------------------------------------------------------------------------

-- Looks at what is new since the question was asked last. False if the budget was spent before the end.
local function catch_up(P, Q)
  if P.group then  -- a group has the place of its first member, so all rows must be seen before the first group is given
    while scan(P, Q) do
      if Q.budget <= 0 then return false end
    end
  end
  if Q.F and not Q.F.is_new then return follow(P, Q) end
  return true
end

-- The next rows that are ready, where none is queued: up to `most`. Queues the others that it found. If these are fewer
-- than `least`, or fewer than `most` while the budget is spent and there may be more, queues all, and replies nil.
local function gather_new(P, Q, least, most)
  local found, ended = {}, false
  while #found < 2 * most and Q.budget > 0 do
    local ids = next_ids(P, Q)
    ended = not ids
    if ended then break end
    for _, each in ipairs(claimable(P, Q.view, ids, hmget(P.at .. 'r', ids))) do found[#found + 1] = each end
  end
  local units, rest = {}, {}
  local enough = #found >= 2 * (ended and math.max(least, 1) or most)
  for i = 1, #found, 2 do
    if enough and #units < most then
      units[#units + 1] = found[i + 1]
    else
      rest[#rest + 1], rest[#rest + 2] = found[i], found[i + 1]
    end
  end
  batched('ZADD', Q.view.ready, rest)
  return enough and units or nil
end

-- The first ready units, up to `most`. Empty if there are fewer than `least`. Nil if the budget was spent. Replies also
-- whether they were not queued.
local function gather(P, Q, least, most)
  local F = Q.F
  local source = F and F.matching or Q.view.ready
  local function num_in_source() return F and call('ZCARD', source) or num_queued(Q.view) end
  while true do
    local count = num_in_source()
    if count == 0 and not F and not P.group then
      local units = gather_new(P, Q, least, most)
      if units then return units, true end
      count = num_in_source()
    end
    while count < math.max(least, most) do
      if Q.budget <= 0 then return nil end
      local found = false
      if F then found = look(P, Q, most - count) end
      if not (found or scan(P, Q)) then break end
      count = num_in_source()
    end
    if count < least then return {} end
    if not F then return call('ZRANGE', source, 1, most) end
    local flat, units, gone = call('ZRANGE', source, 0, most - 1, 'WITHSCORES'), {}, {}
    for i = 1, #flat, 2 do units[#units + 1] = flat[i] end
    local ready, still = ask_many('ZMSCORE', Q.view.ready, units), {}
    for i, unit in ipairs(units) do  -- other clients may have claimed or cleared them
      local list = ready[i] == flat[2 * i] and still or gone
      list[#list + 1] = unit
    end
    if #gone == 0 then return still end
    write_filter(F, 'ZREM', F.matching, gone)
    Q.budget = Q.budget - #gone * (P.group or 1)
  end
end

-- Whether there are units that are neither held nor ready, and may become ready. Nil if the budget was spent before.
-- `unqueued` units are ready, and not in the view.
local function more_may_come(P, Q, unqueued)
  if not P.num or tonumber(call('HGET', P.meta, 'seen') or 0) < P.num then return true end
  local rest
  if P.group then
    local m = call('HMGET', P.meta, 'whole', 'w:' .. Q.view.task)
    rest = tonumber(m[1] or 0) - tonumber(m[2] or 0)
  else
    rest = call('ZCARD', P.at .. 'o') - call('HLEN', Q.held)  -- both have a mark
  end
  rest = rest - num_queued(Q.view) - unqueued
  if rest ~= 0 and Q.F then return one_is_coming(P, Q) end
  return rest ~= 0
end
