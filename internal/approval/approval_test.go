package approval_test

import (
	"context"
	"errors"
	"slices"
	"strings"
	"sync"
	"testing"

	"github.com/google/go-cmp/cmp"

	"github.com/seckill/reconciler/fencer"
	"github.com/seckill/reconciler/internal/approval"
	"github.com/seckill/reconciler/internal/config"
	"github.com/seckill/reconciler/internal/pass"
	"github.com/seckill/reconciler/internal/pgstore"
	"github.com/seckill/reconciler/reservation"
)

var all = approval.Selection{}

// An orphan whose order exists is restored, one without is fenced, adopted and
// given back: found by the indexes, not by the task's sample. Twice is once.
func TestOrphansAreRestoredOrGivenBack(t *testing.T) {
	t.Parallel()
	s := newShop(t)
	ordered, lost, fenced := s.reserve(), s.reserve("ENQUEUED"), s.reserve()
	untouched := s.reserve("ENQUEUED")
	s.mustOrder(ordered)
	s.exec(`SELECT outcome FROM seckill.fence_reservations(ARRAY[$1], 'test', ARRAY[$2])`, fenced, s.scope.Tag())
	for _, id := range []string{ordered, lost, fenced} {
		s.orphan(id)
	}
	task := s.task(reservation.TaskOrphanMember)

	got := map[string]approval.Action{}
	for _, p := range s.show(task, all).Proposals {
		got[p.ID] = p.Action
	}
	want := map[string]approval.Action{ordered: approval.Restore, lost: approval.Adopt, fenced: approval.Adopt}
	if diff := cmp.Diff(want, got); diff != "" {
		t.Fatalf("proposals:\n%s", diff)
	}
	s.wantStock(units-4, 4, 0)

	report := s.mustApprove(task, all)
	wantOutcomes(t, report, map[approval.Outcome]int{approval.Applied: 3})
	s.wantStatus(ordered, reservation.StatusOrderCreated)
	s.wantStatus(lost, reservation.StatusReleased)
	s.wantStatus(fenced, reservation.StatusReleased)
	s.wantStatus(untouched, reservation.StatusEnqueued)
	s.wantStock(units-2, 2, 2)
	if err := s.order(lost); err == nil {
		t.Error("an order came after the unit was given back")
	}
	if !report.Resolved || s.state(task) != pgstore.TaskResolved {
		t.Error("nothing is left behind the task, and it is not resolved")
	}
	wantAudit := []string{
		"alice repair_started looked at it adopt gone 4",
		"alice repair_ended looked at it adopt applied gone 4 RELEASED 2",
	}
	if diff := cmp.Diff(wantAudit, s.audited(lost)); diff != "" {
		t.Errorf("audit trail:\n%s", diff)
	}

	var decided *pgstore.TaskDecidedError
	if task, err := s.daemon.Postgres.Task(t.Context(), task.ID); err != nil || !errors.As(approval.Check(task, all), &decided) {
		t.Errorf("approving it again: %v, want that it is decided", err)
	}
	if _, err := s.approver.Apply(t.Context(), report.Plan, alice); !errors.As(err, &decided) {
		t.Errorf("applying it again: %v, want that it is decided", err)
	}
	again := s.task(reservation.TaskOrphanMember)
	report = s.mustApprove(again, approval.Selection{Reservation: lost})
	wantOutcomes(t, report, map[approval.Outcome]int{approval.Nothing: 1})
	s.wantStock(units-2, 2, 2)
	s.keepsPromises()
}

// A restored hash carries what the contract asks for.
func TestRestoredHashIsAReservationAgain(t *testing.T) {
	t.Parallel()
	s := newShop(t)
	id := s.reserve("ENQUEUED")
	s.mustOrder(id)
	before := s.orphan(id)
	s.mustApprove(s.task(reservation.TaskOrphanMember), all)
	after := s.hash(id)
	for _, field := range []string{"reservation_id", "request_id", "message_id", "activity_id", "sku_id", "user_id", "activity_version", "bucket_id", "schema_version"} {
		if before[field] != after[field] {
			t.Errorf("%s is %q, was %q", field, after[field], before[field])
		}
	}
	if after["order_id"] != "o-"+id {
		t.Errorf("order_id %q", after["order_id"])
	}
	if ttl := s.redis.PTTL(t.Context(), s.scope.ReservationKey(id)).Val(); ttl <= 0 {
		t.Errorf("the hash has no expiry: %s", ttl)
	}
}

