package lua_test

import (
	"errors"
	"testing"

	"github.com/seckill/reconciler/lua"
	"github.com/seckill/reconciler/reservation"
)

// notNumbers are texts that Lua's or Redis's own conversions would accept, or
// nearly.
var notNumbers = []string{
	"", "-1", "+1", "1.5", "1e3", "0x1", " 1", "1 ", "1\n", "9007199254740992", "99999999999999999999999999", "x", "nan", "inf",
}

// subject is a script in a state in which it would write.
type subject struct {
	script  string
	setup   func(*world)
	keys    []func(*world) string
	numbers map[string]func(*world) string // numeric fields that it reads, and their keys
	run     func(*world) (any, error)
	// refused says whether a reply is the script's own way of refusing; nil: WRONGDATA.
	refused func(any) bool
}

func try[A, R any](add func(*lua.Batch, reservation.Scope, A) *lua.Result[R], args func(*world) A) func(*world) (any, error) {
	return func(w *world) (any, error) {
		w.Helper()
		return one(w, func(b *lua.Batch) *lua.Result[R] { return add(b, w.scope, args(w)) })
	}
}

func soldOutKey(w *world) string { return w.scope.SoldOutKey() }

func subjects() []subject {
	type key = func(*world) string
	indexed := []key{hashKey, pendingKey, expiryKey}
	full := []key{metaKey, stockKey, shardKey, markerKey, hashKey, pendingKey, expiryKey, soldOutKey}
	stockNumbers := map[string]key{"initial": stockKey, "available": stockKey, "reserved": stockKey, "released_total": stockKey}
	lost := then(in(reservation.StatusReserved), noKey(pendingKey), noKey(expiryKey))
	soldOut := func(w *world) { w.setText(soldOutKey(w), "1") }
	transferNumbers := map[string]key{
		"retention_until_ms": metaKey, "initial": stockKey, "available": stockKey, "reserved": stockKey, "amount": transferKey,
	}
	return []subject{
		{
			"reserve", func(w *world) { w.sale(10, 0) }, full, stockNumbers,
			try((*lua.Batch).Reserve, (*world).reserveArgs),
			func(r any) bool {
				return r == refusal(lua.ReserveInvariantViolation, "WRONG_TYPE", -1) || missingStock(r)
			},
		},
		{
			"transition", in(reservation.StatusReserved), indexed, nil,
			try((*lua.Batch).Transition, func(w *world) lua.TransitionArgs {
				return lua.TransitionArgs{ReservationID: rid, Target: reservation.StatusReleasePending, NowMS: w.base}
			}), nil,
		},
		{
			"compensate", then(in(reservation.StatusReleasePending), soldOut),
			[]key{stockKey, markerKey, hashKey, pendingKey, expiryKey, soldOutKey},
			stockNumbers,
			try((*lua.Batch).Compensate, func(w *world) lua.CompensateArgs {
				return lua.CompensateArgs{ReservationID: rid, UserID: user, Reason: "x", NowMS: w.base}
			}),
			func(r any) bool { return r.(lua.CompensateReply).Code == lua.CompensateInvariantViolation },
		},
		{
			"snapshot", in(reservation.StatusReserved),
			[]key{metaKey, stockKey, pendingKey, expiryKey},
			map[string]key{
				"retention_until_ms": metaKey, "initial": stockKey, "available": stockKey, "reserved": stockKey,
				"released_total": stockKey,
			},
			func(w *world) (any, error) {
				return one(w, func(b *lua.Batch) *lua.Result[lua.SnapshotReply] { return b.Snapshot(w.scope) })
			}, nil,
		},
		{
			"restore", func(w *world) { w.sale(9, 1) }, full,
			map[string]key{"retention_until_ms": metaKey, "initial": stockKey, "available": stockKey, "reserved": stockKey},
			try((*lua.Batch).Restore, func(w *world) lua.RestoreArgs {
				return lua.RestoreArgs{
					ReservationID: rid, RequestID: request, UserID: user, MessageID: message, OrderID: "o1",
					ReservedAtMS: w.base, ExpiresAtMS: w.base, SchemaVersion: 1, Mode: lua.RestoreActive, NowMS: w.base,
				}
			}), nil,
		},
		{
			"defer", in(reservation.StatusReserved),
			[]key{hashKey, pendingKey},
			map[string]key{"retry_count": hashKey},
			try((*lua.Batch).Defer, func(w *world) lua.DeferArgs {
				return lua.DeferArgs{
					ReservationID: rid, Index: reservation.SendPending, Expected: reservation.StatusReserved, NextMS: w.base + 9,
				}
			}), nil,
		},
		{
			"confirm", in(reservation.StatusRejected), indexed, nil,
			try((*lua.Batch).Confirm, func(w *world) lua.ConfirmArgs {
				return lua.ConfirmArgs{ReservationID: rid, OrderID: "o1", NowMS: w.base}
			}), nil,
		},
		{
			"record_send", in(reservation.StatusReserved),
			[]key{hashKey},
			map[string]key{"send_count": hashKey, "resend_count": hashKey, "last_sent_at_ms": hashKey},
			try((*lua.Batch).RecordSend, func(w *world) lua.RecordSendArgs {
				return lua.RecordSendArgs{ReservationID: rid, Expected: reservation.StatusReserved, Kind: lua.SendFirst, NowMS: w.base}
			}), nil,
		},
		{
			"reindex", lost, indexed,
			map[string]key{"expires_at_ms": hashKey},
			try((*lua.Batch).Reindex, func(w *world) lua.ReindexArgs { return lua.ReindexArgs{ReservationID: rid, NowMS: w.base} }), nil,
		},
		{
			"unindex", then(in(reservation.StatusReleased), func(w *world) { w.setMember(reservation.SendPending, rid, 1) }),
			indexed, nil,
			try((*lua.Batch).Unindex, func(*world) lua.UnindexArgs { return lua.UnindexArgs{ReservationID: rid} }), nil,
		},
		{
			"mark_user", then(in(reservation.StatusEnqueued), noKey(markerKey)),
			[]key{hashKey, markerKey},
			nil,
			try((*lua.Batch).MarkUser, func(*world) lua.MarkUserArgs { return lua.MarkUserArgs{ReservationID: rid, UserID: user} }), nil,
		},
		{
			"adopt_orphan", then(in(reservation.StatusReserved), noKey(hashKey)),
			[]key{metaKey, shardKey, hashKey, pendingKey, expiryKey},
			map[string]key{"retention_until_ms": metaKey},
			try((*lua.Batch).AdoptOrphan, func(w *world) lua.AdoptOrphanArgs {
				return lua.AdoptOrphanArgs{
					ReservationID: rid, RequestID: request, UserID: user, MessageID: message, SchemaVersion: 1, NowMS: w.base,
				}
			}), nil,
		},
		{
			"provision", nothing,
			[]key{metaKey, stockKey},
			nil,
			try((*lua.Batch).Provision, (*world).provisionArgs), nil,
		},
		{
			"set_state", func(w *world) { w.sale(9, 1) },
			[]key{metaKey},
			nil,
			try((*lua.Batch).SetState, func(*world) lua.SetStateArgs {
				return lua.SetStateArgs{Expected: lua.StateActive, Target: lua.StatePaused}
			}), nil,
		},
		{
			"transfer_out", then(func(w *world) { w.sale(9, 1) }, marks(lua.TransferLegOut, 2)),
			[]key{metaKey, stockKey, transferKey, soldOutKey},
			transferNumbers,
			try((*lua.Batch).TransferOut, func(w *world) lua.TransferOutArgs {
				return lua.TransferOutArgs{TransferID: transfer, Target: 3, Mode: lua.OutWhole, NowMS: w.base}
			}), nil,
		},
		{
			"transfer_in", then(func(w *world) { w.sale(0, 1) }, soldOut, marks(lua.TransferLegIn, 2)),
			[]key{metaKey, stockKey, transferKey, soldOutKey},
			transferNumbers,
			try((*lua.Batch).TransferIn, func(w *world) lua.TransferInArgs {
				return lua.TransferInArgs{TransferID: transfer, Target: 3, Mode: lua.InRaise, NowMS: w.base}
			}), nil,
		},
		{
			"recount", then(stopped(), soldOut),
			[]key{metaKey, stockKey, soldOutKey},
			map[string]key{"retention_until_ms": metaKey}, // a stock that holds no numbers is what it is for
			try((*lua.Batch).Recount, recountArgs), nil,
		},
	}
}

