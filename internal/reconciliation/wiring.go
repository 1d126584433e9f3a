package reconciliation

import (
	"github.com/seckill/reconciler/internal/pgstore"
	"github.com/seckill/reconciler/internal/redisstore"
	"github.com/seckill/reconciler/reconcile"
)

// Reconciler compares and repairs over the given connections.
func Reconciler(redis *redisstore.Store, postgres *pgstore.Store) *reconcile.Reconciler {
	return addTransfers(&reconcile.Reconciler{
		Registry: postgres, Stocks: redis, Orders: postgres, Members: redis, Claims: postgres, Mender: redis,
		Guard: pgstore.RepairGuard{Store: postgres, Sighted: redis.Sighting}, Trail: postgres, Nodes: redis, Server: postgres,
	}, redis, postgres)
}