// Whose an orphan was is not guessed: without its request it stays, unfenced.
func TestOrphanWithoutRequestStaysWithThePerson(t *testing.T) {
	t.Parallel()
	s := newShop(t)
	id := s.reserve("ENQUEUED")
	request := s.orphan(id)["request_id"]
	s.redis.HDel(t.Context(), s.scope.RequestKey(request), request)
	task := s.task(reservation.TaskOrphanMember)
	report := s.mustApprove(task, all)
	wantOutcomes(t, report, map[approval.Outcome]int{approval.Refused: 1})
	if s.claim(id) != "" || len(s.hash(id)) != 0 || s.state(task) != pgstore.TaskOpen {
		t.Errorf("claim %q, hash %v, task %s: want nothing done", s.claim(id), s.hash(id), s.state(task))
	}
	s.wantStock(units-1, 1, 0)
}

// A request field that outlived a release proves no deduction: while a person
// has not decided order_after_release, no orphan of the scope is restored. One
// whose two sides contradict each other is nobody's to approve.
func TestOrphansThatStay(t *testing.T) {
	t.Parallel()
	s := newShop(t)
	ordered, missing := s.reserve("ENQUEUED"), s.reserve("ENQUEUED")
	s.mustOrder(ordered)
	s.exec(`INSERT INTO seckill.reservation_claim (reservation_id, outcome, order_id, claimed_by) VALUES ($1, 'ORDER', 'gone', 'test')`, missing)
	s.orphan(ordered)
	s.orphan(missing)
	task := s.task(reservation.TaskOrphanMember)
	first := s.task(fencer.TaskOrderAfterRelease)
	wantOutcomes(t, s.mustApprove(task, all), map[approval.Outcome]int{approval.Nothing: 2})
	if len(s.hash(ordered)) != 0 || s.state(task) != pgstore.TaskOpen {
		t.Errorf("hash %v, task %s: want nothing done", s.hash(ordered), s.state(task))
	}
	if err := s.daemon.Postgres.ResolveTask(t.Context(), first.ID, "alice", "none of these"); err != nil {
		t.Fatal(err)
	}
	wantOutcomes(t, s.mustApprove(task, all), map[approval.Outcome]int{approval.Applied: 1, approval.Nothing: 1})
	s.wantStatus(ordered, reservation.StatusOrderCreated)
	s.wantStock(units-2, 2, 0)
	if s.state(task) != pgstore.TaskOpen {
		t.Error("one is left, and the task is decided")
	}
}

