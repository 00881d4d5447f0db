-- Forgets a registration at once; its writes go to the trash, which `collect` empties in steps.
local function drop_partition(P)
  local count = call('ZCARD', P.at .. 'o')
  local bytes = tonumber(call('HGET', P.meta, 'bytes') or 0)
  local keys = {P.meta}
  for _, view in ipairs(views_of(P)) do keys[#keys + 1] = view.ready end
  for task = 0, P.ntasks - 1 do keys[#keys + 1] = P.at .. 'h:' .. task end
  for _, suffix in ipairs({'r', 't', 'o', 'x', 's', 'l', 'li', 'g', 'q', 'vw'}) do keys[#keys + 1] = P.at .. suffix end
  for first = 1, #keys, CHUNK do
    call('UNLINK', unpack(keys, first, math.min(first + CHUNK - 1, #keys)))
  end
  local writes = P.at .. 'u'
  if call('EXISTS', writes) == 1 then
    call('RENAME', writes, BASE .. ':trash:' .. string.format('%.0f', P.epoch))
    call('SADD', BASE .. ':trash', string.format('%.0f', P.epoch))
  end
  if bytes > 0 then call('INCRBY', BASE .. ':held', string.format('%.0f', -bytes)) end
  call('SREM', BASE .. ':parts', P.name)
  return count
end
