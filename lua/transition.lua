#!lua flags=allow-oom
-- transition: moves a reservation along the legal path (spec §3, §4). It never
-- changes stock, and it makes neither RELEASED (compensate) nor the way from
-- RELEASE_PENDING or REJECTED to ORDER_CREATED (confirm).
--
-- KEYS  1 reservation  2 send_pending  3 reservation_expiry
-- ARGV  1 reservation_id  2 target  3 now_ms (0: Redis TIME)
--       4 next_retry_at_ms (SEND_UNKNOWN only)  5 message_id ('': not compared)
--       6 order_id ('': not compared)  7 error_code ('': none)
--       8 mq_position (optional; '': none; written on 0 only)
-- reply {code, current, target}, current being the status before the call
--   0 UPDATED  1 IDEMPOTENT  2 NOT_FOUND  3 ILLEGAL_TRANSITION  4 ID_CONFLICT
-- error WRONGDATA <key or ARGV[n]>, before any write

local function num(s)
  if s and string.find(s, '^%d+$') then
    local n = tonumber(s)
    if n < 9007199254740992 then return n end
  end
end

local function text(n) return string.format('%.0f', n) end

local function wrong(what) return redis.error_reply('WRONGDATA ' .. what) end

if #KEYS ~= 3 or (#ARGV ~= 7 and #ARGV ~= 8) then return wrong('ARGV') end
local rid, target = ARGV[1], ARGV[2]
local now, retry = num(ARGV[3]), num(ARGV[4])
if rid == '' then return wrong('ARGV[1]') end
if not now then return wrong('ARGV[3]') end
if not retry and (target == 'SEND_UNKNOWN' or ARGV[4] ~= '') then return wrong('ARGV[4]') end
local types = {'hash', 'zset', 'zset'}
for i = 1, 3 do
  local t = redis.call('TYPE', KEYS[i])['ok']
  if t ~= 'none' and t ~= types[i] then return wrong(KEYS[i]) end
end

local time = redis.call('TIME')
local clock = tonumber(time[1]) * 1000 + math.floor(tonumber(time[2]) / 1000)
if now == 0 then now = clock end

-- An index that the ZADD created would never expire: it gets the hash's own
-- expiry. One that has an expiry keeps it.
local function inherit(key)
  if redis.call('PEXPIRETIME', key) ~= -1 then return end
  local at = redis.call('PEXPIRETIME', KEYS[1])
  if at > clock then redis.call('PEXPIREAT', key, text(at)) end
end

if redis.call('EXISTS', KEYS[1]) == 0 then return {2, '', target} end
local r = redis.call('HMGET', KEYS[1], 'reservation_id', 'status', 'message_id', 'order_id')
local current = r[2] or ''
if r[1] ~= rid then return {4, current, target} end

if current == target then
  if target == 'SEND_UNKNOWN' then
    -- Otherwise a message that keeps failing stays due and is retried in a hot loop.
    redis.call('ZADD', KEYS[2], 'GT', text(retry), rid)
    inherit(KEYS[2])
  end
  return {1, current, target}
end

local legal = {
  RESERVED = {SEND_UNKNOWN = true, ENQUEUED = true, RELEASE_PENDING = true},
  SEND_UNKNOWN = {ENQUEUED = true, RELEASE_PENDING = true},
  ENQUEUED = {ORDER_CREATED = true, REJECTED = true, RELEASE_PENDING = true},
  REJECTED = {RELEASE_PENDING = true},
}
if not (legal[current] and legal[current][target]) then return {3, current, target} end

local message, order, errorCode, position = ARGV[5], ARGV[6], ARGV[7], ARGV[8] or ''
local function differs(given, stored) return given ~= '' and stored and stored ~= '' and stored ~= given end
if differs(message, r[3]) or differs(order, r[4]) then return {4, current, target} end

local set = {'status', target, 'updated_at_ms', text(now)}
local function put(field, value)
  if value ~= '' then
    set[#set + 1] = field
    set[#set + 1] = value
  end
end
put('message_id', message)
put('order_id', order)
put('error_code', errorCode)
put('mq_position', position)
redis.call('HSET', KEYS[1], unpack(set))

if target == 'SEND_UNKNOWN' then
  redis.call('ZADD', KEYS[2], text(retry), rid)
  inherit(KEYS[2])
else
  redis.call('ZREM', KEYS[2], rid)
end
if target == 'ORDER_CREATED' then
  redis.call('ZREM', KEYS[3], rid)
elseif target == 'REJECTED' or target == 'RELEASE_PENDING' then
  -- due at once for the compensator, not at the old expiry
  redis.call('ZADD', KEYS[3], text(now), rid)
  inherit(KEYS[3])
end
return {0, current, target}