// What moved between the proposal and the approval is not overruled, and the
// new proposal is what the next approval carries out.
func TestTheWorldMovesBetweenShowAndApprove(t *testing.T) {
	t.Parallel()
	t.Run("order appears", func(t *testing.T) {
		t.Parallel()
		s := newShop(t)
		id := s.reserve("ENQUEUED")
		s.orphan(id)
		task := s.task(reservation.TaskOrphanMember)
		s.show(task, all)
		s.mustOrder(id)
		report := s.mustApprove(task, all)
		wantOutcomes(t, report, map[approval.Outcome]int{approval.Moved: 1})
		if detail := report.Results[0].Detail; !strings.Contains(detail, "evidence of orders was NONE, is ORDER") {
			t.Errorf("it says %q", detail)
		}
		if len(s.hash(id)) != 0 || len(s.audited(id)) != 0 {
			t.Error("something was done")
		}
		wantOutcomes(t, s.mustApprove(task, all), map[approval.Outcome]int{approval.Applied: 1})
		s.wantStatus(id, reservation.StatusOrderCreated)
		s.wantStock(units-1, 1, 0)
		s.keepsPromises()
	})
	t.Run("hash reappears", func(t *testing.T) {
		t.Parallel()
		s := newShop(t)
		id := s.reserve("ENQUEUED")
		h := s.orphan(id)
		task := s.task(reservation.TaskOrphanMember)
		s.show(task, all)
		s.redis.HSet(t.Context(), s.scope.ReservationKey(id), h)
		wantOutcomes(t, s.mustApprove(task, all), map[approval.Outcome]int{approval.Moved: 1})
		s.wantStatus(id, reservation.StatusEnqueued)
		if s.claim(id) != "" {
			t.Errorf("it was claimed %s", s.claim(id))
		}
		s.keepsPromises()
	})
	t.Run("hash reappears behind the last look", func(t *testing.T) {
		t.Parallel()
		s := newShop(t)
		id := s.reserve("ENQUEUED")
		h := s.orphan(id)
		s.approver.Gate = behind{s.approver.Gate, func() { s.redis.HSet(t.Context(), s.scope.ReservationKey(id), h) }}
		wantOutcomes(t, s.mustApprove(s.task(reservation.TaskOrphanMember), all), map[approval.Outcome]int{approval.Moved: 1})
		s.wantStatus(id, reservation.StatusEnqueued) // fenced now: the daemon releases it by row 8
		s.wantStock(units-1, 1, 0)
		s.keepsPromises()
	})
	t.Run("order appears behind the last look", func(t *testing.T) {
		t.Parallel()
		s := newShop(t)
		id := s.reserve("ENQUEUED")
		s.approver.Gate = behind{s.approver.Gate, func() { s.mustOrder(id) }}
		report := s.mustApprove(s.task(reservation.TaskEvidenceStuck), approval.Selection{Reservation: id})
		wantOutcomes(t, report, map[approval.Outcome]int{approval.Moved: 1})
		s.wantStatus(id, reservation.StatusEnqueued)
		s.keepsPromises()
	})
	t.Run("unit sold", func(t *testing.T) {
		t.Parallel()
		s := newShop(t)
		id := s.reserve("ENQUEUED", "RELEASE_PENDING")
		s.release(id)
		s.mustOrder(id)
		task := s.task(fencer.TaskOrderAfterRelease)
		s.show(task, all)
		for range units {
			s.reserve()
		}
		report := s.mustApprove(task, all)
		wantOutcomes(t, report, map[approval.Outcome]int{approval.Refused: 1})
		if detail := report.Results[0].Detail; !strings.HasPrefix(detail, "DEFICIT") {
			t.Errorf("it says %q", detail)
		}
		s.wantStatus(id, reservation.StatusReleased)
		s.wantStock(0, units, 1)
		if s.state(task) != pgstore.TaskOpen {
			t.Error("the task is decided, and nothing was done")
		}
	})
}

// behind does something between the last reading and the fence.
type behind struct {
	approval.Gate
	do func()
}

func (b behind) Fence(ctx context.Context, cases []pass.Case, tally *pass.Tally) fencer.Fenced {
	b.do()
	return b.Gate.Fence(ctx, cases, tally)
}

// A confirmation that the policy leaves to a person moves no stock.
func TestConfirmByHand(t *testing.T) {
	t.Parallel()
	s := newShop(t, func(c *config.Config) { c.Fencer.Confirm = reservation.ConfirmManual })
	id, other := s.reserve("ENQUEUED", "RELEASE_PENDING"), s.reserve("ENQUEUED", "RELEASE_PENDING")
	s.mustOrder(id)
	task := s.task(reservation.TaskConfirmPending)
	report := s.mustApprove(task, all)
	wantOutcomes(t, report, map[approval.Outcome]int{approval.Applied: 1})
	s.wantStatus(id, reservation.StatusOrderCreated)
	s.wantStatus(other, reservation.StatusReleasePending)
	s.wantStock(units-2, 2, 0)
	if s.state(task) != pgstore.TaskResolved {
		t.Errorf("the task is %s", s.state(task))
	}
	s.keepsPromises()
}

