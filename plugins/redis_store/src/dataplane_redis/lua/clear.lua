-- Request: {name, epoch ("": any), ids, whole (1: everything)}. Many ids take several calls, with the epoch of the
-- first.
reap()
leave_mark()
local P
if whole == 1 then
  P = find_rest(name)
else
  P = open_partition(name, nil, ALL_PARTS)
end
if not P or (epoch ~= '' and epoch ~= P.epoch) then return {'ok', 0, has_trash(), ''} end
if whole == 1 then
  local count = drop_partition(P)
  return {'ok', count, has_trash(), ''}
end
local rows, gone, refs = hmget(P.at .. 'r', ids), {}, {}
for i, id in ipairs(ids) do
  local row = rows[i]
  if row then
    gone[#gone + 1] = id
    for at = HEAD + 1, #row, REF do refs[#refs + 1] = string.sub(row, at, at + REF - 1) end
  end
end
if #gone > 0 then
  local units = gone
  if P.group then
    local leaving
    units, leaving = distinct_groups(gone)
    local groups = load_groups(P, units)
    for _, unit in ipairs(units) do
      local g = groups[unit]
      if is_whole(P, g) then
        call('HINCRBY', P.meta, 'whole', -1)
        for task = 0, P.ntasks - 1 do
          if not none_held(hmget(P.at .. 'h:' .. task, g.members)) then call('HINCRBY', P.meta, 'w:' .. task, -1) end
        end
      end
      g.broken = true
      g.count = g.count - leaving[unit]
      if g.count == 0 then
        batched('HDEL', P.at .. 'gm', parts_of(unit, g))
        g.listed, g.first = 0, ''
      end
    end
    save_heads(P, units, groups)
  end
  for task = 0, P.ntasks - 1 do
    local key = P.at .. 'h:' .. task
    local held, done, mine, leaving, order = hmget(key, gone), 0, {}, {}, {}
    if not none_held(held) then
      for i, id in ipairs(gone) do
        local hold = held[i]
        if hold then mine[#mine + 1] = id end
        if hold == 'D' then
          done = done + 1
        elseif hold then
          if not leaving[hold] then order[#order + 1] = hold end
          leaving[hold] = (leaving[hold] or 0) + 1
        end
      end
      batched('HDEL', key, mine)
      for _, number in ipairs(order) do
        local lease = read_lease(P, number)
        if lease.kind == 'A' or lease.kind == 'D' then done = done + leaving[number] end
        lease.rows = lease.rows - leaving[number]
        if lease.rows > 0 or lease.kind == 'P' then save_lease(P, lease) else drop_lease(P, lease) end
      end
      if done > 0 then call('HINCRBY', P.meta, 'd:' .. task, -done) end
    end
  end
  for _, view in ipairs(views_of(P)) do batched('ZREM', view.ready, units) end
  batched('HDEL', P.at .. 'r', gone)
  batched('HDEL', P.at .. 't', gone)
  batched('ZREM', P.at .. 'o', gone)
  batched('ZREM', P.at .. 'c', units)
  if P.num then batched('SADD', P.at .. 'x', gone) end
  call('HINCRBY', P.meta, 'cleared', #gone)
  free_refs(P, refs)
  changed(P)
  wake(P)
end
return {'ok', #gone, has_trash(), P.epoch}
