-- Leases. A task's hold on a row refers to a lease by number, so settling a claim changes one lease and not each row.
--
--   k   hash   number -> {kind, task, rows held, rows given, token, holder, parts, the time when it was given}
--   q   zset   number by the time when the lease ends
--   a   hash   "<number>:<part>" -> the ids of a part; some may have left the lease
--
-- Kinds: P a claim is filling it, L leased, A acked, D given for good, E ended (its rows return to the pool in parts).
-- Rows join a lease only while it is filled, and may leave it at any time.
local PART = 1000

local function read_lease(P, number)
  P.leases = P.leases or {}
  local lease = P.leases[number]
  if lease == nil then
    local packed = call('HGET', P.at .. 'k', number)
    lease = false
    if packed then
      lease = {number = number}
      lease.kind, lease.task, lease.rows, lease.given, lease.token, lease.holder, lease.parts,
        lease.since = unpack(cmsgpack.unpack(packed))
    end
    P.leases[number] = lease
  end
  return lease
end

local function save_lease(P, lease)
  local packed = cmsgpack.pack({
    lease.kind, lease.task, lease.rows, lease.given, lease.token, lease.holder, lease.parts, lease.since,
  })
  call('HSET', P.at .. 'k', lease.number, packed)
end

local function new_lease(P, kind, task, token, holder)
  local number = string.format('%.0f', call('HINCRBY', P.meta, 'lease', 1))
  local lease = {
    number = number, kind = kind, task = task, rows = 0, given = 0, token = token, holder = holder, parts = 0,
    since = now(),
  }
  P.leases = P.leases or {}
  P.leases[number] = lease
  return lease
end

local function ends_in(P, lease, seconds)
  lease.ends = now() + seconds
  call('ZADD', P.at .. 'q', lease.ends, lease.number)
end

-- When a lease ends. 0: it has no end.
local function end_of(P, lease)
  lease.ends = lease.ends or tonumber(call('ZSCORE', P.at .. 'q', lease.number) or 0)
  return lease.ends
end

-- The lease of a hold. False if it was acked or given for good.
local function unsettled_lease(P, hold)
  local lease = hold ~= 'D' and read_lease(P, hold)
  return lease and lease.kind ~= 'A' and lease.kind ~= 'D' and lease
end

-- Rows that never return to the pool need no list of ids, and no end.
local function forget_parts(P, lease)
  local fields = {}
  for part = 1, lease.parts do fields[part] = lease.number .. ':' .. part end
  batched('HDEL', P.at .. 'a', fields)
  call('ZREM', P.at .. 'q', lease.number)
  lease.parts = 0
end

local function drop_lease(P, lease)
  forget_parts(P, lease)
  call('HDEL', P.at .. 'k', lease.number)
  P.leases[lease.number] = false
end

-- Gives rows to a task: for good ("D"), or under the lease with a number.
local function hold_rows(P, task, ids, hold)
  local args = {}
  for i, id in ipairs(ids) do args[2 * i - 1], args[2 * i] = id, hold end
  set_fields(P.at .. 'h:' .. task, args)
end

-- Puts rows into a lease. The caller saves the lease.
local function add_rows(P, lease, ids)
  hold_rows(P, lease.task, ids, lease.number)
  for first = 1, #ids, PART do
    lease.parts = lease.parts + 1
    local part = {unpack(ids, first, math.min(first + PART - 1, #ids))}
    call('HSET', P.at .. 'a', lease.number .. ':' .. lease.parts, cmsgpack.pack(part))
  end
  lease.rows = lease.rows + #ids
  lease.given = lease.given + #ids
end

local function give_for_good(P, lease, kind)
  lease.kind, lease.holder = kind, ''
  call('HINCRBY', P.meta, 'd:' .. lease.task, lease.rows)
  forget_parts(P, lease)
  save_lease(P, lease)
end

-- Ends the holds of a task on `ids`, all of which it holds. Queues the units that are claimable again.
local function give_back(P, task, ids)
  if #ids == 0 then return end
  batched('HDEL', P.at .. 'h:' .. task, ids)
  if P.group then
    local names = distinct_groups(ids)
    local groups = load_groups(P, names)
    for _, name in ipairs(names) do
      local g = groups[name]
      if is_whole(P, g) and none_held(hmget(P.at .. 'h:' .. task, g.members)) then
        call('HINCRBY', P.meta, 'w:' .. task, -1)
      end
    end
  end
  offer(P, views_of(P, task), ids, hmget(P.at .. 'r', ids))
  changed(P, units_of(P, ids))
end

local function end_lease(P, lease)
  lease.kind = 'E'
  save_lease(P, lease)
  call('ZADD', P.at .. 'q', '0', lease.number)
end

-- Returns about `budget` rows of ended leases to the pool. Replies whether these were all.
local function end_due(P, budget)
  keep_time()
  local queue, limit = P.at .. 'q', now()
  while true do
    local number = call('ZRANGEBYSCORE', queue, '-inf', limit, 'LIMIT', 0, 1)[1]
    if not number then return true end
    if budget <= 0 then return false end
    local lease = read_lease(P, number)
    if lease.kind ~= 'E' then end_lease(P, lease) end
    if lease.parts > 0 then
      local field, mine = number .. ':' .. lease.parts, {}
      local ids = cmsgpack.unpack(call('HGET', P.at .. 'a', field) or lost('a'))
      for i, hold in ipairs(hmget(P.at .. 'h:' .. lease.task, ids)) do
        if hold == number then mine[#mine + 1] = ids[i] end
      end
      give_back(P, lease.task, mine)
      call('HDEL', P.at .. 'a', field)
      lease.parts = lease.parts - 1
      lease.rows = lease.rows - #mine
      budget = budget - #ids
    end
    if lease.parts == 0 then drop_lease(P, lease) else save_lease(P, lease) end
    budget = budget - 3  -- what a lease costs besides its rows
  end
end

-- Seconds until the next lease ends, as a string. '' if there is none.
local function next_end(P)
  local first = call('ZRANGE', P.at .. 'q', 0, 0, 'WITHSCORES')
  return first[1] ~= MARK and string.format('%.6f', math.max(0, tonumber(first[2]) - now())) or ''
end
