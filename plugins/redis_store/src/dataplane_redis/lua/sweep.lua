-- Request: {action, history, writes}. Deletes payload in other slots that the ledger does not know. "begin" replies
-- "look" if this client should look for it, "done" if it was done in this history of the server, or "later" if another
-- client looks. "look" names writes that were found. "end" notes that all were looked at.
-- Seconds after which another client may look, should the first one die.
local LOOK_S = 60
if action == 'begin' then
  if call('HGET', BASE .. ':instance', 'swept') == history then return {'ok', 'done'} end
  return {'ok', call('SET', BASE .. ':sweep', '', 'NX', 'EX', LOOK_S) and 'look' or 'later'}
end
if action == 'look' then return {'ok', condemn(writes)} end
call('HSET', BASE .. ':instance', 'swept', history)
call('UNLINK', BASE .. ':sweep')
return {'ok', 0}
