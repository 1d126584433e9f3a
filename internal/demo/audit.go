package demo

import (
	"context"
	"errors"
	"fmt"
	"slices"
	"strconv"
	"strings"

	"github.com/jackc/pgx/v5"
	"github.com/jackc/pgx/v5/pgxpool"
	"github.com/redis/go-redis/v9"

	"github.com/seckill/reconciler/internal/upstream"
	"github.com/seckill/reconciler/reservation"
)

// State is everything that Redis and PostgreSQL hold of an activity, read once.
// It means something only while nothing moves.
type State struct {
	Activity upstream.Activity
	Scopes   []ScopeState
	// Sold and Total are shop.stock's.
	Sold, Total int64
	// Active are all orders that are not cancelled, whatever bucket they name.
	Active int64
	// Strays are orders and claims that name no bucket of the activity.
	Strays []string
}

// ScopeState is one bucket on both sides.
type ScopeState struct {
	Scope                                       reservation.Scope
	Initial, Available, Reserved, ReleasedTotal int64
	Reservations                                map[string]*Reservation
	OrphanTasks                                 int64 // subjects of open orphan_member tasks
}

// Reservation is one reservation on both sides. A field is empty where that
// side knows nothing.
type Reservation struct {
	Status  reservation.Status // empty: no hash
	UserID  string             // of the hash, or of the request's kept result
	Indexed bool               // in one of the two indexes
	Claim   reservation.Outcome
	Orders  []Order
}

// Order is one row of shop.orders.
type Order struct {
	ID     string
	UserID string
	Active bool
}

// Orphan says whether the reservation's hash is gone, its index member is left
// and there is no order: the daemon may not touch it, a person has to.
func (r *Reservation) Orphan() bool { return r.Status == "" && r.Indexed && len(r.Orders) == 0 }

// Gone says whether nothing is left of it in Redis but perhaps a receipt, and no
// order was made of it: it holds no unit.
func (r *Reservation) Gone() bool { return r.Status == "" && !r.Indexed && len(r.Orders) == 0 }

// Open says whether the daemon still has to decide it.
func (r *Reservation) Open() bool { return r.Status != "" && !r.Status.Terminal() }

// Look reads the state of the activity.
func Look(ctx context.Context, client redis.UniversalClient, db *pgxpool.Pool, activity upstream.Activity) (*State, error) {
	s := &State{Activity: activity}
	for _, scope := range activity.Scopes() {
		one, err := lookRedis(ctx, client, scope)
		if err != nil {
			return nil, fmt.Errorf("read %s from Redis: %w", scope, err)
		}
		s.Scopes = append(s.Scopes, one)
	}
	if err := s.lookPostgres(ctx, db); err != nil {
		return nil, fmt.Errorf("read %s from PostgreSQL: %w", activity.ActivityID, err)
	}
	return s, nil
}

// lookRedis finds a scope's reservations through its request results and its
// indexes, all of which are keys of known names.
func lookRedis(ctx context.Context, client redis.UniversalClient, scope reservation.Scope) (ScopeState, error) {
	s := ScopeState{Scope: scope, Reservations: map[string]*Reservation{}}
	if err := s.readStock(ctx, client); err != nil {
		return s, err
	}
	if err := s.readRequests(ctx, client); err != nil {
		return s, err
	}
	for _, index := range []reservation.Index{reservation.SendPending, reservation.ReservationExpiry} {
		members, err := client.ZRange(ctx, scope.IndexKey(index), 0, -1).Result()
		if err != nil {
			return s, err
		}
		for _, id := range members {
			s.at(id).Indexed = true
		}
	}
	return s, s.readHashes(ctx, client)
}

func (s *ScopeState) at(id string) *Reservation {
	r := s.Reservations[id]
	if r == nil {
		r = &Reservation{}
		s.Reservations[id] = r
	}
	return r
}

func (s *ScopeState) readStock(ctx context.Context, client redis.UniversalClient) error {
	fields, err := client.HGetAll(ctx, s.Scope.StockKey()).Result()
	if err != nil {
		return err
	}
	for name, into := range map[string]*int64{
		"initial": &s.Initial, "available": &s.Available, "reserved": &s.Reserved, "released_total": &s.ReleasedTotal,
	} {
		// Signed on purpose: a negative number is a finding, not an error.
		if *into, err = strconv.ParseInt(fields[name], 10, 64); err != nil {
			return fmt.Errorf("%s of the stock: %w", name, err)
		}
	}
	return nil
}

// readRequests reads the kept results: 0|reservation_id|remaining|status|user_id.
func (s *ScopeState) readRequests(ctx context.Context, client redis.UniversalClient) error {
	pipe := client.Pipeline()
	shards := make([]*redis.StringSliceCmd, reservation.RequestShards)
	for i := range shards {
		shards[i] = pipe.HVals(ctx, s.Scope.RequestShardKey(i))
	}
	if _, err := pipe.Exec(ctx); err != nil {
		return err
	}
	for _, shard := range shards {
		for _, kept := range shard.Val() {
			if part := strings.Split(kept, "|"); len(part) == 5 && part[0] == "0" {
				s.at(part[1]).UserID = part[4]
			}
		}
	}
	return nil
}

