-- Request: {name}.
local P = open_partition(name, nil, ALL_PARTS)
if not P then return unknown_partition() end
return {'ok', P.epoch, call('HGET', P.meta, 'info')}
