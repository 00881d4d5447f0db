-- Request: {name, epoch ("": any), conditions, seq (after which to begin), most (rows), chosen (ids, or none)}. Replies
-- with ids and tags, the epoch, and the seq after which to continue ("" at the end); or with {'changed'} if the partition
-- was registered again. Many rows take several calls; each row is listed once. With chosen ids, it looks only at these.
local P = open_partition(name, nil, ALL_PARTS)
if not P then return unknown_partition() end
if epoch ~= '' and epoch ~= P.epoch then return {'changed'} end
local ids, last, some, some_tags = {}, '', {}, {}
if #chosen > 0 then
  local rows = hmget(P.at .. 'r', chosen)
  for i, id in ipairs(chosen) do
    if rows[i] then ids[#ids + 1] = id end
  end
else
  local seqs
  ids, seqs = members_after(P.at .. 'o', seq, most)
  if #ids == most then last = seqs[most] end
end
local tags = hmget(P.at .. 't', ids)
for i, id in ipairs(ids) do
  if matches(tags[i], conditions) then
    some[#some + 1] = id
    some_tags[#some] = tags[i]
  end
end
return {'ok', some, some_tags, P.epoch, last}
