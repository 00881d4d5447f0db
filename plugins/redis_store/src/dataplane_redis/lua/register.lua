-- Request: {partition, epoch, info, num (-1: none), group (-1: none), tasks, whether to keep an earlier registration}.
local name, epoch, info, num, group, tasks, keep = unpack(cmsgpack.unpack(ARGV[1]))
local old = find_rest(name)
if old and keep == 1 then return {'changed'} end
leave_mark()
if old then drop_partition(old) end
local meta = BASE .. ':p:' .. name
local args = {'epoch', epoch, 'info', info, 'ntasks', #tasks}
if num >= 0 then
  args[#args + 1] = 'num'
  args[#args + 1] = num
end
if group >= 0 then
  args[#args + 1] = 'group'
  args[#args + 1] = group
end
for i, task in ipairs(tasks) do
  args[#args + 1] = 't:' .. task
  args[#args + 1] = i - 1
end
batched('HSET', meta, args)
call('HSET', BASE .. ':parts', name, epoch)
local P = find_partition(name)
for _, part in ipairs({'r', 't', 's', 'n', 'k', 'vw'}) do call('HSET', P.at .. part, MARK, '') end
for task = 0, P.ntasks - 1 do call('HSET', P.at .. 'h:' .. task, MARK, '') end
call('ZADD', P.at .. 'o', '0', MARK)
call('ZADD', P.at .. 'q', '+inf', MARK)
call('RPUSH', P.at .. 'l', '')
call('SADD', P.at .. 'u', MARK)
if P.num then call('SADD', P.at .. 'x', MARK) end
if P.group then call('HSET', P.at .. 'g', MARK, '') end
return {'ok', has_trash()}
