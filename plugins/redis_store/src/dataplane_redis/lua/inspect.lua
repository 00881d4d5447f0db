-- Request: {name}. Replies {"ok", epoch, info, {field, spec, ...}, rows, cleared rows, bytes, seconds since the oldest row
-- was written or "", {task, rows that it was given for good, ...}, {task, {id, holder, seconds left, seconds held}, ...}
-- of the oldest lease of each task. Looks at the LEASES leases that end first.
local LEASES = 1000
local P = open_partition(name, nil, ALL_PARTS)
if not P then return unknown_partition() end
local m = call('HMGET', P.meta, 'info', 'cleared', 'bytes')
local tasks, name_of, names, indices = {}, {}, tasks_of(P)
for i, task in ipairs(names) do
  name_of[indices[i]] = task
  tasks[#tasks + 1], tasks[#tasks + 2] = task, tonumber(call('HGET', P.meta, 'd:' .. indices[i]) or 0)
end
local age, oldest = '', call('HGET', P.at .. 'r', call('ZRANGE', P.at .. 'o', 1, 1)[1] or MARK)
if oldest and oldest ~= '' then age = string.format('%.6f', math.max(0, now() - struct.unpack('<d', oldest, 9))) end
local oldest_leases = {}
local queue = call('ZRANGEBYSCORE', P.at .. 'q', string.format('(%.6f', now()), '+inf', 'WITHSCORES', 'LIMIT', 0, LEASES)
for i = 1, #queue, 2 do
  local lease = queue[i] ~= MARK and read_lease(P, queue[i])
  local known = lease and oldest_leases[tostring(lease.task)]
  if lease and lease.kind == 'L' and lease.since and not (known and known.since <= tonumber(lease.since)) then
    oldest_leases[tostring(lease.task)] = {since = tonumber(lease.since), lease = lease, ends = tonumber(queue[i + 1])}
  end
end
-- A row that this lease still holds.
local function row_of(lease)
  for part = 1, lease.parts do
    local ids = cmsgpack.unpack(call('HGET', P.at .. 'a', lease.number .. ':' .. part) or lost('a'))
    for i, hold in ipairs(hmget(P.at .. 'h:' .. lease.task, ids)) do
      if hold == lease.number then return ids[i] end
    end
  end
end
local leases = {}
for task, found in pairs(oldest_leases) do
  local id = row_of(found.lease)
  if id then
    leases[#leases + 1] = name_of[task]
    leases[#leases + 1] = {
      id, found.lease.holder, string.format('%.6f', found.ends - now()), string.format('%.6f', now() - found.since),
    }
  end
end
return {
  'ok', P.epoch, m[1], call('HGETALL', P.at .. 's'), call('ZCARD', P.at .. 'o') - 1, tonumber(m[2] or 0),
  tonumber(m[3] or 0), age, tasks, leases,
}
