#!lua
-- reserve: takes one unit of a scope's stock for a user (spec §4).
--
-- KEYS  1 meta  2 stock  3 request shard  4 user marker  5 reservation
--       6 send_pending  7 reservation_expiry  8 soldout
-- ARGV  1 request_id  2 reservation_id  3 activity_id  4 sku_id  5 user_id
--       6 activity_version  7 reservation_ttl_ms  8 schema_version
--       9 bucket_id  10 message_id  11 now_ms (0: Redis TIME)
-- reply {code, reservation_id, remaining, status, replay}
--    0 ACCEPTED (status QUEUED)
--   10 USER_ALREADY_RESERVED, with the existing reservation_id
--   11 ACTIVITY_NOT_STARTED   12 ACTIVITY_ENDED   13 ACTIVITY_NOT_ACTIVE
--   14 VERSION_MISMATCH       15 SOLD_OUT
--   16 REQUEST_ID_CONFLICT    17 CONFIG_MISSING, STOCK_CONFIG_MISSING
--   18 RESERVATION_ID_CONFLICT
--   19 WRONG_TYPE, CORRUPTED_REQUEST_RESULT, META_SCOPE_MISMATCH,
--      INVALID_META_TIME, STOCK_INVARIANT_VIOLATION
--   20 BAD_ARGUMENT, RESERVATION_TTL_TOO_LONG
-- Codes 0 and 10 to 15 are final for their request_id: they are kept in the
-- request shard and replayed with replay = 1. Codes 16 to 20 are never kept.
--
-- Everything is checked before the first write, since Redis does not roll back.

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

-- a version or a bucket: decimal, no leading zero
local function decimal(s) return num(s) and (s == '0' or string.sub(s, 1, 1) ~= '0') end

local function refuse(code, status, remaining)
  return {code, '', remaining or -1, status, 0}
end

-- 1. arguments
if #KEYS ~= 8 or #ARGV ~= 11 then return refuse(20, 'BAD_ARGUMENT') end
local request, rid, activity, sku, user = ARGV[1], ARGV[2], ARGV[3], ARGV[4], ARGV[5]
local version, schema, bucket, message = ARGV[6], ARGV[8], ARGV[9], ARGV[10]
local ttl, now = num(ARGV[7]), num(ARGV[11])
if not (id(request) and id(rid) and id(activity) and id(sku) and id(user) and id(message, ':')
    and decimal(version) and decimal(bucket) and num(schema) and ttl and ttl > 0 and now) then
  return refuse(20, 'BAD_ARGUMENT')
end

-- 2. types
local types = {'hash', 'hash', 'hash', 'string', 'hash', 'zset', 'zset', 'string'}
for i = 1, 8 do
  local t = redis.call('TYPE', KEYS[i])['ok']
  if t ~= 'none' and t ~= types[i] then return refuse(19, 'WRONG_TYPE') end
end

-- 3. the result of an earlier run: the owner first, so that nothing leaks
local kept = redis.call('HGET', KEYS[3], request)
if kept then
  local owner = string.match(kept, '^[^|]*|[^|]*|[^|]*|[^|]*|([^|]*)$')
  if not owner then return refuse(19, 'CORRUPTED_REQUEST_RESULT') end
  if owner ~= user then return {16, '', -1, 'REQUEST_ID_CONFLICT', 1} end
  local code, keptRid, remaining, status =
    string.match(kept, '^(%d+)|([A-Za-z0-9_%-]*)|(%-?%d+)|([A-Z_]+)|')
  code = num(code)
  local named = code == 0 or code == 10
  if not (named or (code and code >= 11 and code <= 15)) or named ~= (keptRid ~= '')
      or not (remaining == '-1' or num(remaining)) then
    return refuse(19, 'CORRUPTED_REQUEST_RESULT')
  end
  return {code, keptRid, tonumber(remaining), status, 1}
end

-- 4. meta. PEXPIREAT into the past would delete a key, so a retention that has
-- passed on the server's own clock is refused even when now_ms is given.
local time = redis.call('TIME')
local clock = tonumber(time[1]) * 1000 + math.floor(tonumber(time[2]) / 1000)
if now == 0 then now = clock end
local meta = redis.call('HMGET', KEYS[1], 'activity_id', 'sku_id', 'bucket_id', 'version', 'state',
  'starts_at_ms', 'ends_at_ms', 'retention_until_ms', 'schema_version')
