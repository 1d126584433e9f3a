package rocketmq

import (
	"context"
	"log/slog"
	"maps"
	"slices"
	"sync"

	"github.com/apache/rocketmq-client-go/v2/rlog"
)

var routeLibraryLog sync.Once

// RouteLibraryLog sends the client library's log to logger, once per process:
// the library's logger is a global without synchronisation, so it must be set
// before the first client exists. [NewSender] does it with its own logger if
// nobody did before.
func RouteLibraryLog(logger *slog.Logger) {
	routeLibraryLog.Do(func() { rlog.SetLogger(libraryLog{logger.With("component", "rocketmq-client")}) })
}

// libraryLog lowers what the library says by one level: it logs each failed
// attempt, and the caller gets the same failure as a result.
type libraryLog struct{ logger *slog.Logger }

func (l libraryLog) log(level slog.Level, msg string, fields map[string]any) {
	if !l.logger.Enabled(context.Background(), level) {
		return
	}
	attrs := make([]slog.Attr, 0, len(fields))
	for _, name := range slices.Sorted(maps.Keys(fields)) {
		value := fields[name]
		if err, ok := value.(error); ok {
			value = err.Error()
		}
		attrs = append(attrs, slog.Any(name, value))
	}
	l.logger.LogAttrs(context.Background(), level, msg, attrs...)
}

func (l libraryLog) Debug(msg string, fields map[string]any) { l.log(slog.LevelDebug-4, msg, fields) }

func (l libraryLog) Info(msg string, fields map[string]any) { l.log(slog.LevelDebug, msg, fields) }

func (l libraryLog) Warning(msg string, fields map[string]any) { l.log(slog.LevelInfo, msg, fields) }

func (l libraryLog) Error(msg string, fields map[string]any) { l.log(slog.LevelWarn, msg, fields) }

func (l libraryLog) Fatal(msg string, fields map[string]any) { l.log(slog.LevelError, msg, fields) }
func (libraryLog) Level(string)                              {}
func (libraryLog) OutputPath(string) error                   { return nil }
