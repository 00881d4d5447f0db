-- Request: {partition, epoch, info, new info, new tasks}. Replies {'changed'} if the registration is another one now.
leave_mark()
local name, epoch, info, new_info, tasks = unpack(cmsgpack.unpack(ARGV[1]))
return {add_to_registration(open_partition(name, nil, ALL_PARTS), epoch, info, new_info, tasks) and 'ok' or 'changed'}
