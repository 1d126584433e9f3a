// Package upstream is a flash sale in small: a gateway that reserves and sends,
// and order consumers that create orders, with switches for everything that
// can go wrong between them. The demo, tests and benchmarks use it to bring
// real reservations, messages and orders into the states that the daemon
// exists for.
//
//	gateway ──reserve.lua──▶ Redis ──▶ RocketMQ ──▶ consumer ──▶ PostgreSQL
//
// Gateway and consumer are those of package client. Services, scripts, messages
// and orders are the real ones. What is simulated
// is only the moment at which a program dies or the wire fails: the program
// then simply does not do what would have come next. Each [Fault] says how.
//
// Which fault befalls a reservation follows from its id alone ([Faults.Of]), so
// a consumer, a report and a second run of the same seed agree without talking
// to each other.
//
// The package knows no more than a gateway and a consumer do: it reads no
// claims, looks into no other's table, and nothing here repairs anything.
package upstream
