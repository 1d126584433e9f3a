package probe

import (
	"time"

	"github.com/seckill/reconciler/reconcile"
)

// Postgres is PostgreSQL as it answered. Each part has an error of its own, so
// that one that cannot be read hides no other.
type Postgres struct {
	// Err says why it could not be asked at all. Nothing else is known then.
	Err error

	Version     string
	Settings    reconcile.PostgresServer
	SettingsErr error
	// Clock is the server's time minus that of this process, ± ClockError.
	Clock      time.Duration
	ClockError time.Duration
	ClockErr   error
	// SchemaErr says why this build cannot work with the schema.
	SchemaErr error
	// FenceProblems is what keeps releases from being made (protocol §1).
	FenceProblems []string
	FenceErr      error
	// Scans are the tables that the evidence queries read whole, for want of an index.
	Scans    []TableScan
	ScansErr error
	// PoolerErr says why a lease cannot be held over this URL, or why that could
	// not be found out.
	PoolerErr         error
	TransactionPooler bool
	// Brokers are those that were ever seen with the order topic and not forgotten.
	Brokers    []string
	BrokersErr error
}

// TableScan is a table that a query reads from one end to the other.
type TableScan struct {
	Query string // what it is for
	Table string
}
