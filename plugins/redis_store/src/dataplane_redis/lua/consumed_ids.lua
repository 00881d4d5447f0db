-- Request: {name, epoch ("": any), seq (after which to begin), most (rows)}. Replies with the ids of rows, the epoch,
-- the seq after which to continue ("" at the end), and {task, for each id "1" if it was given for good, else "0", ...};
-- or with {'changed'} if the partition was registered again.
local P = open_partition(name, nil, ALL_PARTS)
if not P then return unknown_partition() end
if epoch ~= '' and epoch ~= P.epoch then return {'changed'} end
local ids, seqs = members_after(P.at .. 'o', seq, most)
local tasks, names, indices = {}, tasks_of(P)
for i, task in ipairs(names) do
  local marks = {}
  for j, hold in ipairs(hmget(P.at .. 'h:' .. indices[i], ids)) do
    marks[j] = hold and not unsettled_lease(P, hold) and '1' or '0'
  end
  tasks[#tasks + 1], tasks[#tasks + 2] = task, table.concat(marks)
end
return {'ok', ids, P.epoch, #ids == most and seqs[most] or '', tasks}
