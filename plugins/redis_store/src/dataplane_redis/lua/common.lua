-- What all scripts share. Keys are built from KEYS[1] = "dp:{namespace}", so that all of them lie in one hash slot.
-- Requests are one msgpack array in ARGV[1].
--
--   base:p:<partition>   hash: epoch, num, group, info, ntasks, seen, bytes, whole, t:<task> -> index,
--                        d:<index> -> samples done, w:<index> -> whole groups held, turn: see next_turn
--   base:w:<write>       hash: position -> joined cells of one row; written before the commit, never changed
--   base:e:<epoch>:      r   hash   id -> row: seq, then one ref (write, position, layout, bytes) per live write
--                        t   hash   id -> msgpack map of tags
--                        o   zset   id by seq: the order of first writes
--                        x   set    ids that were cleared, where num is set
--                        s   hash   field -> spec
--                        l   list   layouts: the field names of a write, in order; li: hash layout -> index
--                        u   set    writes that a row names
--                        g   hash   group -> {seq, poisoned, members...}
--                        h:<task>   hash  id -> "D" (given), "L<token>" (leased), "A<token>" (acked)
--                        q   zset   "<task>:<id>" by the time when its lease ends
--                        vw  hash   view "<task>:<required>" -> seq up to which rows were offered to it
--                        v:<view>   zset  claimable units (ids or groups) by seq
local BASE = KEYS[1]
local CHUNK = 1000
local REF = 24
local call = redis.call

local function now()
  local t = call('TIME')
  return tonumber(t[1]) + tonumber(t[2]) / 1e6
end

local function hmget(key, names)
  local n = #names
  if n == 0 then return {} end
  if n <= CHUNK then return call('HMGET', key, unpack(names)) end
  local out = {}
  for first = 1, n, CHUNK do
    local part = call('HMGET', key, unpack(names, first, math.min(first + CHUNK - 1, n)))
    for i = 1, #part do out[first + i - 1] = part[i] end
  end
  return out
end