// An empty number of the stock is an incomplete stock.
func missingStock(r any) bool {
	return r == refusal(lua.ReserveConfigMissing, "STOCK_CONFIG_MISSING", -1)
}

// refuses demands that the script refuses the key without any write.
func (w *world) refuses(s subject, key, what string) {
	w.Helper()
	w.unchanged(func() {
		w.Helper()
		got, err := s.run(w)
		if s.refused != nil {
			if err != nil || !s.refused(got) {
				w.Errorf("%s, %s: %+v, %v", s.script, what, got, err)
			}
			return
		}
		var failure *lua.CallError
		if !errors.Is(err, lua.ErrWrongData) || !errors.As(err, &failure) || failure.Key != key {
			w.Errorf("%s, %s: %+v, %v; want wrong data in %s", s.script, what, got, err, key)
		}
		if lua.Classify(err) != lua.ClassData {
			w.Errorf("%s, %s: class %s", s.script, what, lua.Classify(err))
		}
	})
}

func TestWrongTypesAreRefusedBeforeAnyWrite(t *testing.T) {
	onEach(t, func(w *world) {
		for _, s := range subjects() {
			w.Run(s.script, func(t *testing.T) {
				for _, key := range s.keys {
					w := w.on(t)
					s.setup(w)
					w.spoil(key(w))
					w.refuses(s, key(w), key(w)+" is a list")
				}
				w := w.on(t) // the subject is in order: it does write
				s.setup(w)
				before := w.dump()
				got, err := s.run(w)
				w.must(err)
				if s.refused != nil && s.refused(got) {
					w.Fatalf("the set-up is refused: %+v", got)
				}
				if s.script != "snapshot" && equal(before, w.dump()) {
					w.Fatalf("the set-up does not lead to a write: %+v", got)
				}
			})
		}
	})
}

