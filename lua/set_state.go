package lua

import "github.com/seckill/reconciler/reservation"

var setState = load("set_state")

// SetStateCode is the code of a reply of set_state.lua.
type SetStateCode int64

// The codes of set_state.lua (spec §4).
const (
	SetStateDone          SetStateCode = 0
	SetStateAlready       SetStateCode = 1
	SetStateConfigMissing SetStateCode = 2
	SetStateIllegal       SetStateCode = 3
	SetStateChanged       SetStateCode = 5
)

var setStateCodes = map[SetStateCode]string{
	SetStateDone: "CHANGED_STATE", SetStateAlready: "ALREADY_IN_STATE", SetStateConfigMissing: "CONFIG_MISSING",
	SetStateIllegal: "ILLEGAL", SetStateChanged: "CHANGED",
}

func (c SetStateCode) String() string { return codeText(setStateCodes, c) }

// SetStateArgs are the arguments of set_state.lua.
type SetStateArgs struct {
	Expected State
	Target   State
}

// SetStateReply is the reply of set_state.lua.
type SetStateReply struct {
	Code  SetStateCode
	State State // after the call; "" when meta is gone
}

// SetState changes a scope's state, if it is still the expected one.
func (b *Batch) SetState(scope reservation.Scope, a SetStateArgs) *Result[SetStateReply] {
	argv := []any{string(a.Expected), string(a.Target), "0"}
	return enqueue(b, setState, scope, []string{scope.MetaKey()}, argv, 2, func(v *values) SetStateReply {
		return SetStateReply{Code: code(v, setStateCodes), State: State(v.text(1))}
	})
}
