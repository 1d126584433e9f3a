#!lua flags=allow-oom
-- unindex: drops the leftover index members of a decided reservation
-- (protocol §3 row 1).
--
-- KEYS  1 reservation  2 send_pending  3 reservation_expiry
-- ARGV  1 reservation_id
-- reply {code, status, removed}, removed being the number of members removed
--   0 REMOVED  1 NOT_INDEXED  2 NOT_FOUND  3 NOT_TERMINAL  4 ID_CONFLICT
-- error WRONGDATA <key or ARGV[n]>, before any write

local function wrong(what) return redis.error_reply('WRONGDATA ' .. what) end

if #KEYS ~= 3 or #ARGV ~= 1 then return wrong('ARGV') end
local rid = ARGV[1]
if rid == '' then return wrong('ARGV[1]') end
local types = {'hash', 'zset', 'zset'}
for i = 1, 3 do
  local t = redis.call('TYPE', KEYS[i])['ok']
  if t ~= 'none' and t ~= types[i] then return wrong(KEYS[i]) end
end

if redis.call('EXISTS', KEYS[1]) == 0 then return {2, '', 0} end
local r = redis.call('HMGET', KEYS[1], 'reservation_id', 'status')
local status = r[2] or ''
if r[1] ~= rid then return {4, status, 0} end
if status ~= 'ORDER_CREATED' and status ~= 'RELEASED' then return {3, status, 0} end
local removed = redis.call('ZREM', KEYS[2], rid) + redis.call('ZREM', KEYS[3], rid)
return {removed > 0 and 0 or 1, status, removed}
