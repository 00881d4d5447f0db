-- Request: {partition, epoch ("": any), seq after which to begin, most rows}. Replies with the ids of rows, the epoch,
-- the seq after which to continue ("" at the end), and {task, for each id "1" if it was given for good, else "0", ...};
-- or with {'changed'} if the partition was registered again.
local name, epoch, seq, most = unpack(cmsgpack.unpack(ARGV[1]))
local P = open_partition(name)
if not P then return unknown_partition() end
if epoch ~= '' and epoch ~= P.epoch then return {'changed'} end
local flat = call('ZRANGEBYSCORE', P.at .. 'o', '(' .. seq, '+inf', 'WITHSCORES', 'LIMIT', 0, most)
local ids, tasks, names = {}, {}, call('HGETALL', P.meta)
for i = 1, #flat, 2 do ids[#ids + 1] = flat[i] end
for i = 1, #names, 2 do
  if string.sub(names[i], 1, 2) == 't:' then
    local marks = {}
    for j, hold in ipairs(hmget(P.at .. 'h:' .. names[i + 1], ids)) do
      marks[j] = hold and not unsettled_lease(P, hold) and '1' or '0'
    end
    tasks[#tasks + 1] = string.sub(names[i], 3)
    tasks[#tasks + 1] = table.concat(marks)
  end
end
return {'ok', ids, P.epoch, #ids == most and flat[#flat] or '', tasks}
