#!lua
-- recount: puts a scope's stock right by numbers that a person has approved
-- (spec §4, protocol §5). Only a scope that sells nothing is recounted, and
-- only while its numbers are still those that were seen: what is broken may be
-- no number at all, so they are compared as text.
--
-- KEYS  1 meta  2 stock  3 soldout
-- ARGV  1 initial  2 available  3 reserved  4 released_total, as seen; '' for
--       a released_total that is not there
--       5 initial  6 available  7 reserved  8 released_total, as they shall be
--       9 now_ms (0: Redis TIME)
-- reply {code, initial, available, reserved}, the numbers being those after the
--       call, '' for one that is not there or is no number of the contract
--   0 RECOUNTED  1 ALREADY_SO: stock and soldout are as they shall be
--   3 NOT_STOPPED: the state is neither PAUSED nor CLOSED
--   5 CHANGED: the stock is not the one that was seen
--   6 BAD_SUM: the new initial is not available + reserved
--   7 REFUSED: meta or stock missing or incomplete, retention passed
-- error WRONGDATA <key or ARGV[n]>, before any write

local function num(s)
  if s and string.find(s, '^%d+$') then
    local n = tonumber(s)
    if n < 9007199254740992 then return n end
  end
end

local function text(n) return string.format('%.0f', n) end

local function wrong(what) return redis.error_reply('WRONGDATA ' .. what) end

if #KEYS ~= 3 or #ARGV ~= 9 then return wrong('ARGV') end
for i = 5, 9 do
  if not num(ARGV[i]) then return wrong('ARGV[' .. i .. ']') end
end
local types = {'hash', 'hash', 'string'}
for i = 1, 3 do
  local t = redis.call('TYPE', KEYS[i])['ok']
  if t ~= 'none' and t ~= types[i] then return wrong(KEYS[i]) end
end

local meta = redis.call('HMGET', KEYS[1], 'state', 'retention_until_ms')
local stock = redis.call('HMGET', KEYS[2], 'initial', 'available', 'reserved', 'released_total')
local function reply(code)
  return {code, num(stock[1]) or '', num(stock[2]) or '', num(stock[3]) or ''}
end
if not (meta[1] and meta[2] and stock[1] and stock[2] and stock[3]) then return reply(7) end
local retention = num(meta[2])
if not retention then return wrong(KEYS[1]) end
local time = redis.call('TIME')
local clock = tonumber(time[1]) * 1000 + math.floor(tonumber(time[2]) / 1000)
if retention <= math.max(num(ARGV[9]), clock) then return reply(7) end
if meta[1] ~= 'PAUSED' and meta[1] ~= 'CLOSED' then return reply(3) end
if num(ARGV[5]) ~= num(ARGV[6]) + num(ARGV[7]) then return reply(6) end

local new, seen, already = {}, true, true
for i = 1, 4 do
  new[i] = text(num(ARGV[4 + i]))
  seen = seen and (stock[i] or '') == ARGV[i]
  already = already and stock[i] == new[i]
end
local empty = num(ARGV[6]) == 0
if already and empty == (redis.call('EXISTS', KEYS[3]) == 1) then return reply(1) end
if not seen then return reply(5) end
local at = text(retention)
redis.call('HSET', KEYS[2], 'initial', new[1], 'available', new[2], 'reserved', new[3], 'released_total', new[4])
redis.call('PEXPIREAT', KEYS[2], at)
if empty then
  redis.call('SET', KEYS[3], '1', 'PXAT', at)
else
  redis.call('DEL', KEYS[3])
end
stock = new
return reply(0)
