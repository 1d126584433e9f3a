package redisstore

import (
	"context"
	"fmt"
	"log/slog"

	"github.com/redis/go-redis/v9"
)

// RouteLibraryLog sends what the client library writes to logger, at level
// debug: what matters of it comes back as errors. It is a global of the
// library: call it before the first client is made.
func RouteLibraryLog(logger *slog.Logger) { redis.SetLogger(libraryLog{logger}) }

type libraryLog struct{ logger *slog.Logger }

// Printf is part of the library's logging interface.
func (l libraryLog) Printf(ctx context.Context, format string, v ...any) {
	l.logger.DebugContext(ctx, fmt.Sprintf(format, v...), "component", "redis-client")
}
