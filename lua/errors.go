package lua

import (
	"errors"
	"fmt"
	"net"
	"strings"

	"github.com/redis/go-redis/v9"

	"github.com/seckill/reconciler/reservation"
)

// Class is what a failure means for the caller (spec §5).
type Class int

// The classes of failures.
const (
	// ClassNone: there is no error.
	ClassNone Class = iota
	// ClassUnknown: the script may have been executed, or may yet be. Ask again
	// with the same ids; never read it as "not done".
	ClassUnknown
	// ClassNotExecuted: the script was certainly not executed. A bounded retry
	// with the same ids; then the node's scopes stop and an alert is due.
	ClassNotExecuted
	// ClassConfiguration: somebody has to change something (rights, memory,
	// slots, scripts). Not executed.
	ClassConfiguration
	// ClassData: the script refused what it found in a key, or the caller's
	// arguments, before any write. Not executed; a retry does not help.
	ClassData
)

func (c Class) String() string {
	switch c {
	case ClassNone:
		return "none"
	case ClassNotExecuted:
		return "not_executed"
	case ClassConfiguration:
		return "configuration"
	case ClassData:
		return "data"
	default:
		return "outcome_unknown"
	}
}

// Kinds of failures, for errors.Is. Each belongs to one class.
var (
	ErrOutcomeUnknown = kind{"outcome_unknown", ClassUnknown, "outcome unknown: ask again with the same ids"}
	ErrScriptFailed   = kind{"script_failed", ClassUnknown, "the script stopped half way: check the rights of the Redis user"}
	ErrBadReply       = kind{"bad_reply", ClassUnknown, "unexpected reply: another script under this name?"}

	ErrUnreachable       = kind{"unreachable", ClassNotExecuted, "not sent: no connection to the node"}
	ErrNotEnoughReplicas = kind{"not_enough_replicas", ClassNotExecuted, "not executed: too few replicas in sync"}
	ErrPersistence       = kind{"persistence", ClassNotExecuted, "not executed: Redis cannot persist, see its log"}
	ErrLoading           = kind{"loading", ClassNotExecuted, "not executed: Redis is loading its data"}
	ErrBusy              = kind{"busy", ClassNotExecuted, "not executed: Redis is busy with another script"}
	ErrReadOnly          = kind{"read_only", ClassNotExecuted, "not executed: the node is a replica"}
	ErrMasterDown        = kind{"master_down", ClassNotExecuted, "not executed: the replica has lost its master"}
	ErrMaxClients        = kind{"max_clients", ClassNotExecuted, "not executed: Redis has no connection left"}
	ErrClusterDown       = kind{"cluster_down", ClassNotExecuted, "not executed: the slot is not served"}
	ErrTryAgain          = kind{"try_again", ClassNotExecuted, "not executed: the slot is being moved"}
	ErrRedirected        = kind{"redirected", ClassNotExecuted, "not executed: the slot's node could not be found"}
	ErrNoScript          = kind{"no_script", ClassNotExecuted, "not executed: the script does not stay loaded"}

	ErrCrossSlot    = kind{"cross_slot", ClassConfiguration, "not executed: keys of several slots, stop this SKU"}
	ErrOutOfMemory  = kind{"out_of_memory", ClassConfiguration, "not executed: Redis is out of memory"}
	ErrNoPermission = kind{"no_permission", ClassConfiguration, "not executed: the Redis user lacks the right or the password is wrong"}
	ErrRefused      = kind{"refused", ClassConfiguration, "refused by Redis"}

	ErrWrongData       = kind{"wrong_data", ClassData, "refused before any write: wrong data"}
	ErrInvalidArgument = kind{"invalid_argument", ClassData, "not sent: invalid argument"}
)

// kind is a sentinel that carries its class and its name in metrics.
type kind struct {
	name    string
	class   Class
	meaning string
}

func (k kind) Error() string { return k.meaning }

