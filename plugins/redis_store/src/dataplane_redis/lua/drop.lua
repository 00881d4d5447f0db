-- Drops a registration at once. Its writes go to the trash, which `collect` empties in steps.
local function drop_partition(P)
  local count = math.max(1, call('ZCARD', P.at .. 'o'), call('HLEN', P.at .. 'r')) - 1  -- one of them may be lost
  local bytes = tonumber(call('HGET', P.meta, 'bytes') or 0)
  local keys = {P.meta}
  for _, view in ipairs(views_of(P)) do keys[#keys + 1] = view.ready end
  for task = 0, P.ntasks - 1 do keys[#keys + 1] = P.at .. 'h:' .. task end
  for _, suffix in ipairs({'r', 't', 'o', 'w', 'x', 's', 'l', 'li', 'n', 'g', 'gm', 'k', 'q', 'a', 'vw', 'c', 'fs', 'uc'}) do
    keys[#keys + 1] = P.at .. suffix
  end
  for _, digest in ipairs(call('ZRANGE', P.at .. 'fs', 0, -1)) do
    for _, suffix in ipairs({'', ':m', ':n'}) do keys[#keys + 1] = P.at .. 'f:' .. digest .. suffix end
  end
  for _, key in ipairs(end_waiting(P)) do keys[#keys + 1] = key end
  unlink(keys)
  local writes = P.at .. 'u'
  call('SREM', writes, MARK)
  if call('EXISTS', writes) == 1 then
    call('RENAME', writes, BASE .. ':trash:' .. P.epoch)
    call('SADD', BASE .. ':trash', P.epoch)
  end
  if bytes > 0 then free_room(bytes) end
  call('SREM', BASE .. ':parts', P.name)
  return count
end
