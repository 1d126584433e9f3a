#!lua flags=allow-oom
-- confirm: a REJECTED or RELEASE_PENDING reservation whose order exists becomes
-- ORDER_CREATED (protocol §3 row 3). The claim is final and no stock moves.
--
-- KEYS  1 reservation  2 send_pending  3 reservation_expiry
-- ARGV  1 reservation_id  2 order_id ('': unknown)  3 now_ms (0: Redis TIME)
-- reply {code, status}, status being the one after the call
--   0 CONFIRMED  1 ALREADY_CONFIRMED  2 NOT_FOUND  3 NOT_CONFIRMABLE
--   4 ID_CONFLICT: another reservation_id, or another order_id is stored
-- error WRONGDATA <key or ARGV[n]>, before any write

local function num(s)
  if s and string.find(s, '^%d+$') then
    local n = tonumber(s)
    if n < 9007199254740992 then return n end
  end
end

local function wrong(what) return redis.error_reply('WRONGDATA ' .. what) end

if #KEYS ~= 3 or #ARGV ~= 3 then return wrong('ARGV') end
local rid, order, now = ARGV[1], ARGV[2], num(ARGV[3])
if rid == '' then return wrong('ARGV[1]') end
if not now then return wrong('ARGV[3]') end
local types = {'hash', 'zset', 'zset'}
for i = 1, 3 do
  local t = redis.call('TYPE', KEYS[i])['ok']
  if t ~= 'none' and t ~= types[i] then return wrong(KEYS[i]) end
end

if redis.call('EXISTS', KEYS[1]) == 0 then return {2, ''} end
local r = redis.call('HMGET', KEYS[1], 'reservation_id', 'status', 'order_id')
local status = r[2] or ''
if r[1] ~= rid then return {4, status} end
local conflict = order ~= '' and r[3] and r[3] ~= '' and r[3] ~= order
if status == 'ORDER_CREATED' then return {conflict and 4 or 1, status} end
if status ~= 'REJECTED' and status ~= 'RELEASE_PENDING' then return {3, status} end
if conflict then return {4, status} end

if now == 0 then
  local time = redis.call('TIME')
  now = tonumber(time[1]) * 1000 + math.floor(tonumber(time[2]) / 1000)
end
redis.call('HSET', KEYS[1], 'status', 'ORDER_CREATED', 'updated_at_ms', string.format('%.0f', now))
if order ~= '' then redis.call('HSET', KEYS[1], 'order_id', order) end
redis.call('ZREM', KEYS[2], rid)
redis.call('ZREM', KEYS[3], rid)
return {0, 'ORDER_CREATED'}
