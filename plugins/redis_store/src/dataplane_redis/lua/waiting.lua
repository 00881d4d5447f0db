-- The state of a filter on a view, kept while claims use it, so that the next question looks at nothing twice. Equal
-- filters share it. It expires by itself.
--
--   f:<digest>     hash  at: seq up to which the view's ready units were seen; more: seq up to which the rows were
--                        searched for units that are not ready; seen: the note up to which changes were followed;
--                        sets: how many of the next two there are. If these, or c, are others now, all begins anew
--   f:<digest>:m   zset  ready units that match, by seq; some may be gone by now
--   f:<digest>:n   set   units that match and are not ready; some may be ready or gone by now
--   c              zset  units that changed, in order of their notes; lives at least as long as every f. Its MARK
--                        is at the note after which it begins
--   fs             zset  digests by time, for dropping the partition
local KEEP_S = 60

local function filter_keys(P)
  local keys = {}
  for _, digest in ipairs(call('ZRANGE', P.at .. 'fs', 0, -1)) do
    for _, suffix in ipairs({'', ':m', ':n'}) do keys[#keys + 1] = P.at .. 'f:' .. digest .. suffix end
  end
  return keys
end

local function open_filter(P, view, packed)
  local digest = redis.sha1hex(view.name .. '|' .. packed)
  local key = P.at .. 'f:' .. digest
  local F = {key = key, matching = key .. ':m', coming = key .. ':n', conditions = cmsgpack.unpack(packed)}
  local kept, from = call('HMGET', key, 'at', 'more', 'seen', 'sets'), call('ZSCORE', P.at .. 'c', MARK)
  F.is_new = not kept[1] or not from or tonumber(from) > tonumber(kept[3]) or
    call('EXISTS', F.matching, F.coming) ~= tonumber(kept[4])
  if F.is_new then
    call('UNLINK', key, F.matching, F.coming)
    kept = {'0', '0', call('HGET', P.meta, 'noted') or '0'}
  end
  F.at, F.more, F.seen = kept[1], kept[2], kept[3]
  F.old = {F.at, F.more, F.seen}
  F.digest = digest
  return F
end

local function save_filter(P, F)
  if F.is_new or F.at ~= F.old[1] or F.more ~= F.old[2] or F.seen ~= F.old[3] then
    call('HSET', F.key, 'at', F.at, 'more', F.more, 'seen', F.seen)
  end
  local left_ms = F.is_new and 0 or call('PTTL', F.key)
  if left_ms < KEEP_S * 500 then
    left_ms = KEEP_S * 1000
    F.wrote = true
    call('PEXPIRE', F.key, left_ms)
    call('ZADD', P.at .. 'c', 'NX', F.old[3], MARK)
    call('PEXPIRE', P.at .. 'c', left_ms)
    call('ZREMRANGEBYSCORE', P.at .. 'fs', '-inf', now() - 2 * KEEP_S)
    call('ZADD', P.at .. 'fs', now(), F.digest)
  end
  if F.wrote then
    call('HSET', F.key, 'sets', call('EXISTS', F.matching, F.coming))
    call('PEXPIRE', F.matching, left_ms)
    call('PEXPIRE', F.coming, left_ms)
  end
end
