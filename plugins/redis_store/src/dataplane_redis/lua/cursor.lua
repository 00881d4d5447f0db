-- Request: {name, task_name, ids, epoch, info, new_info}. Gives these rows to a task for good, and takes back all others.
-- With an epoch, adds the task to the registration first; replies {'changed'} if that is another one now.
if epoch ~= '' and not add_to_registration(open_partition(name, nil, ALL_PARTS), epoch, info, new_info, {task_name}) then
  return {'changed'}
end
local P, task = open_partition(name, task_name, ALL_PARTS)
if not P then return unknown_partition() end
if not task then return unknown_task(P) end
local held_key = P.at .. 'h:' .. task
leave_mark()

-- Views and filters are built again by the next claims.
local dropped, names = {held_key}, {}
for _, view in ipairs(views_of(P, task)) do
  dropped[#dropped + 1] = view.ready
  names[#names + 1] = view.name
end
batched('HDEL', P.at .. 'vw', names)
P.views = nil
unlink(dropped)
unlink(filter_keys(P))
for _, number in ipairs(call('HKEYS', P.at .. 'k')) do
  local lease = number ~= MARK and read_lease(P, number)
  if lease and lease.task == task then drop_lease(P, lease) end
end
call('HDEL', P.meta, 'd:' .. task, 'w:' .. task, 'r:' .. task)

local given, seen = {}, {}
for i, row in ipairs(hmget(P.at .. 'r', ids)) do
  if row and not seen[ids[i]] then
    seen[ids[i]] = true
    given[#given + 1] = ids[i]
  end
end
call('HSET', held_key, MARK, '')
hold_rows(P, task, given, 'D')
if #given > 0 then call('HSET', P.meta, 'd:' .. task, #given) end
if P.group then
  local units, whole = distinct_groups(given), 0
  local heads = load_heads(P, units)
  for _, unit in ipairs(units) do
    if is_whole(P, heads[unit]) then
      whole = whole + 1
    elseif not heads[unit].broken then
      call('HSET', P.meta, 'early', 1)
    end
  end
  if whole > 0 then call('HSET', P.meta, 'w:' .. task, whole) end
end
changed(P)
wake(P)
return {'ok', #given}