func (s *ScopeState) readHashes(ctx context.Context, client redis.UniversalClient) error {
	ids := make([]string, 0, len(s.Reservations))
	for id := range s.Reservations {
		ids = append(ids, id)
	}
	const page = 1000
	for chunk := range slices.Chunk(ids, page) {
		pipe := client.Pipeline()
		reads := make([]*redis.SliceCmd, len(chunk))
		for i, id := range chunk {
			reads[i] = pipe.HMGet(ctx, s.Scope.ReservationKey(id), "status", "user_id")
		}
		if _, err := pipe.Exec(ctx); err != nil {
			return err
		}
		for i, id := range chunk {
			r := s.Reservations[id]
			if status, ok := reads[i].Val()[0].(string); ok {
				r.Status = reservation.Status(status)
			}
			if user, ok := reads[i].Val()[1].(string); ok {
				r.UserID = user
			}
		}
	}
	return nil
}

// lookPostgres adds orders, claims and tasks, in one snapshot of the database.
func (s *State) lookPostgres(ctx context.Context, db *pgxpool.Pool) error {
	options := pgx.TxOptions{IsoLevel: pgx.RepeatableRead, AccessMode: pgx.ReadOnly}
	return pgx.BeginTxFunc(ctx, db, options, func(tx pgx.Tx) error {
		return errors.Join(s.readSold(ctx, tx), s.readOrders(ctx, tx), s.readClaims(ctx, tx), s.readTasks(ctx, tx))
	})
}

func (s *State) readSold(ctx context.Context, tx pgx.Tx) error {
	a := s.Activity
	return tx.QueryRow(ctx, `SELECT sold, total FROM shop.stock WHERE activity_id = $1 AND sku_id = $2 AND activity_version = $3`,
		a.ActivityID, a.SKUID, a.Version).Scan(&s.Sold, &s.Total)
}

func (s *State) readOrders(ctx context.Context, tx pgx.Tx) error {
	rows, err := tx.Query(ctx, `SELECT coalesce(reservation_id, ''), order_id, user_id, status <> 'CANCELLED', bucket_id
		FROM shop.orders WHERE activity_id = $1 AND sku_id = $2 AND activity_version = $3`,
		s.Activity.ActivityID, s.Activity.SKUID, s.Activity.Version)
	if err != nil {
		return err
	}
	var id string
	var order Order
	var bucket int64
	_, err = pgx.ForEachRow(rows, []any{&id, &order.ID, &order.UserID, &order.Active, &bucket}, func() error {
		if order.Active {
			s.Active++
		}
		r := s.find(id, bucket)
		if r == nil {
			s.Strays = append(s.Strays, "order "+order.ID)
			return nil
		}
		r.Orders = append(r.Orders, order)
		return nil
	})
	return err
}

func (s *State) readClaims(ctx context.Context, tx pgx.Tx) error {
	rows, err := tx.Query(ctx, `SELECT reservation_id, outcome, coalesce(bucket_id, -1) FROM seckill.reservation_claim WHERE activity_id = $1`,
		s.Activity.ActivityID)
	if err != nil {
		return err
	}
	var id string
	var outcome reservation.Outcome
	var bucket int64
	_, err = pgx.ForEachRow(rows, []any{&id, &outcome, &bucket}, func() error {
		r := s.find(id, bucket)
		if r == nil {
			s.Strays = append(s.Strays, "claim of "+id)
			return nil
		}
		r.Claim = outcome
		return nil
	})
	return err
}

// find is the reservation of an id, new if Redis has never heard of it. nil
// says that the bucket is none of the activity's.
func (s *State) find(id string, bucket int64) *Reservation {
	if id == "" || bucket < 0 || bucket >= int64(len(s.Scopes)) {
		return nil
	}
	return s.Scopes[bucket].at(id)
}

func (s *State) readTasks(ctx context.Context, tx pgx.Tx) error {
	for i := range s.Scopes {
		err := tx.QueryRow(ctx, `SELECT coalesce(sum(count), 0) FROM seckill.manual_task
			WHERE kind = 'orphan_member' AND state = 'open' AND scope = $1`, s.Scopes[i].Scope.Tag()).Scan(&s.Scopes[i].OrphanTasks)
		if err != nil {
			return err
		}
	}
	return nil
}

// Open counts the reservations that are still to be decided.
func (s *State) Open() int {
	n := 0
	for _, scope := range s.Scopes {
		n += scope.count((*Reservation).Open)
	}
	return n
}

// Orphans are the ids of the reservations that wait for a person.
func (s *State) Orphans() []string {
	var ids []string
	for _, scope := range s.Scopes {
		for id, r := range scope.Reservations {
			if r.Orphan() {
				ids = append(ids, id)
			}
		}
	}
	slices.Sort(ids)
	return ids
}

func (s *ScopeState) count(is func(*Reservation) bool) int {
	n := 0
	for _, r := range s.Reservations {
		if is(r) {
			n++
		}
	}
	return n
}

// ByStatus counts reservations by the status of their hash.
func (s *ScopeState) ByStatus() map[reservation.Status]int {
	counts := map[reservation.Status]int{}
	for _, r := range s.Reservations {
		if r.Status != "" {
			counts[r.Status]++
		}
	}
	return counts
}

// Orders counts the scope's orders that are not cancelled.
func (s *ScopeState) Orders() int {
	n := 0
	for _, r := range s.Reservations {
		for _, o := range r.Orders {
			if o.Active {
				n++
			}
		}
	}
	return n
}

// Deviation is what Redis has reserved beyond the orders and the reservations
// that wait for a person. At rest it is 0 (protocol L2).
func (s *ScopeState) Deviation() int64 {
	return s.Reserved - int64(s.Orders()) - int64(s.count((*Reservation).Orphan))
}
