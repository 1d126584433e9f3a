#!lua
-- mark_user: compare-and-set of a user's marker from what the caller saw
-- (protocol §5 ⚑). From none it is set for any live reservation; from another
-- reservation's only for ORDER_CREATED: the caller knows that ours has an
-- active order and the other one has none.
--
-- KEYS  1 reservation  2 user marker
-- ARGV  1 reservation_id  2 marker seen ('': none)
-- reply {code, marker}, marker being the one after the call, '' for none
--   0 MARKED  1 ALREADY_MARKED  2 NOT_FOUND  3 NOT_LIVE
--   4 ID_CONFLICT: also when KEYS[2] is not the marker of the reservation's
--     own user
--   5 MARKER_CHANGED
-- error WRONGDATA <key or ARGV[n]>, before any write

local function wrong(what) return redis.error_reply('WRONGDATA ' .. what) end

if #KEYS ~= 2 or #ARGV ~= 2 then return wrong('ARGV') end
local rid, seen = ARGV[1], ARGV[2]
if rid == '' then return wrong('ARGV[1]') end
local types = {'hash', 'string'}
for i = 1, 2 do
  local t = redis.call('TYPE', KEYS[i])['ok']
  if t ~= 'none' and t ~= types[i] then return wrong(KEYS[i]) end
end

local marker = redis.call('GET', KEYS[2]) or ''
if redis.call('EXISTS', KEYS[1]) == 0 then return {2, marker} end
local r = redis.call('HMGET', KEYS[1], 'reservation_id', 'status', 'user_id')
if r[1] ~= rid or not r[3] or r[3] == '' then return {4, marker} end
local suffix = 'user:' .. r[3]
if string.sub(KEYS[2], -#suffix) ~= suffix then return {4, marker} end
local live = {RESERVED = true, SEND_UNKNOWN = true, ENQUEUED = true, REJECTED = true,
  RELEASE_PENDING = true, ORDER_CREATED = true}
if not live[r[2] or ''] then return {3, marker} end
if marker == rid then return {1, marker} end
if marker ~= seen then return {5, marker} end
if seen ~= '' and r[2] ~= 'ORDER_CREATED' then return {3, marker} end

-- A marker that has an expiry keeps it; a new one gets the hash's own.
redis.call('SET', KEYS[2], rid, 'KEEPTTL')
if redis.call('PEXPIRETIME', KEYS[2]) == -1 then
  local at = redis.call('PEXPIRETIME', KEYS[1])
  local time = redis.call('TIME')
  if at > tonumber(time[1]) * 1000 + math.floor(tonumber(time[2]) / 1000) then
    redis.call('PEXPIREAT', KEYS[2], string.format('%.0f', at))
  end
end
return {0, rid}