-- One command over many arguments, in chunks of an even size.
local function batched(command, key, args)
  for first = 1, #args, CHUNK do
    call(command, key, unpack(args, first, math.min(first + CHUNK - 1, #args)))
  end
end

local function key_of_write(write)
  return BASE .. ':w:' .. string.format('%.0f', write)
end

local function open_partition(name)
  local meta = BASE .. ':p:' .. name
  local m = call('HMGET', meta, 'epoch', 'num', 'group', 'ntasks')
  if not m[1] then return nil end
  return {
    name = name, meta = meta, epoch = tonumber(m[1]), num = tonumber(m[2]), group = tonumber(m[3]),
    ntasks = tonumber(m[4]), at = BASE .. ':e:' .. m[1] .. ':', memo = {},
  }
end

-- Counts what may make known rows claimable, so that a claim of several scripts knows whether something did meanwhile.
local function next_turn(P)
  call('HINCRBY', P.meta, 'turn', 1)
end

local function unknown_partition()
  local names = call('SRANDMEMBER', BASE .. ':parts', 6)
  return {'unknown_partition', names}
end

local function task_index(P, task)
  return call('HGET', P.meta, 't:' .. task)
end

local function unknown_task(P)
  local names = {}
  for _, field in ipairs(call('HKEYS', P.meta)) do
    if string.sub(field, 1, 2) == 't:' then names[#names + 1] = string.sub(field, 3) end
  end
  return {'unknown_task', names}
end

-- --- rows ------------------------------------------------------------------------------------------------------------

local function seq_of(row)
  return (struct.unpack('<I8', row))
end

-- The layouts of a row's refs, as bytes: rows of equal signature hold the same fields.
local function signature(row)
  if #row == 8 + REF then return string.sub(row, 21, 24) end
  local parts = {}
  for at = 21, #row, REF do parts[#parts + 1] = string.sub(row, at, at + 3) end
  return table.concat(parts)
end

local function names_of(layout)
  local names, at = {}, 1
  while at <= #layout do
    local size = struct.unpack('<I4', layout, at)
    names[#names + 1] = string.sub(layout, at + 4, at + 3 + size)
    at = at + 4 + size
  end
  return names
end

local function layout_names(P, index)
  if not P.layouts then
    P.layouts = call('LRANGE', P.at .. 'l', 0, -1)
    P.names = {}
  end
  local names = P.names[index]
  if not names then
    names = names_of(P.layouts[index + 1])
    P.names[index] = names
  end
  return names
end

local function fields_of(P, sig)
  local set = P.memo[sig]
  if not set then
    set = {}
    for at = 1, #sig, 4 do
      for _, name in ipairs(layout_names(P, struct.unpack('<I4', sig, at))) do set[name] = true end
    end
    P.memo[sig] = set
  end
  return set
end

local function holds_all(P, sig, required)
  local set = fields_of(P, sig)
  for _, name in ipairs(required) do
    if not set[name] then return false end
  end
  return true
end

local function group_of(id)
  return string.match(id, '^(.*)_g')
end

-- Frees payload: `refs` is a list of ref byte strings.
local function free_refs(P, refs)
  local by_write, order, bytes = {}, {}, 0
  for _, ref in ipairs(refs) do
    local write, position, _, size = struct.unpack('<I8I4I4I8', ref)
    bytes = bytes + size
    if not by_write[write] then
      by_write[write] = {}
      order[#order + 1] = write
    end
    local list = by_write[write]
    list[#list + 1] = position
  end
  for _, write in ipairs(order) do
    local key = key_of_write(write)
    batched('HDEL', key, by_write[write])
    if call('EXISTS', key) == 0 then call('SREM', P.at .. 'u', string.format('%.0f', write)) end
  end
  if bytes > 0 then
    call('INCRBY', BASE .. ':held', string.format('%.0f', -bytes))
    call('HINCRBY', P.meta, 'bytes', string.format('%.0f', -bytes))
  end
end

-- Gives up puts that were begun and not committed in time.
local function reap()
  local pending = BASE .. ':pending'
  for _, write in ipairs(call('ZRANGEBYSCORE', pending, '-inf', string.format('%.6f', now()), 'LIMIT', 0, 100)) do
    local size = call('HGET', BASE .. ':reserved', write)
    if size then
      call('INCRBY', BASE .. ':held', '-' .. size)
      call('HDEL', BASE .. ':reserved', write)
    end
    call('ZREM', pending, write)
    call('UNLINK', BASE .. ':w:' .. write)
  end
end

-- --- views and units -------------------------------------------------------------------------------------------------

local function open_view(P, name, mark)
  local colon = string.find(name, ':', 1, true)
  return {
    name = name, task = string.sub(name, 1, colon - 1), required = names_of(string.sub(name, colon + 1)),
    mark = tonumber(mark), ready = P.at .. 'v:' .. name,
  }
end

local function views_of(P, task)
  if not P.views then
    P.views = {}
    local flat = call('HGETALL', P.at .. 'vw')
    for i = 1, #flat, 2 do P.views[#P.views + 1] = open_view(P, flat[i], flat[i + 1]) end
  end
  if not task then return P.views end
  local mine = {}
  for _, view in ipairs(P.views) do
    if view.task == task then mine[#mine + 1] = view end
  end
  return mine
end

local function load_groups(P, names)
  local packed, groups = hmget(P.at .. 'g', names), {}
  for i, name in ipairs(names) do
    if packed[i] then
      local g = cmsgpack.unpack(packed[i])
      groups[name] = {seq = g[1], poisoned = g[2] == 1, members = {unpack(g, 3)}}
    end
  end
  return groups
end

local function save_groups(P, names, groups)
  local args = {}
  for _, name in ipairs(names) do
    local g = groups[name]
    args[#args + 1] = name
    args[#args + 1] = cmsgpack.pack({g.seq, g.poisoned and 1 or 0, unpack(g.members)})
  end
  batched('HSET', P.at .. 'g', args)
end

local function is_whole(P, g)
  return g and not g.poisoned and #g.members == P.group
end

local function distinct_groups(ids)
  local seen, names = {}, {}
  for _, id in ipairs(ids) do
    local name = group_of(id)
    if name and not seen[name] then
      seen[name] = true
      names[#names + 1] = name
    end
  end
  return names
end

local function none_held(values)
  for i = 1, #values do
    if values[i] then return false end
  end
  return true
end

-- Queues what is claimable: rows `ids` (with their `rows`), or the groups that they belong to.
local function offer(P, views, ids, rows)
  if #views == 0 or #ids == 0 then return end
  local queued = {}
  for i = 1, #views do queued[i] = {} end
  if not P.group then
    local held = {}
    for i, view in ipairs(views) do
      held[view.task] = held[view.task] or hmget(P.at .. 'h:' .. view.task, ids)
      local mine, args, verdicts = held[view.task], queued[i], {}
      for j, row in ipairs(rows) do
        local sig = signature(row)
        if verdicts[sig] == nil then verdicts[sig] = holds_all(P, sig, view.required) end
        if verdicts[sig] and not mine[j] then
          local seq = seq_of(row)
          if seq <= view.mark then
            args[#args + 1] = string.format('%.0f', seq)
            args[#args + 1] = ids[j]
          end
        end
      end
    end
  else
    local names = distinct_groups(ids)
    local groups = load_groups(P, names)
    for _, name in ipairs(names) do
      local g = groups[name]
      if is_whole(P, g) then
        local members, held = hmget(P.at .. 'r', g.members), {}
        for i, view in ipairs(views) do
          if held[view.task] == nil then held[view.task] = none_held(hmget(P.at .. 'h:' .. view.task, g.members)) end
          local ready = held[view.task]
          for j = 1, #members do
            if not ready then break end
            ready = members[j] and holds_all(P, signature(members[j]), view.required)
          end
          if ready then
            local args = queued[i]
            args[#args + 1] = string.format('%.0f', g.seq)
            args[#args + 1] = name
          end
        end
      end
    end
  end
  for i, view in ipairs(views) do batched('ZADD', view.ready, queued[i]) end
end

-- Ends the holds of a task on `ids`, all held; what is claimable again is queued.
local function give_back(P, task, ids)
  local marks = {}
  for i, id in ipairs(ids) do marks[i] = task .. ':' .. id end
  batched('HDEL', P.at .. 'h:' .. task, ids)
  batched('ZREM', P.at .. 'q', marks)
  next_turn(P)
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
end

-- Gives back what leases ran out on.
local function expire(P)
  local queue = P.at .. 'q'
  local limit = string.format('%.6f', now())
  while true do
    local due = call('ZRANGEBYSCORE', queue, '-inf', limit, 'LIMIT', 0, CHUNK)
    if #due == 0 then return end
    local by_task, order = {}, {}
    for _, mark in ipairs(due) do
      local colon = string.find(mark, ':', 1, true)
      local task = string.sub(mark, 1, colon - 1)
      if not by_task[task] then
        by_task[task] = {}
        order[#order + 1] = task
      end
      local list = by_task[task]
      list[#list + 1] = string.sub(mark, colon + 1)
    end
    for _, task in ipairs(order) do give_back(P, task, by_task[task]) end
  end
end
