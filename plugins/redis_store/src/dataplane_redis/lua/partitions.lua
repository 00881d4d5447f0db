-- Replies {"ok", the names of the registered partitions}.
local names, listed = {}, call('HKEYS', BASE .. ':parts')
for _, name in ipairs(listed) do
  if name ~= MARK then names[#names + 1] = name end
end
if #names == #listed then lost('parts') end
return {'ok', names}
