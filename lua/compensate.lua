#!lua flags=allow-oom
-- compensate: gives the unit of a REJECTED or RELEASE_PENDING reservation back,
-- once (spec §4). The caller holds a claim FENCED or REJECTED for it
-- (protocol S1). A missing reservation is never answered by adding stock.
--
-- KEYS  1 stock  2 user marker  3 reservation  4 send_pending
--       5 reservation_expiry  6 soldout
-- ARGV  1 reservation_id  2 release_reason  3 now_ms (0: Redis TIME)
-- reply {code, available, marker_deleted, status}; available and status are
--       those after the call, '' where there are none
--   0 RELEASED  1 ALREADY_RELEASED  2 RESERVATION_NOT_FOUND
--   3 NOT_COMPENSATABLE
--   4 INVARIANT_VIOLATION: also wrong data in any key, and wrong arguments
--   5 RESERVATION_ID_CONFLICT: also when KEYS[2] is not the marker of the
--     reservation's own user

local function num(s)
  if s and string.find(s, '^%d+$') then
    local n = tonumber(s)
    if n < 9007199254740992 then return n end
  end
end

local function text(n) return string.format('%.0f', n) end

if #KEYS ~= 6 or #ARGV ~= 3 then return {4, '', 0, ''} end
local rid, reason, now = ARGV[1], ARGV[2], num(ARGV[3])
if rid == '' or not now then return {4, '', 0, ''} end
local types = {'hash', 'string', 'hash', 'zset', 'zset', 'string'}
for i = 1, 6 do
  local t = redis.call('TYPE', KEYS[i])['ok']
  if t ~= 'none' and t ~= types[i] then return {4, '', 0, ''} end
end

local stock = redis.call('HMGET', KEYS[1], 'initial', 'available', 'reserved', 'released_total')
local initial, available, reserved = num(stock[1]), num(stock[2]), num(stock[3])
local shown = available or ''

if redis.call('EXISTS', KEYS[3]) == 0 then return {2, shown, 0, ''} end
local r = redis.call('HMGET', KEYS[3], 'reservation_id', 'status', 'user_id')
local status = r[2] or ''
if r[1] ~= rid or not r[3] or r[3] == '' then return {5, shown, 0, status} end
local suffix = 'user:' .. r[3]
if string.sub(KEYS[2], -#suffix) ~= suffix then return {5, shown, 0, status} end
if status == 'RELEASED' then return {1, shown, 0, status} end
if status ~= 'REJECTED' and status ~= 'RELEASE_PENDING' then return {3, shown, 0, status} end

-- released_total is only for audit and starts with the first release
local released = 0
if stock[4] then released = num(stock[4]) end
if not (initial and available and reserved and released) or initial ~= available + reserved
    or reserved < 1 or released >= 9007199254740991 then
  return {4, shown, 0, status}
end

if now == 0 then
  local time = redis.call('TIME')
  now = tonumber(time[1]) * 1000 + math.floor(tonumber(time[2]) / 1000)
end
redis.call('HSET', KEYS[3], 'status', 'RELEASED', 'released_at_ms', text(now), 'updated_at_ms', text(now))
if reason ~= '' then redis.call('HSET', KEYS[3], 'release_reason', reason) end
redis.call('HSET', KEYS[1], 'available', text(available + 1), 'reserved', text(reserved - 1),
  'released_total', text(released + 1))
local deleted = 0
if redis.call('GET', KEYS[2]) == rid then deleted = redis.call('DEL', KEYS[2]) end
redis.call('ZREM', KEYS[4], rid)
redis.call('ZREM', KEYS[5], rid)
redis.call('DEL', KEYS[6])
return {0, available + 1, deleted, 'RELEASED'}
