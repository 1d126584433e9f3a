#!lua flags=allow-oom
-- defer: makes a member of an index wait (protocol §3, "wait"). The score moves
-- forward, never back; a removed member is never added again and an expired
-- hash never recreated. updated_at_ms stays: a wait is not a send attempt.
--
-- KEYS  1 reservation  2 index (send_pending or reservation_expiry)
-- ARGV  1 reservation_id
--       2 expected status; '' = the hash must be missing, '*' = the hash is not
--         read: these two move the score alone
--       3 next_ms
-- reply {code, retry_count, status}; '' for what is not there or was not read
--   0 MOVED (retry_count + 1)  1 NO_MEMBER_OR_NOT_LATER  3 STATUS_CHANGED
-- error WRONGDATA <key or ARGV[n]>, before any write

local function num(s)
  if s and string.find(s, '^%d+$') then
    local n = tonumber(s)
    if n < 9007199254740992 then return n end
  end
end

local function wrong(what) return redis.error_reply('WRONGDATA ' .. what) end

if #KEYS ~= 2 or #ARGV ~= 3 then return wrong('ARGV') end
local rid, expected, nextMS = ARGV[1], ARGV[2], num(ARGV[3])
if rid == '' then return wrong('ARGV[1]') end
if not nextMS then return wrong('ARGV[3]') end
local t = redis.call('TYPE', KEYS[2])['ok']
if t ~= 'none' and t ~= 'zset' then return wrong(KEYS[2]) end

local status, count, counts = '', '', false
if expected ~= '*' then
  t = redis.call('TYPE', KEYS[1])['ok']
  if t ~= 'none' and t ~= 'hash' then return wrong(KEYS[1]) end
  if t == 'hash' then
    local r = redis.call('HMGET', KEYS[1], 'status', 'retry_count')
    status = r[1] or ''
    if r[2] then
      count = num(r[2])
      if not count or count >= 9007199254740991 then return wrong(KEYS[1]) end
    end
    if expected == '' or status ~= expected then return {3, count, status} end
    counts = true
  elseif expected ~= '' then
    return {3, '', ''}
  end
end

if redis.call('ZADD', KEYS[2], 'XX', 'GT', 'CH', string.format('%.0f', nextMS), rid) == 0 then
  return {1, count, status}
end
if counts then count = redis.call('HINCRBY', KEYS[1], 'retry_count', 1) end
return {0, count, status}
