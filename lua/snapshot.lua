#!lua flags=no-writes
-- snapshot: the numbers of a scope at one instant, and that instant on the
-- clock of the scope's own node.
--
-- KEYS  1 meta  2 stock  3 send_pending  4 reservation_expiry
-- ARGV  –
-- reply {time_ms, state, retention_until_ms, initial, available, reserved,
--        released_total, pending_n, pending_oldest, expiry_n, expiry_oldest};
--       '' for what is missing; oldest is the lowest score, in ms
-- error WRONGDATA <key>

local function num(s)
  if s and string.find(s, '^%d+$') then
    local n = tonumber(s)
    if n < 9007199254740992 then return n end
  end
end

local function wrong(what) return redis.error_reply('WRONGDATA ' .. what) end

if #KEYS ~= 4 or #ARGV ~= 0 then return wrong('ARGV') end
local types = {'hash', 'hash', 'zset', 'zset'}
for i = 1, 4 do
  local t = redis.call('TYPE', KEYS[i])['ok']
  if t ~= 'none' and t ~= types[i] then return wrong(KEYS[i]) end
end

local time = redis.call('TIME')
local reply = {tonumber(time[1]) * 1000 + math.floor(tonumber(time[2]) / 1000)}

local meta = redis.call('HMGET', KEYS[1], 'state', 'retention_until_ms')
reply[2], reply[3] = meta[1] or '', ''
if meta[2] then
  reply[3] = num(meta[2])
  if not reply[3] then return wrong(KEYS[1]) end
end
local stock = redis.call('HMGET', KEYS[2], 'initial', 'available', 'reserved', 'released_total')
for i = 1, 4 do
  reply[3 + i] = ''
  if stock[i] then
    reply[3 + i] = num(stock[i])
    if not reply[3 + i] then return wrong(KEYS[2]) end
  end
end
for i = 3, 4 do
  local at = 2 * i + 2
  reply[at], reply[at + 1] = redis.call('ZCARD', KEYS[i]), ''
  local oldest = redis.call('ZRANGE', KEYS[i], 0, 0, 'WITHSCORES')
  if oldest[2] then
    -- One member with a score that no script writes must not hide the numbers of
    -- its scope: it counts as the nearest time.
    local score = tonumber(oldest[2]) or 0
    reply[at + 1] = math.floor(math.max(0, math.min(score, 9007199254740991)))
  end
end
return reply
