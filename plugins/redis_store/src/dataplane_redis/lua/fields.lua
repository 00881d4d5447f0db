-- Request: {name, epoch ("": any), seq (after which to begin), most (rows)}. Replies {"ok", the epoch, the seq after which
-- to continue ("" at the end), {field, rows of these that have it, ...}}; or {'changed'} if the partition was registered
-- again.
local P = open_partition(name, nil, ALL_PARTS)
if not P then return unknown_partition() end
if epoch ~= '' and epoch ~= P.epoch then return {'changed'} end
local ids, seqs = members_after(P.at .. 'o', seq, most)
local counts, num_rows, flat = {}, {}, {}
for _, row in ipairs(hmget(P.at .. 'r', ids)) do
  local sig = signature(row)
  counts[sig] = (counts[sig] or 0) + 1
end
for sig, count in pairs(counts) do
  for field in pairs(fields_of(P, sig)) do num_rows[field] = (num_rows[field] or 0) + count end
end
for field, count in pairs(num_rows) do flat[#flat + 1], flat[#flat + 2] = field, count end
return {'ok', P.epoch, #ids == most and seqs[most] or '', flat}
