#!lua
-- transfer_in: gives a bucket the units that another one of the same version
-- gave up (protocol §4, transfer), or takes back what was given too much. The
-- target is absolute: what the marker says was given already is not given again,
-- whoever asks and however often.
--
-- KEYS  1 meta  2 stock  3 transfer marker  4 soldout
-- ARGV  1 transfer_id  2 target  3 raise or lower  4 now_ms (0: Redis TIME)
-- reply {code, in_force, available, initial}: in_force is the amount given so
--       far, after the call; '' for what is missing
--   0 MOVED  1 ALREADY: a raise never lowers, a lower never raises
--   3 LIMITED (lower): lowered as far as available allows, or not at all
--   4 WRONG_LEG: the marker is that of the other leg
--   5 INVARIANT  7 REFUSED: meta or stock missing, retention passed
-- error WRONGDATA <key or ARGV[n]>, before any write

local function num(s)
  if s and string.find(s, '^%d+$') then
    local n = tonumber(s)
    if n < 9007199254740992 then return n end
  end
end

local function text(n) return string.format('%.0f', n) end

local function wrong(what) return redis.error_reply('WRONGDATA ' .. what) end

if #KEYS ~= 4 or #ARGV ~= 4 then return wrong('ARGV') end
local id, target, mode, now = ARGV[1], num(ARGV[2]), ARGV[3], num(ARGV[4])
if #id < 1 or #id > 128 or string.find(id, '[^A-Za-z0-9_%-]') then return wrong('ARGV[1]') end
if not target then return wrong('ARGV[2]') end
if mode ~= 'raise' and mode ~= 'lower' then return wrong('ARGV[3]') end
if not now then return wrong('ARGV[4]') end
local suffix = ':transfer:' .. id
if string.sub(KEYS[3], -#suffix) ~= suffix then return wrong('ARGV[1]') end
local types = {'hash', 'hash', 'hash', 'string'}
for i = 1, 4 do
  local t = redis.call('TYPE', KEYS[i])['ok']
  if t ~= 'none' and t ~= types[i] then return wrong(KEYS[i]) end
end

local leg, inForce = false, 0
if redis.call('EXISTS', KEYS[3]) == 1 then
  local marker = redis.call('HMGET', KEYS[3], 'leg', 'amount')
  leg, inForce = marker[1], num(marker[2])
  if not inForce or (leg ~= 'out' and leg ~= 'in') then return wrong(KEYS[3]) end
end
local meta = redis.call('HMGET', KEYS[1], 'state', 'retention_until_ms')
local stock = redis.call('HMGET', KEYS[2], 'initial', 'available', 'reserved')
if not (meta[1] and meta[2] and stock[1] and stock[2] and stock[3]) then
  return {7, inForce, num(stock[2]) or '', num(stock[1]) or ''}
end
local retention = num(meta[2])
if not retention then return wrong(KEYS[1]) end
local initial, available, reserved = num(stock[1]), num(stock[2]), num(stock[3])
if not (initial and available and reserved) then return wrong(KEYS[2]) end
local time = redis.call('TIME')
local clock = tonumber(time[1]) * 1000 + math.floor(tonumber(time[2]) / 1000)
if now == 0 then now = clock end
if retention <= math.max(now, clock) then return {7, inForce, available, initial} end
if leg == 'out' then return {4, inForce, available, initial} end
if (mode == 'raise' and target <= inForce) or (mode == 'lower' and target >= inForce) then
  return {1, inForce, available, initial}
end
if initial ~= available + reserved then return {5, inForce, available, initial} end

local units, code = target - inForce, 0 -- below zero: to be taken back
if -units > available then units, code = -available, 3 end
if initial + units >= 9007199254740992 then return {5, inForce, available, initial} end
if units == 0 then return {code, inForce, available, initial} end
inForce, available, initial = inForce + units, available + units, initial + units
redis.call('HSET', KEYS[2], 'initial', text(initial), 'available', text(available))
redis.call('HSET', KEYS[3], 'leg', 'in', 'amount', text(inForce), 'updated_at_ms', text(now))
redis.call('PEXPIREAT', KEYS[3], text(retention))
if available == 0 then
  redis.call('SET', KEYS[4], '1', 'PXAT', text(retention))
else
  redis.call('DEL', KEYS[4])
end
return {code, inForce, available, initial}
