-- Request: {name, epoch, info, num (-1: none), group (-1: none), tasks, keep (1: an earlier registration stays)}.
-- Replies {"ok", whether there is trash, {epoch, info, rows, {task, rows that it was given for good, ...}} of what it drops}.
local old = find_rest(name)
if old and keep == 1 then return {'changed'} end
leave_mark()
local dropped = {}
if old then
  local names, indices = tasks_of(old)
  local given = {}
  for i, task in ipairs(names) do
    given[#given + 1], given[#given + 2] = task, tonumber(call('HGET', old.meta, 'd:' .. indices[i]) or 0)
  end
  local old_info = call('HGET', old.meta, 'info') or ''
  dropped = {old.epoch, old_info, drop_partition(old), given}
end
local meta = BASE .. ':p:' .. name
local args = {'epoch', epoch, 'info', info, 'ntasks', #tasks}
if num >= 0 then args[#args + 1], args[#args + 2] = 'num', num end
if group >= 0 then args[#args + 1], args[#args + 2] = 'group', group end
for i, task in ipairs(tasks) do args[#args + 1], args[#args + 2] = 't:' .. task, i - 1 end
batched('HSET', meta, args)
call('HSET', BASE .. ':parts', name, epoch)
local P = find_partition(name)
for _, part in ipairs({'r', 't', 's', 'n', 'k'}) do call('HSET', P.at .. part, MARK, '') end
for task = 0, P.ntasks - 1 do call('HSET', P.at .. 'h:' .. task, MARK, '') end
call('ZADD', P.at .. 'o', '0', MARK)
call('ZADD', P.at .. 'q', '+inf', MARK)
call('RPUSH', P.at .. 'l', '')
call('SADD', P.at .. 'u', MARK)
if P.num then call('SADD', P.at .. 'x', MARK) end
if P.group then call('HSET', P.at .. 'g', MARK, '') end
return {'ok', has_trash(), dropped}
