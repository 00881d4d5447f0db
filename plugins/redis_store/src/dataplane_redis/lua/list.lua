-- Request: {partition, conditions}.
local name, conditions = unpack(cmsgpack.unpack(ARGV[1]))
local P = open_partition(name)
if not P then return unknown_partition() end
local ids = call('ZRANGE', P.at .. 'o', 0, -1)
local tags = hmget(P.at .. 't', ids)
if #conditions == 0 then return {'ok', ids, tags} end
local some, some_tags = {}, {}
for i, id in ipairs(ids) do
  if matches(tags[i], conditions) then
    some[#some + 1] = id
    some_tags[#some] = tags[i]
  end
end
return {'ok', some, some_tags}
