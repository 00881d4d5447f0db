-- Request: {partition, epoch ("": any), conditions, seq after which to begin, most rows}. Replies with ids and tags,
-- the epoch, and the seq after which to continue ("" at the end); or with {'changed'} if the partition was registered
-- again. Many rows take several calls; each row is listed once.
local name, epoch, conditions, seq, most = unpack(cmsgpack.unpack(ARGV[1]))
local P = open_partition(name)
if not P then return unknown_partition() end
if epoch ~= '' and epoch ~= P.epoch then return {'changed'} end
local flat = call('ZRANGEBYSCORE', P.at .. 'o', '(' .. seq, '+inf', 'WITHSCORES', 'LIMIT', 0, most)
local ids, some, some_tags = {}, {}, {}
for i = 1, #flat, 2 do ids[#ids + 1] = flat[i] end
local tags = hmget(P.at .. 't', ids)
for i, id in ipairs(ids) do
  if matches(tags[i], conditions) then
    some[#some + 1] = id
    some_tags[#some] = tags[i]
  end
end
return {'ok', some, some_tags, P.epoch, #ids == most and flat[#flat] or ''}
