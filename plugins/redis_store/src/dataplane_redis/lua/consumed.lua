-- Request: {name, tasks}.
local P = open_partition(name, nil, ALL_PARTS)
if not P or #tasks == 0 then return {'ok', 0} end
local count = call('ZCARD', P.at .. 'o') - 1
if P.num and tonumber(call('HGET', P.meta, 'seen') or 0) < P.num then return {'ok', 0} end
if not P.num and count == 0 then return {'ok', 0} end
for _, task in ipairs(tasks) do
  local index = call('HGET', P.meta, 't:' .. task)
  if not index then return {'ok', 0} end
  if tonumber(call('HGET', P.meta, 'd:' .. index) or 0) ~= count then return {'ok', 0} end
end
return {'ok', 1}