func TestWrongNumbersAreRefusedBeforeAnyWrite(t *testing.T) {
	onEach(t, func(w *world) {
		for _, s := range subjects() {
			for field, key := range s.numbers {
				w.Run(s.script+" "+field, func(t *testing.T) {
					w := w.on(t)
					s.setup(w)
					for _, value := range notNumbers {
						w.must(w.client.HSet(w.ctx(), key(w), field, value).Err())
						w.refuses(s, key(w), field+" is "+value)
					}
				})
			}
		}
	})
}

func TestMoreWrongDataIsRefused(t *testing.T) {
	all := map[string]subject{}
	for _, s := range subjects() {
		all[s.script] = s
	}
	counted := func(field string) func(*world) { return resv(field, "9007199254740991") }
	cases := []struct {
		script, what string
		spoil        func(*world)
		key          func(*world) string
	}{
		{"defer", "a full counter", counted("retry_count"), hashKey},
		{"record_send", "a full counter", counted("send_count"), hashKey},
		{"record_send", "a full resend counter", counted("resend_count"), hashKey},
		{"compensate", "a full counter", stock("released_total", "9007199254740991"), stockKey},
		{"reindex", "an unknown status", resv("status", "NONSENSE"), hashKey},
		{"transfer_out", "a marker without a leg", func(w *world) { w.setHash(transferKey(w), fields{"amount": "2"}) }, transferKey},
		{"transfer_in", "a marker of no leg", func(w *world) { w.setHash(transferKey(w), fields{"amount": "2", "leg": "x"}) }, transferKey},
		{"transfer_in", "a marker without an amount", func(w *world) { w.setHash(transferKey(w), fields{"leg": "in"}) }, transferKey},
		{"restore", "a corrupted request field", func(w *world) { w.setHash(shardKey(w), fields{request: "0|r1"}) }, shardKey},
	}
	onEach(t, func(w *world) {
		for _, c := range cases {
			w := w.fresh()
			s := all[c.script]
			s.setup(w)
			c.spoil(w)
			w.refuses(s, c.key(w), c.what)
		}
	})
}

func equal(a, b dump) bool { return len(a) == len(b) && diffOf(a, b) == "" }

