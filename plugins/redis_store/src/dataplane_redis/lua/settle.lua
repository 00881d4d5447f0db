-- Request: {mode, action, name, task_name, epoch ("": any), ids, tokens, lease_s, leases, budget (rows to give back),
-- request (its id or ""), kept_s (for how many seconds to keep that)}.
-- Settles all of the rows or none. Mode "all" does it at once. Many rows take several calls: "check", for each chunk of
-- ids, changes nothing; "split" moves rows that are only a part of a lease to a new lease, which nobody notices;
-- "commit" settles whole leases, all of them or none; "finish" returns more of the nacked rows to the pool.
--
-- check  -> {"ok", epoch, group size or 0, {{lease, its token, rows of it in this chunk, in all}, ...}},
--           {"lost", ids} or {"part", group, named, held}
-- split  -> `leases`: {lease, the lease to put its rows into or "", ...}; {"ok", the same filled in}, or {"changed"}
-- commit -> `leases`: {lease, its token, its rows, ...}; {"ok", rows are left to give back}, or {"changed"}: check
--           again
-- all    -> as commit, or refused as check is
-- A request whose id is kept was carried out: check replies {"done"}, and all and commit reply {"ok", 0}.
if is_done(request) then
  if mode ~= 'all' and mode ~= 'commit' then return {'done'} end
  leave_mark()
  return {'ok', 0}
end
local P, task = open_partition(name, task_name, {'r', 'l', 'k', 'q', 'vw'})
if not P then return unknown_partition() end
if not task then return unknown_task(P) end
local same = epoch == '' or epoch == P.epoch

-- Returns nacked rows to the pool.
local function finish()
  leave_mark()
  local left = false
  if action == 'nack' and same then left = not end_due(P, budget) end
  if P.is_changed then wake(P) end
  return {'ok', left and 1 or 0}
end
if mode == 'finish' then return finish() end
local key = P.at .. 'h:' .. task

local function is_leased(lease) return lease and lease.kind == 'L' and end_of(P, lease) > now() end

-- The leases of the ids, in order, with their rows; and the ids that are not held under their tokens.
local function look_up()
  local lost, order, rows_of = {}, {}, {}
  local held = same and hmget(key, ids) or {}
  for i, id in ipairs(ids) do
    local lease = held[i] and held[i] ~= 'D' and read_lease(P, held[i])
    local good = lease and lease.token == tokens[i]
    if not good or not (is_leased(lease) or (lease.kind == 'A' and action == 'ack')) then
      lost[#lost + 1] = id
    elseif lease.kind == 'L' then
      add_to(rows_of, order, lease, id)
    end
  end
  return order, rows_of, lost
end

-- The first group that the request names only in part, or nil.
local function find_part()
  local names, counts = distinct_groups(ids)
  local groups = load_groups(P, names)
  for _, unit in ipairs(names) do
    local present = 0
    for _, hold in ipairs(hmget(key, groups[unit].members)) do present = present + (hold and 1 or 0) end
    if present ~= counts[unit] then return {'part', unit, counts[unit], present} end
  end
end

-- Moves rows of a lease to an equal one: a new lease, or the one with the given number.
local function split(from, number, rows)
  local to = number ~= '' and read_lease(P, number)
  if not to then
    to = new_lease(P, 'L', from.task, from.token, from.holder)
    to.since = from.since
    call('ZADD', P.at .. 'q', call('ZSCORE', P.at .. 'q', from.number), to.number)
  end
  add_rows(P, to, rows)
  from.rows = from.rows - #rows
  if from.rows == 0 then drop_lease(P, from) else save_lease(P, from) end
  save_lease(P, to)
  return to
end

local function commit(lease)
  if action == 'ack' then
    give_for_good(P, lease, 'A')
  elseif action == 'renew' then
    local was = end_of(P, lease)
    ends_in(P, lease, lease_s)
    if end_of(P, lease) < was then  -- it ends sooner now, so waiting claims must look again
      changed(P)
    end
  else
    end_lease(P, lease)
  end
end

if mode == 'commit' then
  if not same then return {'changed'} end
  for i = 1, #leases, 3 do
    local lease = read_lease(P, leases[i])
    if not is_leased(lease) or lease.token ~= leases[i + 1] or lease.rows ~= leases[i + 2] then
      return {'changed'}
    end
  end
  for i = 1, #leases, 3 do commit(read_lease(P, leases[i])) end
  keep_done(request, kept_s)
  return finish()
end
local order, rows_of, lost = look_up()
if mode == 'split' then
  if #lost > 0 then return {'changed'} end
  for i = 1, #leases, 2 do  -- one that was settled meanwhile takes no rows
    local from, number = read_lease(P, leases[i]), leases[i + 1]
    local to = number ~= '' and read_lease(P, number)
    if number ~= '' and (not is_leased(to) or (from and from.token ~= to.token)) then return {'changed'} end
  end
  for i = 1, #leases, 2 do
    local from = read_lease(P, leases[i])
    if from and rows_of[from] then leases[i + 1] = split(from, leases[i + 1], rows_of[from]).number end
  end
  return {'ok', leases}
end
if #lost > 0 then return {'lost', lost} end
local part = P.group and find_part()
if part then return part end
if mode == 'check' then
  local found = {}
  for _, lease in ipairs(order) do
    found[#found + 1] = {lease.number, lease.token, #rows_of[lease], lease.rows}
  end
  return {'ok', P.epoch, P.group or 0, found}
end
for _, lease in ipairs(order) do
  local rows = rows_of[lease]
  commit(#rows == lease.rows and lease or split(lease, '', rows))
end
keep_done(request, kept_s)
return finish()
