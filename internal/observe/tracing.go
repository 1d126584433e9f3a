package observe

import (
	"context"
	"fmt"
	"log/slog"
	"time"

	"go.opentelemetry.io/otel"
	"go.opentelemetry.io/otel/attribute"
	"go.opentelemetry.io/otel/exporters/otlp/otlptrace/otlptracehttp"
	"go.opentelemetry.io/otel/sdk/resource"
	sdk "go.opentelemetry.io/otel/sdk/trace"
	"go.opentelemetry.io/otel/trace"
	"golang.org/x/time/rate"
)

// Tracing says where traces go. Without an endpoint none are made.
type Tracing struct {
	Endpoint      string // of an OTLP/HTTP collector, such as http://127.0.0.1:4318
	Authorization string // the header's value; empty for none
	Sample        float64
	Timeout       time.Duration // of one export
	Version       string        // of this program
}

// complainEvery is how often a collector that is away is logged.
const complainEvery = 10 * time.Minute

// StartTracing sends spans to a collector from now on. A collector that is away
// costs spans and nothing else. stop sends what is left; ctx bounds it.
func StartTracing(ctx context.Context, t Tracing) (stop func(context.Context) error, err error) {
	if t.Endpoint == "" {
		return func(context.Context) error { return nil }, nil
	}
	options := []otlptracehttp.Option{otlptracehttp.WithEndpointURL(t.Endpoint), otlptracehttp.WithTimeout(t.Timeout)}
	if t.Authorization != "" {
		options = append(options, otlptracehttp.WithHeaders(map[string]string{"Authorization": t.Authorization}))
	}
	exporter, err := otlptracehttp.New(ctx, options...)
	if err != nil {
		return nil, fmt.Errorf("tracing.endpoint: %w", err)
	}
	provider := sdk.NewTracerProvider(
		sdk.WithBatcher(exporter),
		sdk.WithSampler(sdk.ParentBased(sdk.TraceIDRatioBased(t.Sample))),
		sdk.WithResource(resource.NewSchemaless(
			attribute.String("service.name", "seckill-reconciler"), attribute.String("service.version", t.Version),
		)),
	)
	before := otel.GetTracerProvider()
	otel.SetTracerProvider(provider)
	often := rate.Sometimes{Interval: complainEvery}
	otel.SetErrorHandler(otel.ErrorHandlerFunc(func(err error) {
		often.Do(func() { slog.Warn("traces are not exported", "error", err) })
	}))
	return func(ctx context.Context) error {
		otel.SetTracerProvider(before)
		return provider.Shutdown(ctx)
	}, nil
}

// TraceID is the id of the trace that ctx is part of; empty without one.
func TraceID(ctx context.Context) string {
	if span := trace.SpanContextFromContext(ctx); span.HasTraceID() && span.IsSampled() {
		return span.TraceID().String()
	}
	return ""
}
