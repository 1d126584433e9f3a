#!lua
-- restore: rebuilds a reservation that PostgreSQL proves and Redis lost (spec
-- §4, protocol §5). It becomes ORDER_CREATED.
--
-- A sibling proves that the unit is still deducted: the user marker names the
-- reservation, its request field holds code 0 and this rid, or an index holds
-- it. Then only the hash and the request field are written and both index
-- members dropped. Without one the whole reserve was lost: an active order also
-- takes a unit, the user marker, and soldout at 0. A cancelled order never
-- takes a unit. released_total never changes.
--
-- Operator mode answers an approved order_after_release: the hash is there and
-- RELEASED, and becomes ORDER_CREATED, taking a unit. The request field stays
-- after a release, so siblings prove nothing there and are not asked; with the
-- hash gone it is REFUSED.
--
-- KEYS  1 meta  2 stock  3 request shard  4 user marker  5 reservation
--       6 send_pending  7 reservation_expiry  8 soldout
-- ARGV  1 reservation_id  2 request_id  3 user_id  4 activity_id  5 sku_id
--       6 activity_version  7 bucket_id  8 message_id  9 order_id
--       10 reserved_at_ms  11 expires_at_ms  12 schema_version
--       13 active, cancelled or operator  14 now_ms (0: Redis TIME)
-- reply {code, previous_marker, available, status}; available and status are
--       those after the call, '' where there are none
--   0 RESTORED_WITH_UNIT  1 EXISTS  2 RESTORED_HASH_ONLY  3 DEFICIT
--   4 NO_SIBLING (cancelled)  5 INVARIANT
--   6 ID_CONFLICT: the hash or the scope's meta names something else
--   7 REFUSED: meta or stock missing, retention passed, operator without hash
-- error WRONGDATA <key or ARGV[n]>, before any write

local function num(s)
  if s and string.find(s, '^%d+$') then
    local n = tonumber(s)
    if n < 9007199254740992 then return n end
  end
end

local function text(n) return string.format('%.0f', n) end

local function id(s, more)
  return #s >= 1 and #s <= 128 and not string.find(s, '[^A-Za-z0-9_%-' .. (more or '') .. ']')
end

local function wrong(what) return redis.error_reply('WRONGDATA ' .. what) end

if #KEYS ~= 8 or #ARGV ~= 14 then return wrong('ARGV') end
for i = 1, 5 do
  if not id(ARGV[i]) then return wrong('ARGV[' .. i .. ']') end
end
if not id(ARGV[8], ':') then return wrong('ARGV[8]') end
if ARGV[9] == '' then return wrong('ARGV[9]') end -- an adopter's order ids have a shape of their own
for _, i in ipairs({6, 7, 10, 11, 12, 14}) do
  if not num(ARGV[i]) then return wrong('ARGV[' .. i .. ']') end
end
local rid, request, user, mode, now = ARGV[1], ARGV[2], ARGV[3], ARGV[13], num(ARGV[14])
if mode ~= 'active' and mode ~= 'cancelled' and mode ~= 'operator' then return wrong('ARGV[13]') end
local types = {'hash', 'hash', 'hash', 'string', 'hash', 'zset', 'zset', 'string'}
for i = 1, 8 do
  local t = redis.call('TYPE', KEYS[i])['ok']
  if t ~= 'none' and t ~= types[i] then return wrong(KEYS[i]) end
end

local time = redis.call('TIME')
local clock = tonumber(time[1]) * 1000 + math.floor(tonumber(time[2]) / 1000)
if now == 0 then now = clock end
local meta = redis.call('HMGET', KEYS[1], 'activity_id', 'sku_id', 'version', 'bucket_id', 'retention_until_ms')
local stock = redis.call('HMGET', KEYS[2], 'initial', 'available', 'reserved')
local marker = redis.call('GET', KEYS[4]) or ''
local complete = meta[1] and meta[2] and meta[3] and meta[4] and meta[5] and stock[1] and stock[2] and stock[3]
if not complete then return {7, marker, num(stock[2]) or '', ''} end
local retention = num(meta[5])
if not retention then return wrong(KEYS[1]) end
local initial, available, reserved = num(stock[1]), num(stock[2]), num(stock[3])
if not (initial and available and reserved) then return wrong(KEYS[2]) end
if retention <= math.max(now, clock) then return {7, marker, available, ''} end
for i = 1, 4 do
  if meta[i] ~= ARGV[3 + i] then return {6, marker, available, ''} end
end

local r = redis.call('HMGET', KEYS[5], 'reservation_id', 'request_id', 'user_id', 'status', 'order_id')
local exists = redis.call('EXISTS', KEYS[5]) == 1
local status = r[4] or ''
if exists and (r[1] ~= rid or r[2] ~= request or r[3] ~= user) then return {6, marker, available, status} end
local operator = exists and mode == 'operator' and status == 'RELEASED'
if exists and not operator then return {1, marker, available, status} end
if not exists and mode == 'operator' then return {7, marker, available, ''} end
if operator and r[5] and r[5] ~= '' and r[5] ~= ARGV[9] then return {6, marker, available, status} end

local kept = redis.call('HGET', KEYS[3], request)
local ours = true -- the request field may be written
local named = false
if kept then
  local keptCode, keptRid, owner = string.match(kept, '^(%d+)|([^|]*)|[^|]*|[^|]*|([^|]*)$')
  if not owner then return wrong(KEYS[3]) end
  ours = owner == user
  named = num(keptCode) == 0 and keptRid == rid
end
local sibling = not operator and (marker == rid or named
  or redis.call('ZSCORE', KEYS[6], rid) or redis.call('ZSCORE', KEYS[7], rid))
if mode == 'cancelled' and not sibling then return {4, marker, available, status} end
if not sibling then
  if initial ~= available + reserved then return {5, marker, available, status} end
  if available < 1 then return {3, marker, available, status} end
end

local at = text(retention)
if sibling then
  redis.call('ZREM', KEYS[6], rid)
  redis.call('ZREM', KEYS[7], rid)
else
  available = available - 1
  redis.call('HSET', KEYS[2], 'available', text(available), 'reserved', text(reserved + 1))
  redis.call('SET', KEYS[4], rid, 'PXAT', at)
  if available == 0 then redis.call('SET', KEYS[8], '1', 'PXAT', at) end
end
if operator then
  redis.call('HSET', KEYS[5], 'status', 'ORDER_CREATED', 'order_id', ARGV[9], 'updated_at_ms', text(now))
else
  redis.call('HSET', KEYS[5], 'reservation_id', rid, 'request_id', request, 'message_id', ARGV[8],
    'activity_id', ARGV[4], 'sku_id', ARGV[5], 'user_id', user, 'activity_version', ARGV[6],
    'bucket_id', ARGV[7], 'status', 'ORDER_CREATED', 'reserved_at_ms', ARGV[10],
    'expires_at_ms', ARGV[11], 'updated_at_ms', text(now), 'order_id', ARGV[9],
    'schema_version', ARGV[12])
end
redis.call('PEXPIREAT', KEYS[5], at)
if ours then
  redis.call('HSET', KEYS[3], request, '0|' .. rid .. '|-1|ORDER_CREATED|' .. user)
  redis.call('PEXPIREAT', KEYS[3], at)
end
return {sibling and 2 or 0, marker, available, 'ORDER_CREATED'}