for i = 1, 9 do
  if not meta[i] or meta[i] == '' then return refuse(17, 'CONFIG_MISSING') end
end
if meta[1] ~= activity or meta[2] ~= sku or meta[3] ~= bucket then
  return refuse(19, 'META_SCOPE_MISMATCH')
end
local starts, ends, retention = num(meta[6]), num(meta[7]), num(meta[8])
if not (starts and ends and retention) or starts >= ends or ends > retention
    or retention <= math.max(now, clock) then
  return refuse(19, 'INVALID_META_TIME')
end

local function keep(code, keptRid, remaining, status)
  redis.call('HSET', KEYS[3], request,
    code .. '|' .. keptRid .. '|' .. text(remaining) .. '|' .. status .. '|' .. user)
  redis.call('PEXPIREAT', KEYS[3], text(retention))
end

-- 5. the reservation is there already: the kept result was lost
if redis.call('EXISTS', KEYS[5]) == 1 then
  local r = redis.call('HMGET', KEYS[5], 'reservation_id', 'request_id', 'user_id', 'status')
  if r[1] ~= rid or r[2] ~= request or r[3] ~= user then
    return refuse(18, 'RESERVATION_ID_CONFLICT')
  end
  if not r[4] or not string.find(r[4], '^[A-Z_]+$') then return refuse(19, 'WRONG_TYPE') end
  keep(0, rid, -1, r[4])
  return {0, rid, -1, r[4], 1}
end

local stock = redis.call('HMGET', KEYS[2], 'initial', 'available', 'reserved', 'released_total')
local initial, available, reserved = num(stock[1]), num(stock[2]), num(stock[3])

local function final(code, status, keptRid)
  local remaining = available or -1
  keep(code, keptRid or '', remaining, status)
  return {code, keptRid or '', remaining, status, 0}
end

-- 6. one live reservation per user and scope
local marker = redis.call('GET', KEYS[4])
if marker then
  if not id(marker) then return refuse(19, 'WRONG_TYPE') end
  return final(10, 'USER_ALREADY_RESERVED', marker)
end

-- 7. version, time, state
if meta[4] ~= version then return final(14, 'VERSION_MISMATCH') end
if now < starts then return final(11, 'ACTIVITY_NOT_STARTED') end
if now >= ends then return final(12, 'ACTIVITY_ENDED') end
if meta[5] ~= 'ACTIVE' then return final(13, 'ACTIVITY_NOT_ACTIVE') end

-- 8. stock. released_total is only for audit and starts with the first release.
for i = 1, 3 do
  if not stock[i] or stock[i] == '' then return refuse(17, 'STOCK_CONFIG_MISSING') end
end
if not (initial and available and reserved) or (stock[4] and not num(stock[4])) then
  return refuse(19, 'WRONG_TYPE')
end
if initial ~= available + reserved then return refuse(19, 'STOCK_INVARIANT_VIOLATION', available) end
if available <= 0 then
  redis.call('SET', KEYS[8], '1', 'PXAT', text(retention))
  return final(15, 'SOLD_OUT')
end

-- 9. it must be decided before its keys expire
local expires = now + ttl
if expires >= retention then return refuse(20, 'RESERVATION_TTL_TOO_LONG', available) end

local remaining = available - 1
local at = text(retention)
redis.call('SET', KEYS[4], rid, 'PXAT', at)
redis.call('HSET', KEYS[5], 'reservation_id', rid, 'request_id', request, 'message_id', message,
  'activity_id', activity, 'sku_id', sku, 'user_id', user, 'activity_version', version,
  'bucket_id', bucket, 'status', 'RESERVED', 'reserved_at_ms', text(now),
  'expires_at_ms', text(expires), 'updated_at_ms', text(now), 'schema_version', schema)
redis.call('PEXPIREAT', KEYS[5], at)
redis.call('ZADD', KEYS[6], text(now), rid)
redis.call('PEXPIREAT', KEYS[6], at)
redis.call('ZADD', KEYS[7], text(expires), rid)
redis.call('PEXPIREAT', KEYS[7], at)
redis.call('HSET', KEYS[2], 'available', text(remaining), 'reserved', text(reserved + 1))
keep(0, rid, remaining, 'QUEUED')
if remaining == 0 then redis.call('SET', KEYS[8], '1', 'PXAT', at) end
return {0, rid, remaining, 'QUEUED', 0}