// An order after a release takes its unit back, once, also for two operators.
func TestOrderAfterReleaseTakesAUnit(t *testing.T) {
	t.Parallel()
	s := newShop(t)
	id, cancelled, fine := s.reserve("ENQUEUED", "RELEASE_PENDING"), s.reserve("ENQUEUED", "RELEASE_PENDING"), s.reserve("ENQUEUED", "RELEASE_PENDING")
	for _, one := range []string{id, cancelled, fine} {
		s.release(one)
	}
	s.mustOrder(id)
	s.mustOrder(cancelled)
	s.exec(`UPDATE shop.orders SET status = 'CANCELLED' WHERE reservation_id = $1`, cancelled)
	s.exec(`SELECT outcome FROM seckill.fence_reservations(ARRAY[$1], 'test', ARRAY[$2])`, fine, s.scope.Tag())
	task := s.task(fencer.TaskOrderAfterRelease)
	plan := s.show(task, all)
	if len(plan.Proposals) != 2 {
		t.Errorf("proposals %+v, want the two with an order", plan.Proposals)
	}
	wantOutcomes(t, s.together(task, all), map[approval.Outcome]int{approval.Applied: 1, approval.Nothing: 2, approval.Already: 1})
	s.wantStatus(id, reservation.StatusOrderCreated)
	s.wantStatus(cancelled, reservation.StatusReleased)
	s.wantStock(units-1, 1, 3)
	if got := s.redis.Get(t.Context(), s.scope.UserKey(s.hash(id)["user_id"])).Val(); got != id {
		t.Errorf("the user's marker names %q", got)
	}
}

// together approves the same plan by two operators at once.
func (s *shop) together(task pgstore.Task, sel approval.Selection) approval.Report {
	s.t.Helper()
	var both approval.Report
	var mu sync.Mutex
	var wg sync.WaitGroup
	plan, err := s.approver.Propose(s.t.Context(), task, sel)
	if err != nil {
		s.t.Fatal(err)
	}
	for _, actor := range []string{"alice", "bob"} {
		wg.Go(func() {
			report, err := s.daemon.Approver().Apply(s.t.Context(), plan, approval.Act{Actor: actor, Reason: "at once"})
			if _, decided := errors.AsType[*pgstore.TaskDecidedError](err); decided { // the other one was through with all of it
				for _, p := range plan.Proposals {
					o := approval.Already
					if p.Action == approval.None {
						o = approval.Nothing
					}
					report.Results = append(report.Results, approval.Result{Proposal: p, Outcome: o})
				}
			} else if err != nil {
				s.t.Error(err)
			}
			mu.Lock()
			defer mu.Unlock()
			both.Results = append(both.Results, report.Results...)
		})
	}
	wg.Wait()
	return both
}

// wantOnce checks that each reservation was carried out by exactly one operator.
func wantOnce(t *testing.T, report approval.Report, ids ...string) {
	t.Helper()
	applied := map[string]int{}
	for _, r := range report.Results {
		if r.Outcome == approval.Applied {
			applied[r.ID]++
		}
	}
	for _, id := range ids {
		if applied[id] != 1 {
			t.Errorf("%d of two operators had an effect on %s: %+v", applied[id], id, report.Results)
		}
	}
}

// Two operators release one reservation: one unit comes back.
func TestTwoOperatorsHaveOneEffect(t *testing.T) {
	t.Parallel()
	s := newShop(t)
	id := s.reserve("ENQUEUED")
	wantOnce(t, s.together(s.task(reservation.TaskEvidenceStuck), approval.Selection{Reservation: id}), id)
	s.wantStatus(id, reservation.StatusReleased)
	s.wantStock(units, 0, 1)
	s.keepsPromises()
}

// Two operators adopt the same orphans: each unit comes back once. One of them
// may stop at what the other one has begun, and approves it again.
func TestTwoOperatorsAdoptTheSameOrphans(t *testing.T) {
	t.Parallel()
	s := newShop(t)
	var orphans []string
	for range 8 {
		id := s.reserve("ENQUEUED")
		s.orphan(id)
		orphans = append(orphans, id)
	}
	restored := s.reserve("ENQUEUED")
	s.mustOrder(restored)
	s.orphan(restored)
	wantOnce(t, s.together(s.task(reservation.TaskOrphanMember), all), append(orphans, restored)...)
	for _, id := range orphans {
		s.wantStatus(id, reservation.StatusReleased)
	}
	s.wantStatus(restored, reservation.StatusOrderCreated)
	s.wantStock(units-1, 1, 8)
	s.keepsPromises()
}

