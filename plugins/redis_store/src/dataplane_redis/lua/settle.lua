-- Request: {mode, action, name, task_name, epoch ("": any), ids, tokens, named (token -> how many of its rows the request
-- has in all), into (lease -> the one into which its rows go), lease_s, leases, budget (rows to give back), request (its
-- id or ""), kept_s (for how many seconds to keep that)}.
-- Settles all of the rows or none. Mode "all" does it at once. Many rows take several calls: "split", for each chunk of
-- ids, moves rows that are only a part of their lease into another one, which nobody notices; "commit" settles whole
-- leases, all of them or none; "finish" returns more of the nacked rows to the pool.
--
-- split  -> {"ok", epoch, group size or 0, {{lease, the one that has the rows now, its token, rows in this chunk}, ...}},
--           {"lost", ids}, {"part", group, named, held} or {"changed"}: another client changed these leases, begin again
-- commit -> `leases`: {lease, its token, its rows, ...}; {"ok", rows are left to give back}, or {"changed"}
-- all    -> as commit, or refused as split is
-- A request whose id is kept was carried out: split replies {"done"}, and all and commit reply {"ok", 0}.
if is_done(request) then
  if mode ~= 'all' and mode ~= 'commit' then return {'done'} end
  leave_mark()
  return {'ok', 0}
end
local P, task = open_partition(name, task_name, {'r', 'l', 'k', 'q'})
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
  local gone, order, rows_of = {}, {}, {}
  local held = same and hmget(key, ids) or {}
  for i, id in ipairs(ids) do
    local lease = held[i] and held[i] ~= 'D' and read_lease(P, held[i])
    local good = lease and lease.token == tokens[i]
    if not good or not (is_leased(lease) or (lease.kind == 'A' and action == 'ack')) then
      gone[#gone + 1] = id
    elseif lease.kind == 'L' then
      add_to(rows_of, order, lease, id)
    end
  end
  return order, rows_of, gone
end

-- Moves rows of a lease to an equal one: a new lease, or `to`.
local function split(from, to, rows)
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

local function settle(lease)
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
  for i = 1, #leases, 3 do settle(read_lease(P, leases[i])) end
  keep_done(request, kept_s)
  return finish()
end
local order, rows_of, gone = look_up()
if #gone > 0 then return {'lost', gone} end
if P.group then  -- the request names all members that are held, or none
  local names, counts = distinct_groups(ids)
  local groups = load_groups(P, names)
  for _, unit in ipairs(names) do
    local present = 0
    for _, hold in ipairs(hmget(key, groups[unit].members)) do present = present + (hold and 1 or 0) end
    if present ~= counts[unit] then return {'part', unit, counts[unit], present} end
  end
end
local found = {}
for i, lease in ipairs(order) do
  local rows, to = rows_of[lease], lease
  if lease.rows ~= (mode == 'all' and #rows or named[lease.token]) then
    local number = into[lease.number]
    to = number and read_lease(P, number)
    if number and (not is_leased(to) or to.token ~= lease.token) then return {'changed'} end  -- it was settled meanwhile
    to = split(lease, to, rows)
  end
  found[i] = {lease.number, to.number, to.token, #rows}
  if mode == 'all' then settle(to) end
end
if mode == 'split' then return {'ok', P.epoch, P.group or 0, found} end
keep_done(request, kept_s)
return finish()
