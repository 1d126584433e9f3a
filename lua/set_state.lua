#!lua
-- set_state: compare-and-set of a scope's state: PREPARED → ACTIVE, CLOSED;
-- ACTIVE ↔ PAUSED; ACTIVE, PAUSED → CLOSED (spec §2).
--
-- KEYS  1 meta
-- ARGV  1 expected  2 target  3 now_ms (checked only: meta holds no such time)
-- reply {code, state}, state being the one after the call, '' for none
--   0 CHANGED_STATE  1 ALREADY_IN_STATE  2 CONFIG_MISSING  3 ILLEGAL
--   5 CHANGED: the state is neither the expected one nor the target
-- error WRONGDATA <key or ARGV[n]>, before any write

local function wrong(what) return redis.error_reply('WRONGDATA ' .. what) end

if #KEYS ~= 1 or #ARGV ~= 3 then return wrong('ARGV') end
if not string.find(ARGV[3], '^%d+$') or tonumber(ARGV[3]) >= 9007199254740992 then return wrong('ARGV[3]') end
local t = redis.call('TYPE', KEYS[1])['ok']
if t ~= 'none' and t ~= 'hash' then return wrong(KEYS[1]) end
local expected, target = ARGV[1], ARGV[2]
local state = redis.call('HGET', KEYS[1], 'state') or ''
if state == '' then return {2, ''} end
if state == target then return {1, state} end
if state ~= expected then return {5, state} end
local legal = {
  PREPARED = {ACTIVE = true, CLOSED = true},
  ACTIVE = {PAUSED = true, CLOSED = true},
  PAUSED = {ACTIVE = true, CLOSED = true},
}
if not (legal[state] and legal[state][target]) then return {3, state} end
redis.call('HSET', KEYS[1], 'state', target)
return {0, target}
