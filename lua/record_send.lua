#!lua flags=allow-oom
-- record_send: writes down a send attempt before it is made, and where the
-- broker stored it after (protocol §4, scanner). An absence of the message
-- counts only once `settle` has passed since last_sent_at_ms.
--
-- KEYS  1 reservation
-- ARGV  1 reservation_id  2 expected status  3 send, resend or stored
--       4 mq_position (stored only; '' before)  5 now_ms (0: Redis TIME)
-- reply {code, send_count, resend_count}; a count that is not there is ''
--   0 RECORDED  2 NOT_FOUND  3 STATUS_CHANGED  4 ID_CONFLICT
-- error WRONGDATA <key or ARGV[n]>, before any write

local function num(s)
  if s and string.find(s, '^%d+$') then
    local n = tonumber(s)
    if n < 9007199254740992 then return n end
  end
end

local function text(n) return string.format('%.0f', n) end

local function wrong(what) return redis.error_reply('WRONGDATA ' .. what) end

if #KEYS ~= 1 or #ARGV ~= 5 then return wrong('ARGV') end
local rid, expected, kind, position, now = ARGV[1], ARGV[2], ARGV[3], ARGV[4], num(ARGV[5])
if rid == '' then return wrong('ARGV[1]') end
if kind ~= 'send' and kind ~= 'resend' and kind ~= 'stored' then return wrong('ARGV[3]') end
if (kind == 'stored') ~= (position ~= '') then return wrong('ARGV[4]') end
if not now then return wrong('ARGV[5]') end
local t = redis.call('TYPE', KEYS[1])['ok']
if t == 'none' then return {2, '', ''} end
if t ~= 'hash' then return wrong(KEYS[1]) end

local r = redis.call('HMGET', KEYS[1], 'reservation_id', 'status', 'send_count', 'resend_count', 'last_sent_at_ms')
local sends, resends, last = num(r[3] or '0'), num(r[4] or '0'), num(r[5] or '0')
if not (sends and resends and last) or sends + resends >= 9007199254740990 then return wrong(KEYS[1]) end
local function reply(code) return {code, r[3] and sends or '', r[4] and resends or ''} end
if r[1] ~= rid then return reply(4) end
if (r[2] or '') ~= expected then return reply(3) end

if kind == 'stored' then
  redis.call('HSET', KEYS[1], 'mq_position', position)
  return reply(0)
end
if now == 0 then
  local time = redis.call('TIME')
  now = tonumber(time[1]) * 1000 + math.floor(tonumber(time[2]) / 1000)
end
-- never back: after a failover to a node whose clock is behind, the later time is the safe one
redis.call('HSET', KEYS[1], 'last_sent_at_ms', text(math.max(now, last)))
if kind == 'send' then
  r[3], sends = true, sends + 1
  redis.call('HSET', KEYS[1], 'send_count', text(sends))
else
  r[4], resends = true, resends + 1
  redis.call('HSET', KEYS[1], 'resend_count', text(resends))
end
return reply(0)
