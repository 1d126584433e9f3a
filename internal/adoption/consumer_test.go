package adoption_test

import (
	"context"
	"errors"
	"fmt"

	"github.com/jackc/pgx/v5"
	"github.com/jackc/pgx/v5/pgconn"

	"github.com/seckill/reconciler/reservation"
)

// guide:begin consumer

// outcome is what became of an order message. Every one of them is
// acknowledged; an error means that the message is to be delivered again.
type outcome string

const (
	created  outcome = "created"  // show it in Redis: transition.lua to ORDER_CREATED
	existed  outcome = "existed"  // the same
	fenced   outcome = "fenced"   // released or refused before: transition.lua to REJECTED
	rejected outcome = "rejected" // refused now: the same
)

var errSoldOut = errors.New("sold out")

// consume turns an order message into an order, at most once.
func consume(ctx context.Context, db *pgx.Conn, m reservation.OrderMessage) (result outcome, err error) {
	err = pgx.BeginFunc(ctx, db, func(tx pgx.Tx) error {
		// The early claim, before the stock is touched. It is made or undone
		// with this transaction.
		var claim string
		var order *string
		err := tx.QueryRow(ctx,
			`SELECT outcome, order_id FROM seckill.claim_reservation($1, scope => $2, user_id => $3)`,
			m.ReservationID, m.Scope().Tag(), m.UserID).Scan(&claim, &order)
		switch {
		case err != nil:
			return err
		case claim != "ORDER":
			result = fenced
			return nil
		case order != nil:
			result = existed
			return nil
		}
		result = created
		return insertOrder(ctx, tx, m)
	})
	var refused *pgconn.PgError
	switch {
	case errors.Is(err, errSoldOut):
		// Everything above is rolled back, the claim too. This refusal is final,
		// and lets the unit in Redis go without waiting for anything.
		var inForce string
		err = db.QueryRow(ctx, `SELECT seckill.reject_reservation($1, 'sold_out', $2)`,
			m.ReservationID, m.Scope().Tag()).Scan(&inForce)
		return rejected, err
	case errors.As(err, &refused) && refused.Code == "SK001":
		return fenced, nil // the trigger; only without the early claim
	case errors.As(err, &refused) && refused.Code == "SK002":
		return existed, nil // the trigger: the reservation has another order
	case err != nil:
		return "", fmt.Errorf("order of reservation %s: %w", m.ReservationID, err)
	}
	return result, nil
}

// insertOrder is what this consumer always did, with two columns more.
func insertOrder(ctx context.Context, tx pgx.Tx, m reservation.OrderMessage) error {
	_, err := tx.Exec(ctx, `
		WITH b AS (
			INSERT INTO laden.bestellung (kunde_nr, aktion, vormerkung, anfrage)
			VALUES ($1::bigint, $2, $3, $4) RETURNING bestell_nr, angelegt_am
		)
		INSERT INTO laden.position (bestell_nr, angelegt_am, zeile, artikel, aktionsware)
		SELECT bestell_nr, angelegt_am, zeile, artikel, zeile < 3
		FROM b, (VALUES (1, $5), (2, $5), (3, 'geschenkpapier')) AS z (zeile, artikel)`,
		m.UserID, m.ActivityID, m.ReservationID, m.RequestID, m.SKUID)
	if err != nil {
		return err
	}
	deducted, err := tx.Exec(ctx, `
		UPDATE laden.kontingent SET verkauft = verkauft + 1
		WHERE aktion = $1 AND artikel = $2 AND verkauft < menge`, m.ActivityID, m.SKUID)
	if err == nil && deducted.RowsAffected() == 0 {
		err = errSoldOut
	}
	return err
}

// guide:end consumer
