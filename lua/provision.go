package lua

import "github.com/seckill/reconciler/reservation"

var provision = load("provision")

// ProvisionCode is the code of a reply of provision.lua.
type ProvisionCode int64

// The codes of provision.lua (spec §4).
const (
	ProvisionCreated   ProvisionCode = 0
	ProvisionSame      ProvisionCode = 1
	ProvisionDifferent ProvisionCode = 2
	ProvisionPartial   ProvisionCode = 3
	ProvisionRefused   ProvisionCode = 7
)

var provisionCodes = map[ProvisionCode]string{
	ProvisionCreated: "CREATED", ProvisionSame: "SAME", ProvisionDifferent: "DIFFERENT",
	ProvisionPartial: "PARTIAL", ProvisionRefused: "REFUSED",
}

func (c ProvisionCode) String() string { return codeText(provisionCodes, c) }

// State is a scope's meta.state.
type State string

// The states of a scope (spec §2).
const (
	StatePrepared State = "PREPARED"
	StateActive   State = "ACTIVE"
	StatePaused   State = "PAUSED"
	StateClosed   State = "CLOSED"
)

// ProvisionArgs are the arguments of provision.lua beside the scope.
type ProvisionArgs struct {
	State            State
	StartsAtMS       int64
	EndsAtMS         int64 // exclusive
	RetentionUntilMS int64 // when every key of the scope expires
	SchemaVersion    int64
	Initial          int64
	NowMS            int64
}

// ProvisionReply is the reply of provision.lua.
type ProvisionReply struct {
	Code ProvisionCode
}

// Provision creates a scope's meta and stock if both are missing. The caller
// knows that this scope was never confirmed before: missing keys of a confirmed
// one are config_missing and never refilled (protocol §4).
func (b *Batch) Provision(scope reservation.Scope, a ProvisionArgs) *Result[ProvisionReply] {
	keys := []string{scope.MetaKey(), scope.StockKey()}
	argv := []any{
		scope.ActivityID, scope.SKUID, decimal(scope.Bucket), decimal(scope.Version), string(a.State),
		decimal(a.StartsAtMS), decimal(a.EndsAtMS), decimal(a.RetentionUntilMS), decimal(a.SchemaVersion),
		decimal(a.Initial), decimal(a.NowMS),
	}
	return enqueue(b, provision, scope, keys, argv, 1, func(v *values) ProvisionReply {
		return ProvisionReply{Code: code(v, provisionCodes)}
	})
}
