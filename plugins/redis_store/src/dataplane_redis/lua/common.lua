-- What all scripts share. Keys are built from KEYS[1] = "dp:{namespace}", so that all of them lie in one hash slot.
-- A request is one msgpack array in ARGV[1]. The last argument identifies the caller: the id of the instance that the
-- client is connected to (32 characters), 16 random bytes of this call, and the time (8 bytes, see now). Clients draw
-- the ids of instances, registrations, writes and leases at random. A counter on the server would give ids twice after
-- the server restarts from an older state. In keys, ids are written in hex.
--
--   base:instance        hash: version, id, capacity_bytes, on_full; owner, while the client lives that bootstrapped
--                        it; clock: the time of the store in seconds, and the server's clock at that time; held:
--                        payload bytes; seq: the order of first writes; r:<write>: the payload bytes of a put that is
--                        begun and not committed
--   base:parts           hash: partition -> its epoch
--   base:pending         zset: puts begun and not committed, by the time when they count as abandoned
--   base:marks           hash: caller -> the number of its last call that acknowledged something, see below
--   base:clients         hash: client -> "<time>:<seconds for which it is listed>:<its announcement>"
--   base:announced       zset: these clients, by the time until when they are kept, see announce.lua
--   base:waiters         zset: clients with claims that wait, by the time until when they count
--   base:line, waiting, freed   puts that wait for room, see line.lua
--   base:why:<digest>    the shortfall of a claim that timed out, kept for a short time, see shortfall.lua
--   base:trash           set: dropped registrations; base:trash:<epoch>: their writes
--   base:gone            zset, if payload lies in other slots: that which clients must delete, by the time when: a write,
--                        or a write and the position of a row
--   base:p:<partition>   hash: epoch, num, group, info, ntasks, seen, cleared, bytes, whole, t:<task> -> index,
--                        d:<index> -> samples done, w:<index> -> whole groups held, change: the mark of the last
--                        change, noted: see changed, lease: the last lease's number, turn: see wakes.lua,
--                        r:<index> -> the lease that a claim is filling, early: if a task has consumed members of
--                        groups that were not whole
--   base:w:<write>       hash: position -> joined cells of one row; written before the commit, never changed. In a
--                        cluster, most rows lie in other slots, where no script reaches them, see lies_elsewhere
--   base:e:<epoch>:      r   hash   id -> row: seq, the time of the first write, then the refs (write, position, layout,
--                                   bytes) of its payload
--                        t   hash   id -> msgpack map of tags
--                        o   zset   id by seq: the order of first writes
--                        x   set    ids that were cleared, if num is set
--                        s   hash   field -> spec
--                        l   list   layouts: the fields of a write in order, with their specs; li: hash layout -> index
--                        u   set    writes that rows refer to
--                        uc  hash   such a write in other slots -> its rows that are still referred to
--                        n   hash   write and position of a row that several ids share -> how many
--                        g   hash   group -> seq, whether it is broken, how many members are held and how many
--                                   listed, and the list of the first MEMBERS ids that joined it, as msgpack
--                        gm  hash   "<group>:<part>" -> list of the next MEMBERS ids. A broken group adds no
--                                   more, since it is never handed out
--                        h:<task>   hash  id -> "D" (given for good) or the number of a lease, see leases.lua
--                        k, q, a    the leases
--                        vw  hash   view "<task>:<required>" -> seq up to which rows were offered to the view
--                        v:<view>   zset  claimable units (ids or groups) by seq
--                        c, fs, f:<digest>...  what filters that wait have seen, see waiting.lua
--                        wq, wq:<question>, wk:<question>   claims that wait to be woken, see wakes.lua
--
-- Redis deletes a key that is empty, and may evict one, or somebody deletes it. So that a missing key always means that
-- something was lost, base:parts, base:pending and the parts of a partition (parts_at) are never empty: each has a MARK
-- from the start, as a field, or as a member with the score 0 (in q, pending and gone: +inf). The keys that have none are
-- looked at where they are read (a, gm), or can be made again (li, vw, v:<view>, c, f:<digest>...).
local BASE = KEYS[1]
local CHUNK = 1000
local HEAD, REF = 16, 32  -- bytes of a row before its refs, and of each of them
local MEMBERS = 64
local MARK = '\255'  -- no name: it is not UTF-8
local call = redis.call