// Gateways are told of a unit that came free, and of the last one taken.
func TestApprovalsAreAnnounced(t *testing.T) {
	t.Parallel()
	s := newShop(t)
	events := s.redis.Subscribe(t.Context(), s.scope.EventsChannel())
	t.Cleanup(func() { _ = events.Close() })
	if _, err := events.Receive(t.Context()); err != nil { // it listens
		t.Fatal(err)
	}
	id := s.reserve("ENQUEUED")
	s.mustApprove(s.task(reservation.TaskEvidenceStuck), approval.Selection{Reservation: id})
	ordered := s.reserve("ENQUEUED", "RELEASE_PENDING")
	s.release(ordered)
	s.mustOrder(ordered)
	for range units - 1 {
		s.reserve()
	}
	s.mustApprove(s.task(fencer.TaskOrderAfterRelease), all)
	for _, want := range []string{"available", "soldout"} {
		message, err := events.ReceiveMessage(t.Context())
		if err != nil || message.Payload != want {
			t.Errorf("event %+v, %v; want %s", message, err, want)
		}
	}
	s.wantStock(0, units, 2)
	if got := s.redis.Get(t.Context(), s.scope.SoldOutKey()).Val(); got != "1" {
		t.Errorf("soldout is %q", got)
	}
}

// Force-settling goes through the fence and stops at an order, at a claim for
// one, and at what the daemon can still do itself.
func TestForceSettleOfOneReservation(t *testing.T) {
	t.Parallel()
	s := newShop(t)
	stuck, ordered, unsent := s.reserve("ENQUEUED"), s.reserve("ENQUEUED"), s.reserve()
	s.mustOrder(ordered)
	task := s.task(reservation.TaskEvidenceStuck)
	if _, err := s.approve(task, all); !errors.Is(err, approval.ErrNoReservation) {
		t.Errorf("without a reservation: %v", err)
	}
	for _, id := range []string{ordered, unsent} {
		wantOutcomes(t, s.mustApprove(task, approval.Selection{Reservation: id}), map[approval.Outcome]int{approval.Nothing: 1})
	}
	wantOutcomes(t, s.mustApprove(task, approval.Selection{Reservation: stuck}), map[approval.Outcome]int{approval.Applied: 1})
	s.wantStatus(stuck, reservation.StatusReleased)
	s.wantStatus(ordered, reservation.StatusEnqueued)
	s.wantStatus(unsent, reservation.StatusReserved)
	if s.claim(stuck) != reservation.OutcomeFenced || s.claim(unsent) != "" {
		t.Errorf("claims %q and %q", s.claim(stuck), s.claim(unsent))
	}
	if err := s.order(stuck); err == nil {
		t.Error("its order came all the same")
	}
	s.wantStock(units-2, 2, 1)
	if s.state(task) != pgstore.TaskOpen {
		t.Error("others may stand behind the task, and it is decided")
	}
	s.keepsPromises()
}

// messages is RocketMQ as a test wants it; the dead-letter topic itself is
// asked in package daemon.
type messages map[string]reservation.MessageState

func (m messages) Gather(_ context.Context, _ int64, queries []reservation.MessageQuery) map[string]reservation.MessageEvidence {
	evidence := map[string]reservation.MessageEvidence{}
	for _, q := range queries {
		if state, ok := m[q.MessageID]; ok {
			evidence[q.MessageID] = reservation.MessageEvidence{State: state}
		}
	}
	return evidence
}

// A held dead letter is released now; one that was replayed since is not.
func TestDeadLetterIsReleasedNow(t *testing.T) {
	t.Parallel()
	s := newShop(t)
	dead, replayed, unclear := s.reserve("ENQUEUED"), s.reserve("ENQUEUED"), s.reserve("ENQUEUED")
	mq := messages{reservation.MessageID(dead): reservation.MessageDead, reservation.MessageID(replayed): reservation.MessageDead}
	s.approver.Messages = mq
	task := s.task(reservation.TaskDeadLetter)
	if plan := s.show(task, all); len(plan.Proposals) != 2 || plan.Unclear != 1 {
		t.Errorf("%d proposals, %d unclear; want 2 and 1", len(plan.Proposals), plan.Unclear)
	}
	mq[reservation.MessageID(replayed)] = reservation.MessagePending
	wantOutcomes(t, s.mustApprove(task, all), map[approval.Outcome]int{approval.Applied: 1, approval.Moved: 1})
	s.wantStatus(dead, reservation.StatusReleased)
	s.wantStatus(replayed, reservation.StatusEnqueued)
	s.wantStatus(unclear, reservation.StatusEnqueued)
	if s.state(task) != pgstore.TaskOpen {
		t.Error("what could not be told may stand behind the task, and it is decided")
	}
	s.wantStock(units-2, 2, 1)
	s.keepsPromises()
}

