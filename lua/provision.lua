#!lua
-- provision: creates a scope's meta and stock, once (protocol §4, scope
-- lifecycle). Whatever is there already is never refilled.
--
-- KEYS  1 meta  2 stock
-- ARGV  1 activity_id  2 sku_id  3 bucket_id  4 activity_version  5 state
--       6 starts_at_ms  7 ends_at_ms  8 retention_until_ms  9 schema_version
--       10 initial  11 now_ms (0: Redis TIME)
-- reply {code}
--   0 CREATED  1 SAME (meta is equal; initial is not compared)
--   2 DIFFERENT  3 PARTIAL (one of the two keys is there)
--   7 REFUSED: retention passed
-- error WRONGDATA <key or ARGV[n]>, before any write

local function num(s)
  if s and string.find(s, '^%d+$') then
    local n = tonumber(s)
    if n < 9007199254740992 then return n end
  end
end

local function text(n) return string.format('%.0f', n) end

local function id(s) return #s >= 1 and #s <= 128 and not string.find(s, '[^A-Za-z0-9_%-]') end

-- a version or a bucket: decimal, no leading zero
local function decimal(s) return num(s) and (s == '0' or string.sub(s, 1, 1) ~= '0') end

local function wrong(what) return redis.error_reply('WRONGDATA ' .. what) end

if #KEYS ~= 2 or #ARGV ~= 11 then return wrong('ARGV') end
local states = {PREPARED = true, ACTIVE = true, PAUSED = true, CLOSED = true}
for i = 1, 11 do
  local right = true
  if i <= 2 then right = id(ARGV[i])
  elseif i <= 4 then right = decimal(ARGV[i])
  elseif i == 5 then right = states[ARGV[5]]
  else right = num(ARGV[i]) end
  if not right then return wrong('ARGV[' .. i .. ']') end
end
local starts, ends, retention, now = num(ARGV[6]), num(ARGV[7]), num(ARGV[8]), num(ARGV[11])
if starts >= ends then return wrong('ARGV[7]') end
if ends > retention then return wrong('ARGV[8]') end
for i = 1, 2 do
  local t = redis.call('TYPE', KEYS[i])['ok']
  if t ~= 'none' and t ~= 'hash' then return wrong(KEYS[i]) end
end

local there = redis.call('EXISTS', KEYS[1]) + redis.call('EXISTS', KEYS[2])
if there == 1 then return {3} end
local fields = {'activity_id', 'sku_id', 'bucket_id', 'version', 'state', 'starts_at_ms', 'ends_at_ms',
  'retention_until_ms', 'schema_version'}
if there == 2 then
  local meta = redis.call('HMGET', KEYS[1], unpack(fields))
  for i = 1, #fields do
    if meta[i] ~= ARGV[i] then return {2} end
  end
  return {1}
end

local time = redis.call('TIME')
local clock = tonumber(time[1]) * 1000 + math.floor(tonumber(time[2]) / 1000)
if retention <= math.max(now, clock) then return {7} end
local set = {}
for i, field in ipairs(fields) do
  set[#set + 1] = field
  set[#set + 1] = ARGV[i]
end
redis.call('HSET', KEYS[1], unpack(set))
redis.call('PEXPIREAT', KEYS[1], text(retention))
redis.call('HSET', KEYS[2], 'initial', ARGV[10], 'available', ARGV[10], 'reserved', '0', 'released_total', '0')
redis.call('PEXPIREAT', KEYS[2], text(retention))
return {0}
