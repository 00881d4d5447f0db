-- Request: {name, tasks}.
local P = open_partition(name, nil, ALL_PARTS)
if not P or #tasks == 0 then return {'ok', 0} end
local count = call('ZCARD', P.at .. 'o') - 1
if P.num and tonumber(call('HGET', P.meta, 'seen') or 0) < P.num then return {'ok', 0} end
if not P.num and count == 0 then return {'ok', 0} end
for _, task in ipairs(tasks) do
  local index = call('HGET', P.meta, 't:' .. task)
  if not index then return {'ok', 0} end
  local m = call('HMGET', P.meta, 'd:' .. index, 'w:' .. index, 'whole')
  local done, held, whole = tonumber(m[1] or 0), tonumber(m[2] or 0), tonumber(m[3] or 0)
  -- groups that are not whole do not count once all rows are written: they are never given
  local rest = P.num and P.group and whole - held or count - done
  if rest ~= 0 or call('HLEN', P.at .. 'h:' .. index) - 1 ~= done then return {'ok', 0} end
end
return {'ok', 1}
