-- Request: {name, epoch, info, new_info, tasks (new ones), num (-1: as it is)}. Replies {'changed'} if the registration is
-- another one now, else {'ok', num}. The new num is at least the number of rows.
leave_mark()
local P = open_partition(name, nil, ALL_PARTS)
local count = P and call('ZCARD', P.at .. 'o') - 1
if P and num >= 0 then
  num = math.max(num, count)
  new_info = string.gsub(new_info, '"num_samples": null', string.format('"num_samples": %.0f', num), 1)
end
if not add_to_registration(P, epoch, info, new_info, tasks) then return {'changed'} end
if num >= 0 then
  P.num = num
  call('HSET', P.meta, 'num', string.format('%.0f', num), 'seen', count)
  call('SADD', P.at .. 'x', MARK)
  changed(P)
  wake(P)
end
return {'ok', num}
