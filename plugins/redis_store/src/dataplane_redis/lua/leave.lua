-- Request: {name, task_name, batch_size, required (as a layout), filter, waiter}. A claim no longer waits: another one may
-- be woken in its place.
local P, task = open_partition(name, task_name, ALL_PARTS)
if task and stop_waiting(P, digest_of(task .. ':' .. required, filter, batch_size / (P.group or 1)), waiter) then
  wake(P)
end
return {'ok'}