// Nothing moves stock without the trigger, in a held scope, beyond a halt or
// in mode observe; and nothing of it is half done.
func TestWhatHoldsAnApprovalBack(t *testing.T) {
	t.Parallel()
	for name, c := range map[string]struct {
		hold func(*shop)
		want func(*testing.T, approval.Report, error)
	}{
		"trigger disabled": {
			func(s *shop) { s.exec(`ALTER TABLE shop.orders DISABLE TRIGGER ALL`) },
			func(t *testing.T, _ approval.Report, err error) {
				t.Helper()
				var notReady *fencer.NotReadyError
				if !errors.As(err, &notReady) || notReady.Kind != fencer.TaskFenceNotReady {
					t.Errorf("%v, want fence_not_ready", err)
				}
			},
		},
		"PostgreSQL changed": {
			func(s *shop) {
				s.exec(`INSERT INTO seckill.manual_task (kind, cause, count) VALUES ('postgres_changed', 'test', 1)`)
			},
			func(t *testing.T, _ approval.Report, err error) {
				t.Helper()
				var notReady *fencer.NotReadyError
				if !errors.As(err, &notReady) || notReady.Kind != fencer.TaskPostgresChanged {
					t.Errorf("%v, want postgres_changed", err)
				}
			},
		},
		"held": {
			func(s *shop) {
				if err := s.daemon.Postgres.HoldScopes(s.t.Context(), []reservation.Scope{s.scope}, "carol", "recount"); err != nil {
					s.t.Fatal(err)
				}
			},
			func(t *testing.T, _ approval.Report, err error) {
				t.Helper()
				if !errors.Is(err, approval.ErrHeld) {
					t.Errorf("%v, want ErrHeld", err)
				}
			},
		},
		"observe": {
			func(s *shop) { s.approver.Observe = true },
			func(t *testing.T, _ approval.Report, err error) {
				t.Helper()
				if !errors.Is(err, approval.ErrObserve) {
					t.Errorf("%v, want ErrObserve", err)
				}
			},
		},
		"release storm": {
			func(s *shop) { s.task(fencer.TaskReleaseStorm) },
			func(t *testing.T, report approval.Report, err error) {
				t.Helper()
				if err != nil || !slices.ContainsFunc(report.Results, func(r approval.Result) bool {
					return r.Outcome == approval.Refused && strings.HasPrefix(r.Detail, "release_storm")
				}) {
					t.Errorf("%+v, %v; want refused for release_storm", report.Results, err)
				}
			},
		},
		"stock lost": {
			func(s *shop) { s.redis.Del(s.t.Context(), s.scope.StockKey()) },
			func(t *testing.T, report approval.Report, err error) {
				t.Helper()
				if err != nil || report.Counts()[approval.Failed] != 1 {
					t.Errorf("%+v, %v; want failed", report.Results, err)
				}
			},
		},
	} {
		t.Run(name, func(t *testing.T) {
			t.Parallel()
			s := newShop(t)
			id := s.reserve("ENQUEUED")
			s.orphan(id)
			task := s.task(reservation.TaskOrphanMember)
			s.show(task, all)
			c.hold(s)
			report, err := s.approve(task, all)
			c.want(t, report, err)
			if s.claim(id) != "" || len(s.hash(id)) != 0 {
				t.Errorf("claim %q, hash %v: something was done", s.claim(id), s.hash(id))
			}
			if s.state(task) != pgstore.TaskOpen {
				t.Errorf("the task is %s", s.state(task))
			}
		})
	}
}

// A paused scope sells nothing; what is given back in it is given back.
func TestPausedScopeIsRepaired(t *testing.T) {
	t.Parallel()
	s := newShop(t)
	id := s.reserve("ENQUEUED")
	s.orphan(id)
	s.redis.HSet(t.Context(), s.scope.MetaKey(), "state", "PAUSED")
	wantOutcomes(t, s.mustApprove(s.task(reservation.TaskOrphanMember), all), map[approval.Outcome]int{approval.Applied: 1})
	s.wantStock(units, 0, 1)
	s.keepsPromises()
}

