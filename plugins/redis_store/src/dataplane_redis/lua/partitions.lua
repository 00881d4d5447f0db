-- Replies {"ok", the names of the registered partitions}.
return {'ok', call('SMEMBERS', BASE .. ':parts')}
