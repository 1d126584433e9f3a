// Package reservation is the domain of a flash sale's reservations: scopes and
// their Redis keys, identifiers, statuses and their legal transitions, the
// evidence that PostgreSQL and RocketMQ give, and [Decide], the one place that
// says what is to be done with a reservation.
//
// It is pure: no I/O, no clock, and no import of any other package of this
// module. Everything else may import it.
//
//	           ┌──────────────► RELEASE_PENDING ──compensate──► RELEASED
//	           │    ┌──────────────▲   ▲   │                       ▲
//	RESERVED ──┼──► SEND_UNKNOWN   │   │   └──confirm──┐           │
//	   │       │         │         │   │               ▼           │
//	   └───────┴────► ENQUEUED ────┘   │         ORDER_CREATED     │
//	                     ├─────────────┼───────────────▲           │
//	                     └──► REJECTED ┴──confirm──────┘           │
//	                              └──────────────compensate────────┘
//
// The data contract is that of the flash sale's gateway, consumer and daemon:
// names, key shapes and codes are fixed, since other programs rely on them.
package reservation