// CallError is the failure of one call.
type CallError struct {
	Script string
	Scope  reservation.Scope
	Key    string // the key that is to blame, else the first key of the call
	Kind   error  // one of the Err… kinds
	Cause  error  // what Redis, the network or the context said; may be nil
}

func (e *CallError) Error() string {
	text := fmt.Sprintf("%s of %s: %v", e.Script, e.Scope, e.Kind)
	if e.Cause != nil {
		text += ": " + e.Cause.Error()
	}
	return text
}

// Unwrap makes the kind and the cause visible to errors.Is and errors.As.
func (e *CallError) Unwrap() []error {
	if e.Cause == nil {
		return []error{e.Kind}
	}
	return []error{e.Kind, e.Cause}
}

// Classify says what an error of a [Result] means. An error of another origin
// is [ClassUnknown]: nothing is known of it.
func Classify(err error) Class {
	if err == nil {
		return ClassNone
	}
	if k, ok := errors.AsType[kind](err); ok {
		return k.class
	}
	return ClassUnknown
}

// KindName is the stable name of an error's kind, for metrics and tasks.
func KindName(err error) string {
	if k, ok := errors.AsType[kind](err); ok {
		return k.name
	}
	return ErrOutcomeUnknown.name
}

// redisKinds are the replies by which Redis refuses to run a script at all.
var redisKinds = []struct {
	prefix string
	kind   kind
}{
	{"NOSCRIPT", ErrNoScript},
	{"WRONGDATA", ErrWrongData},
	{"OOM", ErrOutOfMemory},
	{"CROSSSLOT", ErrCrossSlot},
	{"MOVED", ErrRedirected},
	{"ASK", ErrRedirected},
	{"TRYAGAIN", ErrTryAgain},
	{"CLUSTERDOWN", ErrClusterDown},
	{"MASTERDOWN", ErrMasterDown},
	{"READONLY", ErrReadOnly},
	{"NOREPLICAS", ErrNotEnoughReplicas},
	{"MISCONF", ErrPersistence},
	{"LOADING", ErrLoading},
	{"BUSY", ErrBusy},
	{"NOPERM", ErrNoPermission},
	{"NOAUTH", ErrNoPermission},
	{"WRONGPASS", ErrNoPermission},
	{"ERR max number of clients reached", ErrMaxClients},
}

// kindOf classifies what a call came back with. written says whether the
// command was ever handed to a connection: before that, nothing is unknown.
func kindOf(err error, written bool) kind {
	if fromRedis, ok := errors.AsType[redis.Error](err); ok {
		return kindOfReply(fromRedis.Error())
	}
	op, network := errors.AsType[*net.OpError](err)
	switch {
	case !written,
		network && op.Op == "dial",
		errors.Is(err, redis.ErrPoolTimeout), errors.Is(err, redis.ErrPoolExhausted):
		return ErrUnreachable
	default:
		return ErrOutcomeUnknown
	}
}

func kindOfReply(text string) kind {
	// An error raised inside a script carries the place: writes may have
	// happened before it, whatever its prefix says.
	if strings.Contains(text, "@user_script") {
		return ErrScriptFailed
	}
	for _, r := range redisKinds {
		if text == r.prefix || strings.HasPrefix(text, r.prefix+" ") {
			return r.kind
		}
	}
	return ErrRefused
}

// stale says whether a call's failure suggests that the client's picture of the
// cluster is out of date.
func stale(err error) bool {
	k, _ := errors.AsType[kind](err)
	switch k {
	case ErrOutcomeUnknown, ErrUnreachable, ErrReadOnly, ErrMasterDown, ErrClusterDown, ErrRedirected:
		return true
	default:
		return false
	}
}

// wrongKey reads the key that a script refused from `WRONGDATA <key>`.
func wrongKey(err error, fallback string) string {
	if fromRedis, ok := errors.AsType[redis.Error](err); ok {
		if _, key, ok := strings.Cut(fromRedis.Error(), "WRONGDATA "); ok {
			return key
		}
	}
	return fallback
}