// An unreachable PostgreSQL is no evidence: nothing is proposed or done.
func TestPostgresUnreachable(t *testing.T) {
	t.Parallel()
	s := newShop(t)
	id := s.reserve("ENQUEUED")
	s.orphan(id)
	task := s.task(reservation.TaskOrphanMember)
	plan := s.show(task, all)
	s.daemon.Postgres.Close()
	if _, err := s.approver.Apply(t.Context(), plan, alice); err == nil {
		t.Error("applied without PostgreSQL")
	}
	if _, err := s.approver.Propose(t.Context(), task, all); err == nil {
		t.Error("proposed without PostgreSQL")
	}
	if len(s.hash(id)) != 0 || s.claim(id) != "" {
		t.Error("something was done")
	}
	s.wantStock(units-1, 1, 0)
}

// PostgreSQL that goes away between the audit row and the fence leaves the
// reservation as it was, and what was begun in the audit trail.
func TestPostgresGoesAwayBeforeTheFence(t *testing.T) {
	t.Parallel()
	s := newShop(t)
	id := s.reserve("ENQUEUED")
	s.orphan(id)
	s.approver.Gate = behind{s.approver.Gate, s.daemon.Postgres.Close}
	report, err := s.approve(s.task(reservation.TaskOrphanMember), all)
	if err == nil || report.Counts()[approval.Failed] != 1 || report.Resolved {
		t.Errorf("%+v, %v; want failed, and an error", report.Results, err)
	}
	if len(s.hash(id)) != 0 || s.claim(id) != "" {
		t.Errorf("hash %v, claim %q: something was done", s.hash(id), s.claim(id))
	}
	if diff := cmp.Diff([]string{"alice repair_started looked at it adopt gone 1"}, s.audited(id)); diff != "" {
		t.Errorf("audit trail:\n%s", diff)
	}
}

// An approval is somebody's, and for a reason.
func TestApprovalNeedsAPersonAndAReason(t *testing.T) {
	t.Parallel()
	s := newShop(t)
	s.orphan(s.reserve())
	plan := s.show(s.task(reservation.TaskOrphanMember), all)
	for _, by := range []approval.Act{{Actor: "alice"}, {Reason: "because"}} {
		if _, err := s.approver.Apply(t.Context(), plan, by); err == nil {
			t.Errorf("applied by %+v", by)
		}
	}
	s.wantStock(units-1, 1, 0)
}

// A selection is bounded, and what it leaves keeps the task open.
func TestSelectionIsBounded(t *testing.T) {
	t.Parallel()
	s := newShop(t)
	for range 3 {
		s.orphan(s.reserve())
	}
	task := s.task(reservation.TaskOrphanMember)
	report := s.mustApprove(task, approval.Selection{Max: 2})
	wantOutcomes(t, report, map[approval.Outcome]int{approval.Applied: 2})
	if !report.Plan.Truncated || s.state(task) != pgstore.TaskOpen {
		t.Errorf("truncated %v, task %s", report.Plan.Truncated, s.state(task))
	}
	report = s.mustApprove(task, approval.Selection{Max: 2})
	wantOutcomes(t, report, map[approval.Outcome]int{approval.Applied: 1})
	if !report.Resolved {
		t.Error("the task stays")
	}
	s.wantStock(units, 0, 3)
	s.keepsPromises()
}

// Kinds without an action say what to do, and a halt is not rejected.
func TestKindsWithoutAnAction(t *testing.T) {
	t.Parallel()
	s := newShop(t)
	for _, kind := range []string{pgstore.TaskReleaseStorm, "oversold", "send_blocked", "state_regressed", "sold_mismatch", "config_missing"} {
		var none *approval.NoActionError
		if _, err := s.approve(s.task(kind), all); !errors.As(err, &none) {
			t.Errorf("%s: %v", kind, err)
		}
	}
	storm, blocked := s.task(pgstore.TaskReleaseStorm), s.task("send_blocked")
	if err := s.daemon.Postgres.RejectTask(t.Context(), storm.ID, "alice", "no"); !errors.Is(err, pgstore.ErrHaltNotRejected) || s.state(storm) != pgstore.TaskOpen {
		t.Errorf("rejecting a halt: %v, it is %s", err, s.state(storm))
	}
	if err := s.daemon.Postgres.RejectTask(t.Context(), blocked.ID, "alice", "no"); err != nil || s.state(blocked) != pgstore.TaskRejected {
		t.Errorf("rejecting: %v, it is %s", err, s.state(blocked))
	}
}
