-- Request: {action, history, writes}. Deletes payload in other slots that the ledger does not know. "begin" replies
-- whether this client should look for it: nobody has in this history of the server. "look" names writes that were found.
-- "end" notes that all were looked at.
local action, history, writes = unpack(cmsgpack.unpack(ARGV[1]))
-- Seconds after which another client may look, should the first one die.
local LOOK_S = 60
if action == 'begin' then
  if call('HGET', BASE .. ':instance', 'swept') == history then return {'ok', 0} end
  return {'ok', call('SET', BASE .. ':sweep', '', 'NX', 'EX', LOOK_S) and 1 or 0}
end
if action == 'look' then return {'ok', condemn(writes)} end
call('HSET', BASE .. ':instance', 'swept', history)
call('UNLINK', BASE .. ':sweep')
return {'ok', 0}
