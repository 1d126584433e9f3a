#!lua
-- adopt_orphan: gives an index member whose hash is gone a hash again, as
-- RELEASE_PENDING, so that the ordinary compensation can end it (protocol §3
-- ⚑). A person has approved it, and its claim is FENCED or REJECTED. "Hash
-- missing and member present" and the request that made it are checked here, at
-- the moment of the change.
--
-- KEYS  1 meta  2 request shard  3 reservation  4 send_pending
--       5 reservation_expiry
-- ARGV  1 reservation_id  2 request_id  3 user_id  4 activity_id  5 sku_id
--       6 activity_version  7 bucket_id  8 message_id  9 schema_version
--       10 now_ms (0: Redis TIME)
-- reply {code, status}, status being the one after the call, '' for none
--   0 ADOPTED  1 HASH_EXISTS  2 NO_MEMBER
--   3 REQUEST_MISMATCH: the request field is not 0|<rid>|…|<user>
--   7 REFUSED: meta missing or of another scope, retention passed
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

if #KEYS ~= 5 or #ARGV ~= 10 then return wrong('ARGV') end
for i = 1, 5 do
  if not id(ARGV[i]) then return wrong('ARGV[' .. i .. ']') end
end
if not id(ARGV[8], ':') then return wrong('ARGV[8]') end
for _, i in ipairs({6, 7, 9, 10}) do
  if not num(ARGV[i]) then return wrong('ARGV[' .. i .. ']') end
end
local rid, request, user, now = ARGV[1], ARGV[2], ARGV[3], num(ARGV[10])
local types = {'hash', 'hash', 'hash', 'zset', 'zset'}
for i = 1, 5 do
  local t = redis.call('TYPE', KEYS[i])['ok']
  if t ~= 'none' and t ~= types[i] then return wrong(KEYS[i]) end
end

local time = redis.call('TIME')
local clock = tonumber(time[1]) * 1000 + math.floor(tonumber(time[2]) / 1000)
if now == 0 then now = clock end
local status = redis.call('HGET', KEYS[3], 'status') or ''
local meta = redis.call('HMGET', KEYS[1], 'activity_id', 'sku_id', 'version', 'bucket_id', 'retention_until_ms')
for i = 1, 4 do
  if meta[i] ~= ARGV[3 + i] then return {7, status} end
end
if not meta[5] then return {7, status} end
local retention = num(meta[5])
if not retention then return wrong(KEYS[1]) end
if retention <= math.max(now, clock) then return {7, status} end

if redis.call('EXISTS', KEYS[3]) == 1 then return {1, status} end
if not (redis.call('ZSCORE', KEYS[4], rid) or redis.call('ZSCORE', KEYS[5], rid)) then return {2, ''} end
local kept = redis.call('HGET', KEYS[2], request)
if not kept then return {3, ''} end
local keptCode, keptRid, owner = string.match(kept, '^(%d+)|([^|]*)|[^|]*|[^|]*|([^|]*)$')
if keptCode ~= '0' or keptRid ~= rid or owner ~= user then return {3, ''} end

local at = text(retention)
redis.call('HSET', KEYS[3], 'reservation_id', rid, 'request_id', request, 'message_id', ARGV[8],
  'activity_id', ARGV[4], 'sku_id', ARGV[5], 'user_id', user, 'activity_version', ARGV[6],
  'bucket_id', ARGV[7], 'status', 'RELEASE_PENDING', 'reserved_at_ms', text(now),
  'expires_at_ms', text(now), 'updated_at_ms', text(now), 'schema_version', ARGV[9])
redis.call('PEXPIREAT', KEYS[3], at)
redis.call('ZREM', KEYS[4], rid)
redis.call('ZADD', KEYS[5], text(now), rid)
redis.call('PEXPIREAT', KEYS[5], at)
return {0, 'RELEASE_PENDING'}
