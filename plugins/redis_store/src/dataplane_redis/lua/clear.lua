-- Request: {partition, ids, whole (1: everything)}.
local name, ids, whole = unpack(cmsgpack.unpack(ARGV[1]))
reap()
local P = open_partition(name)
if not P then return {'ok', 0, call('EXISTS', BASE .. ':trash')} end
if whole == 1 then
  local count = drop_partition(P)
  return {'ok', count, call('EXISTS', BASE .. ':trash')}
end
local rows, gone, refs = hmget(P.at .. 'r', ids), {}, {}
for i, id in ipairs(ids) do
  local row = rows[i]
  if row then
    gone[#gone + 1] = id
    for at = 9, #row, REF do refs[#refs + 1] = string.sub(row, at, at + REF - 1) end
  end
end
if #gone > 0 then
  local units = gone
  if P.group then
    units = distinct_groups(gone)
    local groups, leaving = load_groups(P, units), {}
    for _, id in ipairs(gone) do leaving[id] = true end
    for _, unit in ipairs(units) do
      local g = groups[unit]
      if is_whole(P, g) then
        call('HINCRBY', P.meta, 'whole', -1)
        for task = 0, P.ntasks - 1 do
          if not none_held(hmget(P.at .. 'h:' .. task, g.members)) then call('HINCRBY', P.meta, 'w:' .. task, -1) end
        end
      end
      g.poisoned = true
      local rest = {}
      for _, member in ipairs(g.members) do
        if not leaving[member] then rest[#rest + 1] = member end
      end
      g.members = rest
    end
    save_groups(P, units, groups)
  end
  for task = 0, P.ntasks - 1 do
    local key = P.at .. 'h:' .. task
    if call('EXISTS', key) == 1 then
      local held, done, marks, mine = hmget(key, gone), 0, {}, {}
      for i, id in ipairs(gone) do
        if held[i] then
          mine[#mine + 1] = id
          marks[#marks + 1] = task .. ':' .. id
          if string.sub(held[i], 1, 1) ~= 'L' then done = done + 1 end
        end
      end
      if done > 0 then call('HINCRBY', P.meta, 'd:' .. task, -done) end
      batched('HDEL', key, mine)
      batched('ZREM', P.at .. 'q', marks)
    end
  end
  for _, view in ipairs(views_of(P)) do batched('ZREM', view.ready, units) end
  batched('HDEL', P.at .. 'r', gone)
  batched('HDEL', P.at .. 't', gone)
  batched('ZREM', P.at .. 'o', gone)
  if P.num then batched('SADD', P.at .. 'x', gone) end
  free_refs(P, refs)
end
return {'ok', #gone, call('EXISTS', BASE .. ':trash')}