// Arguments that the typed wrappers let through.
func TestWrongArgumentsAreRefusedBeforeAnyWrite(t *testing.T) {
	tooLarge := reservation.MaxNumber
	cases := []struct {
		key string
		run func(*world) (any, error)
	}{
		{"ARGV[1]", try((*lua.Batch).Transition, func(*world) lua.TransitionArgs { return lua.TransitionArgs{} })},
		{"ARGV[3]", try((*lua.Batch).Transition, func(*world) lua.TransitionArgs {
			return lua.TransitionArgs{ReservationID: rid, NowMS: -1}
		})},
		{"ARGV[4]", try((*lua.Batch).Transition, func(*world) lua.TransitionArgs {
			return lua.TransitionArgs{ReservationID: rid, Target: reservation.StatusSendUnknown, NextRetryMS: tooLarge}
		})},
		{"ARGV[1]", try((*lua.Batch).Defer, func(*world) lua.DeferArgs { return lua.DeferArgs{Index: reservation.SendPending} })},
		{"ARGV[3]", try((*lua.Batch).Defer, func(*world) lua.DeferArgs {
			return lua.DeferArgs{ReservationID: rid, Index: reservation.SendPending, NextMS: -1}
		})},
		{"ARGV[1]", try((*lua.Batch).Confirm, func(*world) lua.ConfirmArgs { return lua.ConfirmArgs{} })},
		{"ARGV[3]", try((*lua.Batch).Confirm, func(*world) lua.ConfirmArgs { return lua.ConfirmArgs{ReservationID: rid, NowMS: -1} })},
		{"ARGV[1]", try((*lua.Batch).RecordSend, func(*world) lua.RecordSendArgs { return lua.RecordSendArgs{Kind: lua.SendFirst} })},
		{"ARGV[3]", try((*lua.Batch).RecordSend, func(*world) lua.RecordSendArgs { return lua.RecordSendArgs{ReservationID: rid, Kind: "sent"} })},
		{"ARGV[4]", try((*lua.Batch).RecordSend, func(*world) lua.RecordSendArgs {
			return lua.RecordSendArgs{ReservationID: rid, Kind: lua.SendStored}
		})},
		{"ARGV[4]", try((*lua.Batch).RecordSend, func(*world) lua.RecordSendArgs {
			return lua.RecordSendArgs{ReservationID: rid, Kind: lua.SendAgain, Position: "b,1,2,id"}
		})},
		{"ARGV[5]", try((*lua.Batch).RecordSend, func(*world) lua.RecordSendArgs {
			return lua.RecordSendArgs{ReservationID: rid, Kind: lua.SendFirst, NowMS: tooLarge}
		})},
		{"ARGV[1]", try((*lua.Batch).Reindex, func(*world) lua.ReindexArgs { return lua.ReindexArgs{} })},
		{"ARGV[2]", try((*lua.Batch).Reindex, func(*world) lua.ReindexArgs { return lua.ReindexArgs{ReservationID: rid, NowMS: -1} })},
		{"ARGV[1]", try((*lua.Batch).Unindex, func(*world) lua.UnindexArgs { return lua.UnindexArgs{} })},
		{"ARGV[1]", try((*lua.Batch).MarkUser, func(*world) lua.MarkUserArgs { return lua.MarkUserArgs{UserID: user} })},
		{"ARGV[1]", try((*lua.Batch).Restore, func(*world) lua.RestoreArgs { return lua.RestoreArgs{ReservationID: "r|1"} })},
		{"ARGV[13]", try((*lua.Batch).Restore, func(*world) lua.RestoreArgs {
			return lua.RestoreArgs{ReservationID: rid, RequestID: request, UserID: user, MessageID: message, OrderID: "o1", Mode: "whole"}
		})},
		{"ARGV[9]", try((*lua.Batch).Restore, func(*world) lua.RestoreArgs {
			return lua.RestoreArgs{ReservationID: rid, RequestID: request, UserID: user, MessageID: message}
		})},
		{"ARGV[10]", try((*lua.Batch).Restore, func(*world) lua.RestoreArgs {
			return lua.RestoreArgs{ReservationID: rid, RequestID: request, UserID: user, MessageID: message, OrderID: "o1", ReservedAtMS: -1}
		})},
		{"ARGV[3]", try((*lua.Batch).AdoptOrphan, func(*world) lua.AdoptOrphanArgs {
			return lua.AdoptOrphanArgs{ReservationID: rid, RequestID: request, UserID: ""}
		})},
		{"ARGV[5]", try((*lua.Batch).Provision, func(*world) lua.ProvisionArgs { return lua.ProvisionArgs{State: "OPEN"} })},
		{"ARGV[7]", try((*lua.Batch).Provision, func(*world) lua.ProvisionArgs {
			return lua.ProvisionArgs{State: lua.StateActive, StartsAtMS: 5, EndsAtMS: 5, RetentionUntilMS: 9}
		})},
		{"ARGV[8]", try((*lua.Batch).Provision, func(*world) lua.ProvisionArgs {
			return lua.ProvisionArgs{State: lua.StateActive, StartsAtMS: 5, EndsAtMS: 10, RetentionUntilMS: 9}
		})},
		{"ARGV[1]", try((*lua.Batch).TransferOut, func(*world) lua.TransferOutArgs {
			return lua.TransferOutArgs{TransferID: "t|1", Target: 1, Mode: lua.OutWhole}
		})},
		{"ARGV[2]", try((*lua.Batch).TransferOut, func(*world) lua.TransferOutArgs {
			return lua.TransferOutArgs{TransferID: transfer, Target: -1, Mode: lua.OutWhole}
		})},
		{"ARGV[3]", try((*lua.Batch).TransferOut, func(*world) lua.TransferOutArgs {
			return lua.TransferOutArgs{TransferID: transfer, Target: 1, Mode: "raise"}
		})},
		{"ARGV[4]", try((*lua.Batch).TransferOut, func(*world) lua.TransferOutArgs {
			return lua.TransferOutArgs{TransferID: transfer, Target: 1, Mode: lua.OutPartial, NowMS: -1}
		})},
		{"ARGV[1]", try((*lua.Batch).TransferIn, func(*world) lua.TransferInArgs { return lua.TransferInArgs{Target: 1, Mode: lua.InRaise} })},
		{"ARGV[2]", try((*lua.Batch).TransferIn, func(*world) lua.TransferInArgs {
			return lua.TransferInArgs{TransferID: transfer, Target: tooLarge, Mode: lua.InRaise}
		})},
		{"ARGV[3]", try((*lua.Batch).TransferIn, func(*world) lua.TransferInArgs {
			return lua.TransferInArgs{TransferID: transfer, Target: 1, Mode: "whole"}
		})},
		{"ARGV[4]", try((*lua.Batch).TransferIn, func(*world) lua.TransferInArgs {
			return lua.TransferInArgs{TransferID: transfer, Target: 1, Mode: lua.InLower, NowMS: tooLarge}
		})},
		{"ARGV[10]", try((*lua.Batch).Provision, func(w *world) lua.ProvisionArgs {
			a := w.provisionArgs()
			a.Initial = -1
			return a
		})},
	}
	onEach(t, func(w *world) {
		w.reserved(reservation.StatusReserved)
		for _, c := range cases {
			w.refuses(subject{script: "arguments", run: c.run}, c.key, c.key)
		}
		w.unchanged(func() {
			got := reply(w, func(b *lua.Batch) *lua.Result[lua.CompensateReply] {
				return b.Compensate(w.scope, lua.CompensateArgs{ReservationID: rid, UserID: user, NowMS: -1})
			})
			sameText(w, "compensate", got.Code, lua.CompensateInvariantViolation)
		})
	})
}

// A scope that cannot be one is refused before anything is sent.
func TestInvalidScope(t *testing.T) {
	onEach(t, func(w *world) {
		w.scope.SKUID = "a}b"
		_, err := one(w, func(b *lua.Batch) *lua.Result[lua.SnapshotReply] { return b.Snapshot(w.scope) })
		if !errors.Is(err, lua.ErrInvalidArgument) || !errors.Is(err, reservation.ErrInvalidID) || lua.Classify(err) != lua.ClassData {
			w.Errorf("got %v", err)
		}
	})
}
