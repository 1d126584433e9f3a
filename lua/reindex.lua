#!lua
-- reindex: puts an undecided reservation back into the indexes that lost it
-- (spec §4). A member that is there keeps its score (ZADD NX).
--
-- send_pending takes RESERVED and SEND_UNKNOWN, at now; reservation_expiry
-- takes every undecided status, at expires_at_ms, and REJECTED and
-- RELEASE_PENDING at now.
--
-- KEYS  1 reservation  2 send_pending  3 reservation_expiry
-- ARGV  1 reservation_id  2 now_ms (0: Redis TIME)
-- reply {code, status, added}, added being the number of members added
--   0 REINDEXED  1 ALREADY_INDEXED  2 NOT_FOUND  3 TERMINAL  4 ID_CONFLICT
-- error WRONGDATA <key or ARGV[n]>, before any write

local function num(s)
  if s and string.find(s, '^%d+$') then
    local n = tonumber(s)
    if n < 9007199254740992 then return n end
  end
end

local function text(n) return string.format('%.0f', n) end

local function wrong(what) return redis.error_reply('WRONGDATA ' .. what) end

if #KEYS ~= 3 or #ARGV ~= 2 then return wrong('ARGV') end
local rid, now = ARGV[1], num(ARGV[2])
if rid == '' then return wrong('ARGV[1]') end
if not now then return wrong('ARGV[2]') end
local types = {'hash', 'zset', 'zset'}
for i = 1, 3 do
  local t = redis.call('TYPE', KEYS[i])['ok']
  if t ~= 'none' and t ~= types[i] then return wrong(KEYS[i]) end
end

if redis.call('EXISTS', KEYS[1]) == 0 then return {2, '', 0} end
local r = redis.call('HMGET', KEYS[1], 'reservation_id', 'status', 'expires_at_ms')
local status = r[2] or ''
if r[1] ~= rid then return {4, status, 0} end
if status == 'ORDER_CREATED' or status == 'RELEASED' then return {3, status, 0} end

local time = redis.call('TIME')
local clock = tonumber(time[1]) * 1000 + math.floor(tonumber(time[2]) / 1000)
if now == 0 then now = clock end
local due
local unsent = status == 'RESERVED' or status == 'SEND_UNKNOWN'
if unsent or status == 'ENQUEUED' then
  due = num(r[3])
elseif status == 'REJECTED' or status == 'RELEASE_PENDING' then
  due = now
end
if not due then return wrong(KEYS[1]) end

-- An index that the ZADD created would never expire: it gets the hash's own
-- expiry. One that has an expiry keeps it.
local function add(key, score)
  local added = redis.call('ZADD', key, 'NX', text(score), rid)
  if added == 1 and redis.call('PEXPIRETIME', key) == -1 then
    local at = redis.call('PEXPIRETIME', KEYS[1])
    if at > clock then redis.call('PEXPIREAT', key, text(at)) end
  end
  return added
end

local added = add(KEYS[3], due)
if unsent then added = added + add(KEYS[2], now) end
return {added > 0 and 0 or 1, status, added}
