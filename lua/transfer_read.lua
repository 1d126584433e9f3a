#!lua flags=no-writes
-- transfer_read: a bucket's stock and its side of transfers, at one instant.
-- Both scripts that move units change stock and marker together, so only a read
-- of both together adds up, whatever goes on.
--
-- KEYS  1 meta  2 stock  3… transfer markers, as many as are asked for
-- ARGV  –
-- reply {time_ms, state, retention_until_ms, initial, available, reserved, and
--       for each marker: leg, amount, updated_at_ms}; '' for what is missing
-- error WRONGDATA <key>

local function num(s)
  if s and string.find(s, '^%d+$') then
    local n = tonumber(s)
    if n < 9007199254740992 then return n end
  end
end

local function wrong(what) return redis.error_reply('WRONGDATA ' .. what) end

if #KEYS < 2 or #ARGV ~= 0 then return wrong('ARGV') end
for i = 1, #KEYS do
  local t = redis.call('TYPE', KEYS[i])['ok']
  if t ~= 'none' and t ~= 'hash' then return wrong(KEYS[i]) end
end

local time = redis.call('TIME')
local reply = {tonumber(time[1]) * 1000 + math.floor(tonumber(time[2]) / 1000)}
local meta = redis.call('HMGET', KEYS[1], 'state', 'retention_until_ms')
reply[2], reply[3] = meta[1] or '', ''
if meta[2] then
  reply[3] = num(meta[2])
  if not reply[3] then return wrong(KEYS[1]) end
end
local stock = redis.call('HMGET', KEYS[2], 'initial', 'available', 'reserved')
for i = 1, 3 do
  reply[3 + i] = ''
  if stock[i] then
    reply[3 + i] = num(stock[i])
    if not reply[3 + i] then return wrong(KEYS[2]) end
  end
end
for i = 3, #KEYS do
  local marker = redis.call('HMGET', KEYS[i], 'leg', 'amount', 'updated_at_ms')
  local at = 3 * i - 2
  reply[at], reply[at + 1], reply[at + 2] = '', '', ''
  if redis.call('EXISTS', KEYS[i]) == 1 then
    reply[at], reply[at + 1], reply[at + 2] = marker[1], num(marker[2]), num(marker[3])
    if (marker[1] ~= 'out' and marker[1] ~= 'in') or not reply[at + 1] or not reply[at + 2] then
      return wrong(KEYS[i])
    end
  end
end
return reply