local ASKER = ARGV[#ARGV]
local INSTANCE = call('HMGET', BASE .. ':instance', 'id', 'clock', 'buckets')
if INSTANCE[1] ~= string.sub(ASKER, 1, 32) then return {'other_history'} end

-- Ends the script: a key is missing. See _LOST_PARTS in _protocol.py.
local function lost(part) error({err = 'LOST ' .. part}) end

-- A call that acknowledges something may also carry a mark: a caller, who makes one such call at a time, and a number
-- that grows. A script leaves it with its changes. Both are replicated and stored together, so a server that has the mark
-- has the changes.
local function leave_mark()
  if #ASKER <= 56 then return end
  local caller, number = struct.unpack('<c10I8', ASKER, 57)
  if number > tonumber(call('HGET', BASE .. ':marks', caller) or 0) then
    call('HSET', BASE .. ':marks', caller, number)
  end
end

-- The ids of requests that were carried out. They are kept, with what the request changed, until nobody repeats it. A
-- request without an id is not repeated.
local function is_done(request) return request ~= '' and call('EXISTS', BASE .. ':done:' .. request) == 1 end

local function keep_done(request, seconds)
  if request == '' then return end
  call('SET', BASE .. ':done:' .. request, '', 'PX', math.ceil(1000 * seconds))
end

-- The time of the store in seconds. It never goes back. Each client gets it when it connects, and adds the seconds of
-- its own monotonic clock; the store takes the largest. So a step of a host's clock neither ends nor prolongs leases.
-- The server's own clock is used only for how long nobody was connected (instance.lua).
local kept_time, this_time
local function now()
  if not this_time then
    kept_time = struct.unpack('<d', INSTANCE[2])
    this_time = math.max(kept_time, (struct.unpack('<d', ASKER, 49)))
  end
  return this_time
end

-- Stores the time about once per second only, so that a script that changes nothing else stays cheap even if every
-- change is synced to disk.
local function keep_time()
  if now() - kept_time < 1 then return end
  local t = call('TIME')
  kept_time = this_time
  call('HSET', BASE .. ':instance', 'clock', struct.pack('<dd', this_time, t[1] + t[2] / 1e6))
end

-- The replies of a command to many members.
local function ask_many(command, key, members)
  local out = {}
  for first = 1, #members, CHUNK do
    local part = call(command, key, unpack(members, first, math.min(first + CHUNK - 1, #members)))
    for i = 1, #part do out[first + i - 1] = part[i] end
  end
  return out
end

local function hmget(key, names)
  local n = #names
  if n == 0 then return {} end
  if n > CHUNK then return ask_many('HMGET', key, names) end
  return call('HMGET', key, unpack(names))
end

local function unlink(keys)
  for first = 1, #keys, CHUNK do call('UNLINK', unpack(keys, first, math.min(first + CHUNK - 1, #keys))) end
end

-- Up to `count` members of a sorted set after a seq, and their seqs.
local function members_after(key, seq, count)
  local flat, members, seqs = call('ZRANGEBYSCORE', key, '(' .. seq, '+inf', 'WITHSCORES', 'LIMIT', 0, count), {}, {}
  for i = 2, #flat, 2 do members[i / 2], seqs[i / 2] = flat[i - 1], flat[i] end
  return members, seqs
end

-- One command over many arguments, in chunks of an even size.
local function batched(command, key, args)
  for first = 1, #args, CHUNK do
    call(command, key, unpack(args, first, math.min(first + CHUNK - 1, #args)))
  end
end

-- Sets fields of a hash, which may come to have many. Redis searches a small hash (up to 512 fields, by default) from its
-- start, field by field. One long field makes it a table, and it stays one until it is empty.
local LONG_FIELD, MANY_FIELDS = string.rep('\255', 65), 32  -- no id: it is not UTF-8
local function set_fields(key, args)
  if #args == 0 then return end
  local count = call('HLEN', key)
  local becomes_table = count < MANY_FIELDS and count + #args / 2 >= MANY_FIELDS
  if becomes_table then call('HSET', key, LONG_FIELD, '') end
  batched('HSET', key, args)
  if becomes_table then call('HDEL', key, LONG_FIELD) end
end

-- Adds a value to the list of its key. `order` gets each key when it is first seen.
local function add_to(lists, order, key, value)
  local list = lists[key]
  if not list then
    list = {}
    lists[key] = list
    order[#order + 1] = key
  end
  list[#list + 1] = value
end

local function key_of_write(write)
  return BASE .. ':w:' .. string.format('%08x%08x%08x%08x', struct.unpack('>I4I4I4I4', write))
end

-- Whether a write's rows lie in other slots of the cluster. Then its number of groups is not 0, see _payload.py.
local SPREAD = tonumber(INSTANCE[3] or 1) > 1
local function lies_elsewhere(write) return SPREAD and string.sub(write, 3, 4) ~= '\0\0' end

-- Has clients delete payload in other slots, from a time on.
local function list_gone(entries, at)
  local args = {}
  for i, entry in ipairs(entries) do args[2 * i - 1], args[2 * i] = at, entry end
  batched('ZADD', BASE .. ':gone', args)
end

-- Deletes rows that no id refers to, or has clients do it. They no longer take up room.
local function delete_write(write)
  if lies_elsewhere(write) then call('ZADD', BASE .. ':gone', 0, write) else call('UNLINK', key_of_write(write)) end
end

-- 1 if `collect` has something to do now, else 0.
local function has_trash()
  if call('EXISTS', BASE .. ':trash') == 1 then return 1 end
  return SPREAD and #call('ZRANGEBYSCORE', BASE .. ':gone', '-inf', now(), 'LIMIT', 0, 1) or 0
end

-- A partition, and the index of one of its tasks, if a task is named. Nil if there is no such partition or task.
local function find_partition(name, task)
  local meta = BASE .. ':p:' .. name
  local m = call('HMGET', meta, 'epoch', 'num', 'group', 'ntasks', 't:' .. (task or ''), 'early')
  if not m[1] then return nil end
  return {
    name = name, meta = meta, epoch = m[1], num = tonumber(m[2]), group = tonumber(m[3]),
    ntasks = tonumber(m[4]), early = m[6], at = BASE .. ':e:' .. m[1] .. ':', memo = {},
  }, m[5] or nil
end

local function name_lost_part(P, keys)
  for _, key in ipairs(keys) do
    if call('EXISTS', key) == 0 then lost(string.match(string.sub(key, #P.at + 1), '^%a+')) end
  end
end

-- The partition is not there: ends the script if it should be.
local function check_unknown(name)
  local listed = call('HMGET', BASE .. ':parts', name, MARK)
  if listed[1] then lost('p') end
  if not listed[2] then lost('parts') end
end

-- The parts that a partition has from its registration on; x only with num, g only with groups, and h for each task.
local ALL_PARTS = {'r', 't', 'o', 's', 'l', 'u', 'n', 'k', 'q'}

-- As find_partition. Ends the script if one of these parts is missing, or what a task holds: the one that is named, or
-- any.
local function open_partition(name, task, parts)
  local P, index = find_partition(name, task)
  if not P then
    check_unknown(name)
    return nil
  end
  local at, keys, n = P.at, {}, #parts
  for i = 1, n do keys[i] = at .. parts[i] end
  for i = index or 0, index or P.ntasks - 1 do
    n = n + 1
    keys[n] = at .. 'h:' .. i
  end
  if P.num then keys[#keys + 1] = at .. 'x' end
  if P.group then keys[#keys + 1] = at .. 'g' end
  if call('EXISTS', unpack(keys)) < #keys then name_lost_part(P, keys) end
  return P, index
end

-- Marks a change after which a claim may get another answer. A claim that saw the same mark need not look again. The
-- mark is the 16 random bytes of this call, so it is never used twice, even if the server restarts from an older state.
-- While claims with filters wait, the known units (ids or groups) that changed are noted in order, so that these claims
-- look only at them.
local function changed(P, units)
  P.is_changed = true
  call('HSET', P.meta, 'change', string.sub(ASKER, 33, 48))
  if not units or #units == 0 or call('EXISTS', P.at .. 'c') == 0 then return end
  local args, last = {}, call('HINCRBY', P.meta, 'noted', #units)
  for i = 1, #units do args[2 * i - 1], args[2 * i] = last - #units + i, units[i] end
  batched('ZADD', P.at .. 'c', args)
end

local function unknown_partition()
  local names = {}
  for _, name in ipairs(call('HKEYS', BASE .. ':parts')) do
    if name ~= MARK and #names < 6 then names[#names + 1] = name end
  end
  return {'unknown_partition', names}
end

-- The names of all tasks, and the index of each.
local function tasks_of(P)
  local names, indices, flat = {}, {}, call('HGETALL', P.meta)
  for i = 1, #flat, 2 do
    if string.sub(flat[i], 1, 2) == 't:' then
      names[#names + 1] = string.sub(flat[i], 3)
      indices[#names] = flat[i + 1]
    end
  end
  return names, indices
end

local function unknown_task(P) return {'unknown_task', (tasks_of(P))} end

-- --- rows ------------------------------------------------------------------------------------------------------------

local function seq_of(row) return (struct.unpack('<I8', row)) end

-- The layouts of a row's refs, as bytes. Rows with equal signatures have the same fields.
local function signature(row)
  if #row == HEAD + REF then return string.sub(row, HEAD + 21, HEAD + 24) end
  local parts = {}
  for at = HEAD + 21, #row, REF do parts[#parts + 1] = string.sub(row, at, at + 3) end
  return table.concat(parts)
end

-- Packed strings: those of a layout are a field, its spec, the next field, ...
local function strings_of(packed)
  local strings, at = {}, 1
  while at <= #packed do
    local size = struct.unpack('<I4', packed, at)
    strings[#strings + 1] = string.sub(packed, at + 4, at + 3 + size)
    at = at + 4 + size
  end
  return strings
end

-- What a field may become that has an open spec. As FieldSpec._may_become.
local EMPTY, OF_INTS = 'tensor:unknown:1::empty', {int64 = true, float32 = true, float64 = true}
local function may_become(spec, other)
  if spec == EMPTY then return not string.match(other, '^tensor:[^:]+:0:') end
  local rank = string.match(spec, '^tensor:int64:(%d)::ints$')
  local dtype, other_rank = string.match(other, '^tensor:(%w+):(%d):$')
  return rank and rank == other_rank and OF_INTS[dtype]
end

-- The spec of a field after a write, or nothing if the write does not fit. As FieldSpec.after.
local function spec_after(kept, written)
  if not kept or kept == written or may_become(kept, written) then return written end
  if (written == EMPTY or written == kept .. ':ints') and may_become(written, kept) then return kept end
end

local function layout_names(P, index)
  if not P.layouts then
    P.layouts = call('LRANGE', P.at .. 'l', 0, -1)
    P.names = {}
  end
  local names = P.names[index]
  if not names then
    names = {}
    local strings = strings_of(P.layouts[index + 1])
    for i = 1, #strings, 2 do names[#names + 1] = strings[i] end
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

local function group_of(id) return string.match(id, '^(.*)_g') end

-- Sends a message to a client (8 bytes), see _wakes.py. False if it does not listen.
local function tell(client, message)
  local channel = BASE .. ':wake:' .. string.format('%08x%08x', struct.unpack('>I4I4', client))
  local heard = redis.pcall('SPUBLISH', channel, message)
  return type(heard) == 'table' or heard > 0  -- an error: this user may not publish. The client asks by itself later.
end

-- A put that waits for room, see line.lua.
local function read_waiting(write)
  local packed = call('HGET', BASE .. ':waiting', write)
  if not packed then return nil end
  local waiting = {write = write}
  waiting.bytes, waiting.came, waiting.kept, waiting.passed, waiting.client = unpack(cmsgpack.unpack(packed))
  return waiting
end

-- Tells the first puts of the queue to ask again, as many as there is room for. It looks at a few: when these have left
-- the queue, it looks again.
local function wake_puts()
  local writes = call('ZRANGE', BASE .. ':line', 0, 15)
  if #writes == 0 then return end
  local capacity, held = unpack(call('HMGET', BASE .. ':instance', 'capacity_bytes', 'held'))
  local free = (tonumber(capacity) or math.huge) - tonumber(held or 0)
  for _, write in ipairs(writes) do
    local waiting = read_waiting(write)
    if waiting then
      free = free - waiting.bytes
      if free < 0 then return end
      if waiting.client ~= '' then tell(waiting.client, write) end
    end
  end
end

-- Subtracts payload bytes that are no longer held.
local function free_room(bytes)
  if bytes == 0 then return end  -- the server does not accept '-0' as a number
  call('HINCRBY', BASE .. ':instance', 'held', -bytes)
  if call('EXISTS', BASE .. ':line') == 1 then
    call('SET', BASE .. ':freed', now())
    wake_puts()
  end
end

-- Frees what a put took that will not be committed.
local function free_put(write)
  local size = call('HGET', BASE .. ':instance', 'r:' .. write)
  call('HDEL', BASE .. ':instance', 'r:' .. write)
  free_room(tonumber(size or 0))
  delete_write(write)
end

-- Gives up a put that was begun and not committed, if there still is one.
local function give_up(write)
  if call('ZREM', BASE .. ':pending', write) == 0 then return false end
  free_put(write)
  return true
end

-- Notes how many ids have each row of a part, where it is more than one.
local function add_sharers(P, write, part)
  local counts, args = {}, {}
  for _, row in ipairs(part[3]) do counts[row] = (counts[row] or 0) + 1 end
  for row, count in pairs(counts) do
    if count > 1 then
      args[#args + 1], args[#args + 2] = struct.pack('<c16I4', write, part.first + row), count
    end
  end
  set_fields(P.at .. 'n', args)
end

-- The refs of a list that no other id has. Counts those of the others down.
local function unshared(P, refs)
  local key, rows, free, uses, order = P.at .. 'n', {}, {}, {}, {}
  for i, ref in ipairs(refs) do rows[i] = string.sub(ref, 1, 20) end
  local counts = hmget(key, rows)
  for i, ref in ipairs(refs) do
    if counts[i] then add_to(uses, order, rows[i], i) else free[#free + 1] = ref end
  end
  for _, row in ipairs(order) do
    local left = tonumber(counts[uses[row][1]]) - #uses[row]
    if left > 1 then call('HSET', key, row, left) else call('HDEL', key, row) end
    if left == 0 then free[#free + 1] = refs[uses[row][1]] end
  end
  return free
end

-- Gives up payload: `refs` is a list of ref byte strings, one for each id that had it. Frees what no id has any longer.
local function free_refs(P, refs)
  if #refs == 0 then return end
  if call('HLEN', P.at .. 'n') > 1 then refs = unshared(P, refs) end
  local by_write, order, bytes = {}, {}, 0
  for _, ref in ipairs(refs) do
    local write, position, _, size = struct.unpack('<c16I4I4I8', ref)
    bytes = bytes + size
    add_to(by_write, order, write, position)
  end
  for _, write in ipairs(order) do
    local key, is_empty = key_of_write(write), false
    if lies_elsewhere(write) then
      is_empty = call('HINCRBY', P.at .. 'uc', write, -#by_write[write]) == 0
      local gone = {write}
      for i, position in ipairs(is_empty and {} or by_write[write]) do gone[i] = write .. struct.pack('<I4', position) end
      list_gone(gone, 0)
      if is_empty then call('HDEL', P.at .. 'uc', write) end
    else
      batched('HDEL', key, by_write[write])
      is_empty = call('EXISTS', key) == 0
    end
    if is_empty then call('SREM', P.at .. 'u', write) end
  end
  if bytes > 0 then
    free_room(bytes)
    call('HINCRBY', P.meta, 'bytes', -bytes)
  end
end

-- The list of pending puts was lost: gives up all of them. Their clients get to know it at the commit.
local function give_up_all()
  call('ZADD', BASE .. ':pending', '+inf', MARK)
  for _, field in ipairs(call('HKEYS', BASE .. ':instance')) do
    if string.sub(field, 1, 2) == 'r:' then free_put(string.sub(field, 3)) end
  end
end

-- Aborts puts that were begun and not committed in time.
local function reap()
  keep_time()
  local pending = BASE .. ':pending'
  local count = call('ZCARD', pending)
  if count == 0 then give_up_all() end
  if count > 1 then
    for _, write in ipairs(call('ZRANGEBYSCORE', pending, '-inf', now(), 'LIMIT', 0, 100)) do give_up(write) end
  end
end

-- --- views and units -------------------------------------------------------------------------------------------------

local function open_view(P, name, mark)
  local colon = string.find(name, ':', 1, true)
  return {
    name = name, task = string.sub(name, 1, colon - 1), layout = string.sub(name, colon + 1),
    kept = tonumber(mark or nil), mark = tonumber(mark or 0), ready = P.at .. 'v:' .. name,
  }
end

-- Whether rows with a signature have the fields that a view requires.
local function holds_all(P, sig, view)
  view.required = view.required or strings_of(view.layout)
  local set = fields_of(P, sig)
  for _, name in ipairs(view.required) do
    if not set[name] then return false end
  end
  return true
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

local function load_heads(P, names)
  local packed, groups = hmget(P.at .. 'g', names), {}
  for i, name in ipairs(names) do
    if packed[i] then
      local seq, broken, count, listed, at = struct.unpack('<I8BI4I4', packed[i])
      local first = string.sub(packed[i], at)
      groups[name] = {seq = seq, broken = broken == 1, count = count, listed = listed, first = first}
    end
  end
  return groups
end

local function save_heads(P, names, groups)
  local args = {}
  for _, name in ipairs(names) do
    local g = groups[name]
    args[#args + 1] = name
    args[#args + 1] = struct.pack('<I8BI4I4', g.seq, g.broken and 1 or 0, g.count, g.listed) .. g.first
  end
  set_fields(P.at .. 'g', args)
end

-- The names of a group's lists after the first.
local function parts_of(name, g)
  local parts = {}
  for part = 1, math.ceil(g.listed / MEMBERS) - 1 do parts[#parts + 1] = name .. ':' .. part end
  return parts
end

-- Heads and members. For a broken group, cleared members are still listed.
local function load_groups(P, names)
  local groups, parts, owners = load_heads(P, names), {}, {}
  for _, name in ipairs(names) do
    local g = groups[name]
    if g then
      g.members = g.first == '' and {} or cmsgpack.unpack(g.first)
      for _, part in ipairs(parts_of(name, g)) do
        parts[#parts + 1] = part
        owners[#parts] = g.members
      end
    end
  end
  local lists = hmget(P.at .. 'gm', parts)
  for i, members in ipairs(owners) do
    for _, id in ipairs(cmsgpack.unpack(lists[i] or lost('gm'))) do members[#members + 1] = id end
  end
  return groups
end

-- Adds ids to a group. Reads and writes only its last list; save_heads saves the head.
local function join_group(P, name, g, ids)
  g.count = g.count + #ids
  if g.broken then return end
  local first, at = g.listed, P.at .. 'gm'
  local args, part, list = {}, math.floor(first / MEMBERS), {}
  if first % MEMBERS ~= 0 then
    list = cmsgpack.unpack(part == 0 and g.first or call('HGET', at, name .. ':' .. part) or lost('gm'))
  end
  g.listed = first + #ids
  for i, id in ipairs(ids) do
    list[#list + 1] = id
    if #list == MEMBERS or i == #ids then
      if part == 0 then
        g.first = cmsgpack.pack(list)
      else
        args[#args + 1], args[#args + 2] = name .. ':' .. part, cmsgpack.pack(list)
      end
      list, part = {}, part + 1
    end
  end
  batched('HSET', at, args)
end

local function is_whole(P, g) return g and not g.broken and g.count == P.group end

-- The names of the groups of ids, and how many of the ids each has.
local function distinct_groups(ids)
  local names, counts = {}, {}
  for _, id in ipairs(ids) do
    local name = group_of(id)
    if name and not counts[name] then names[#names + 1] = name end
    if name then counts[name] = (counts[name] or 0) + 1 end
  end
  return names, counts
end

-- The units that claims hand out: the rows themselves, or their groups.
local function units_of(P, ids) return P.group and distinct_groups(ids) or ids end

local function none_held(values)
  for i = 1, #values do
    if values[i] then return false end
  end
  return true
end

-- Adds new ids to their groups: `heads` has the groups that are known.
local function join_groups(P, names, heads, joining, seqs)
  for _, name in ipairs(names) do
    local g = heads[name] or {seq = seqs[name], broken = false, count = 0, listed = 0, first = ''}
    heads[name] = g
    if g.count == 0 then g.seq = seqs[name] end
    join_group(P, name, g, joining[name])
    if is_whole(P, g) then call('HINCRBY', P.meta, 'whole', 1) end
  end
  save_heads(P, names, heads)
  if P.early then
    local groups = load_groups(P, names)
    for _, name in ipairs(names) do
      for task = 0, is_whole(P, groups[name]) and P.ntasks - 1 or -1 do
        if not none_held(hmget(P.at .. 'h:' .. task, groups[name].members)) then
          call('HINCRBY', P.meta, 'w:' .. task, 1)
        end
      end
    end
  end
end

-- The groups of `ids` that are whole and not yet queued in all views.
local function groups_to_offer(P, views, ids)
  local names, some = distinct_groups(ids), {}
  local heads, queued = load_heads(P, names), {}
  for i, view in ipairs(views) do queued[i] = call('ZMSCORE', view.ready, unpack(names)) end
  for j, name in ipairs(names) do
    local is_new = false
    for i = 1, #views do is_new = is_new or not queued[i][j] end
    if is_new and is_whole(P, heads[name]) then some[#some + 1] = name end
  end
  return some
end

-- The rows that a view may give now: {seq, id, seq, id, ...}.
local function claimable(P, view, ids, rows)
  local held, found, verdicts = hmget(P.at .. 'h:' .. view.task, ids), {}, {}
  for j, row in ipairs(rows) do
    local sig = signature(row)
    if verdicts[sig] == nil then verdicts[sig] = holds_all(P, sig, view) end
    local seq = verdicts[sig] and not held[j] and seq_of(row)
    if seq and seq <= view.mark then found[#found + 1], found[#found + 2] = seq, ids[j] end
  end
  return found
end

-- How many units a view has queued.
local function num_queued(view) return call('ZCARD', view.ready) - 1 end

-- Queues claimable units: rows `ids` (with their `rows`), or their groups. Returns the number of group members that it
-- looked at.
local function offer(P, views, ids, rows)
  local looked = 0
  if #views == 0 or #ids == 0 then return looked end
  local queued = {}
  for i = 1, #views do queued[i] = {} end
  if not P.group then
    for i, view in ipairs(views) do queued[i] = claimable(P, view, ids, rows) end
  else
    for first = 1, #ids, CHUNK do
      local names = groups_to_offer(P, views, {unpack(ids, first, math.min(first + CHUNK - 1, #ids))})
      local groups = load_groups(P, names)
      for _, name in ipairs(names) do
        local g = groups[name]
        local members, held = hmget(P.at .. 'r', g.members), {}
        looked = looked + #members
        for i, view in ipairs(views) do
          if held[view.task] == nil then held[view.task] = none_held(hmget(P.at .. 'h:' .. view.task, g.members)) end
          local ready = held[view.task]
          for j = 1, #members do
            if not ready then break end
            ready = members[j] and holds_all(P, signature(members[j]), view)
          end
          if ready then
            local args = queued[i]
            args[#args + 1], args[#args + 2] = g.seq, name
          end
        end
      end
    end
  end
  for i, view in ipairs(views) do
    -- a queue that was lost is made again by the next claim: half of one would not be
    if #queued[i] > 0 and call('EXISTS', view.ready) == 1 then batched('ZADD', view.ready, queued[i]) end
  end
  return looked
end
