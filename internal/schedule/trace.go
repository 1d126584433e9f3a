package schedule

import (
	"go.opentelemetry.io/otel/attribute"
	"go.opentelemetry.io/otel/codes"
	"go.opentelemetry.io/otel/trace"
)

// tracerName is this package as traces name it.
const tracerName = "github.com/seckill/reconciler/internal/schedule"

// traceID is the id of a span's trace, empty unless it is recorded.
func traceID(span trace.Span) string {
	if !span.IsRecording() {
		return ""
	}
	return span.SpanContext().TraceID().String()
}

// endSpan writes what a run did into its span.
func endSpan(span trace.Span, run Run) {
	if span.IsRecording() {
		span.SetAttributes(attribute.String("job.outcome", string(run.Outcome)), attribute.Bool("job.manual", run.Manual))
		for result, n := range run.Items {
			span.SetAttributes(attribute.Int("job.items."+result, n))
		}
		if run.Err != nil {
			span.SetStatus(codes.Error, string(run.Outcome)) // its text may name a user's key
		}
	}
	span.End()
}
