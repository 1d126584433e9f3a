package client_test

import (
	"context"
	"encoding/json"
	"errors"
	"fmt"
	"net/http"
	"time"

	"github.com/jackc/pgx/v5"
	"github.com/jackc/pgx/v5/pgxpool"
	"github.com/prometheus/client_golang/prometheus"
	"github.com/redis/go-redis/v9"

	"github.com/seckill/reconciler/client"
	"github.com/seckill/reconciler/reservation"
)

// producer is whatever sends your messages.
type producer interface {
	// Send returns the position of a message that was stored with SendOK, and
	// otherwise whether it certainly was not stored.
	Send(ctx context.Context, keys string, body []byte) (position string, notStored bool, err error)
}

// A gateway's handler: reserve, send, note what became of it.
func ExampleGateway() { //nolint:testableexamples // a server; examples/gateway is run by its test
	rdb := redis.NewUniversalClient(client.RedisOptions(&redis.UniversalOptions{
		Addrs: []string{"10.0.0.1:6379", "10.0.0.2:6379"}, ReadTimeout: time.Second,
	}))
	catalog, err := client.NewCatalog(client.Sale{ActivityID: "10001", SKUID: "88001", Version: 7, Buckets: 4, Secret: []byte("from a vault")})
	if err != nil {
		panic(err)
	}
	gateway, err := client.NewGateway(rdb, catalog, client.Options{})
	if err != nil {
		panic(err) // lua.ErrUnsafeClient: the client repeats writes
	}
	defer gateway.Close()
	prometheus.MustRegister(gateway)
	go catalog.Follow(context.Background(), rdb, 5*time.Second, nil) // current_version

	var send producer // yours
	http.HandleFunc("POST /buy", func(w http.ResponseWriter, r *http.Request) {
		request := client.Request{
			ActivityID: "10001", SKUID: "88001", UserID: r.Header.Get("X-User"), RequestID: r.FormValue("request_id"),
			Retry: r.FormValue("retry") != "",
		}
		result, err := gateway.Reserve(r.Context(), request)
		if err != nil {
			w.WriteHeader(http.StatusServiceUnavailable)
			_ = json.NewEncoder(w).Encode(client.ResponseTo(err, request.RequestID))
			return
		}
		if result.Unsent() {
			deliver(r.Context(), gateway, send, result)
		}
		fmt.Fprintln(w, result.Code) // "queued", never "ordered"
	})
}

// deliver never fails the request: what is not sent or noted, the daemon sends.
func deliver(ctx context.Context, gateway *client.Gateway, send producer, result client.Result) {
	key, body, err := result.Message()
	if err != nil {
		return
	}
	switch position, notStored, err := send.Send(ctx, key, body); {
	case err == nil:
		_ = gateway.MarkEnqueued(ctx, result.Reservation, position)
	case notStored: // stays RESERVED, in send_pending
	default:
		_ = gateway.MarkSendUnknown(ctx, result.Reservation, "send_timeout")
	}
}

var errNoStock = errors.New("no stock")

// An order consumer's handler of one message. true acknowledges it.
func ExampleConsumer() { //nolint:testableexamples // a handler of messages; orders_test.go runs these calls
	var (
		db       *pgxpool.Pool    // a member of role seckill_consumer
		consumer *client.Consumer // of client.NewConsumer
	)
	handle := func(ctx context.Context, body []byte) bool {
		m, err := client.ParseMessage(body)
		if err != nil {
			return false // in the end a dead letter, which a person sees
		}
		orderID := "o-" + m.ReservationID
		var claim client.Claim
		err = pgx.BeginFunc(ctx, db, func(tx pgx.Tx) (err error) {
			if claim, err = consumer.Claim(ctx, tx, m, orderID); err != nil || !claim.Won {
				return err // nothing was written: committing is harmless
			}
			return createOrder(ctx, tx, m, orderID)
		})
		outcome := claim.Outcome
		if errors.Is(err, errNoStock) { // rolled back: say so, for good
			outcome, err = consumer.Reject(ctx, db, m, "out_of_stock")
		}
		switch {
		case err != nil:
			return false // delivered again
		case outcome == reservation.OutcomeOrder:
			return consumer.MarkOrderCreated(ctx, m, claim.OrderID) == nil
		default:
			return consumer.MarkRejected(ctx, m, string(outcome)) == nil
		}
	}
	_ = handle
}

// createOrder inserts the order and deducts the stock, conditionally.
func createOrder(ctx context.Context, tx pgx.Tx, m client.Message, orderID string) error {
	if err := insert(ctx, tx, m, orderID); err != nil {
		return err
	}
	tag, err := tx.Exec(ctx, `UPDATE shop.stock SET sold = sold + 1 WHERE activity_id = $1 AND sku_id = $2 AND activity_version = $3 AND sold < total`,
		m.ActivityID, m.SKUID, m.ActivityVersion)
	if err == nil && tag.RowsAffected() == 0 {
		err = errNoStock
	}
	return err
}
