-- A partition; or what is left of it, if its registration was lost. Nil if it was not registered.
local function find_rest(name)
  local P, epoch = find_partition(name), call('HGET', BASE .. ':parts', name)
  if P or not epoch then return P end
  P = {name = name, meta = BASE .. ':p:' .. name, epoch = epoch, ntasks = 0, at = BASE .. ':e:' .. epoch .. ':', memo = {}}
  while call('EXISTS', P.at .. 'h:' .. P.ntasks) == 1 do P.ntasks = P.ntasks + 1 end
  return P
end

-- What a damaged registration does not say, its rows do: lists the writes that they refer to, and replies their bytes.
local function recount(P)
  local seen, bytes, writes = {}, 0, {}
  local rows = call('HGETALL', P.at .. 'r')
  for i = 2, #rows, 2 do
    local row = rows[i]
    for at = HEAD + 1, #row, REF do
      local place = string.sub(row, at, at + 19)
      if not seen[place] then
        local write, _, _, size = struct.unpack('<c16I4I4I8', row, at)
        seen[place], bytes = true, bytes + size
        writes[#writes + 1] = write
      end
    end
  end
  batched('SADD', P.at .. 'u', writes)
  return bytes
end

-- Drops a registration at once. Its writes go to the trash, which `collect` empties in steps.
local function drop_partition(P)
  local count = math.max(1, call('ZCARD', P.at .. 'o'), call('HLEN', P.at .. 'r')) - 1  -- one of them may be lost
  local bytes = tonumber(call('HGET', P.meta, 'bytes') or 0)
  if call('EXISTS', P.meta, P.at .. 'u') < 2 then bytes = recount(P) end
  local keys = {P.meta}
  for _, view in ipairs(views_of(P)) do keys[#keys + 1] = view.ready end
  for task = 0, P.ntasks - 1 do keys[#keys + 1] = P.at .. 'h:' .. task end
  for _, suffix in ipairs({'r', 't', 'o', 'x', 's', 'l', 'li', 'n', 'g', 'gm', 'k', 'q', 'a', 'vw', 'c', 'fs', 'uc'}) do
    keys[#keys + 1] = P.at .. suffix
  end
  unlink(filter_keys(P))
  unlink(end_waiting(P))
  unlink(keys)
  local writes = P.at .. 'u'
  call('SREM', writes, MARK)
  if call('EXISTS', writes) == 1 then
    call('RENAME', writes, BASE .. ':trash:' .. P.epoch)
    call('SADD', BASE .. ':trash', P.epoch)
  end
  if bytes > 0 then free_room(bytes) end
  call('HDEL', BASE .. ':parts', P.name)
  return count
end
