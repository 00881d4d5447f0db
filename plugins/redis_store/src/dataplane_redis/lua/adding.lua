-- Replaces the description of a registration, and adds tasks to it. False if it is not the given one any longer.
local function add_to_registration(P, epoch, info, new_info, tasks)
  if not P or P.epoch ~= epoch or call('HGET', P.meta, 'info') ~= info then return false end
  local args = {'info', new_info, 'ntasks', P.ntasks + #tasks}
  for i, task in ipairs(tasks) do
    args[#args + 1], args[#args + 2] = 't:' .. task, P.ntasks + i - 1
    call('HSET', P.at .. 'h:' .. P.ntasks + i - 1, MARK, '')
  end
  batched('HSET', P.meta, args)
  P.ntasks = P.ntasks + #tasks
  return true
end
