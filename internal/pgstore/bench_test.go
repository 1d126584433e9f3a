package pgstore_test

import (
	"fmt"
	"testing"

	"github.com/seckill/reconciler/internal/devstack/stacktest"
	"github.com/seckill/reconciler/internal/pgstore"
	"github.com/seckill/reconciler/reservation"
)

const benchPage = 300

func benchStore(b *testing.B) *pgstore.Store {
	b.Helper()
	stack := stacktest.Shared(b)
	url := stacktest.LoginURL(b, stack, stacktest.Database(b, stack), "seckill_daemon")
	store, err := pgstore.Open(b.Context(), pgstore.Config{URL: url})
	if err != nil {
		b.Fatal(err)
	}
	b.Cleanup(store.Close)
	return store
}

// BenchmarkFence fences pages of fresh reservations.
func BenchmarkFence(b *testing.B) {
	store, scope := benchStore(b), stacktest.Scope(b)
	page := make([]reservation.FenceRequest, benchPage)
	n := 0
	for b.Loop() {
		for i := range page {
			page[i] = reservation.FenceRequest{ID: fmt.Sprintf("r%09d", n), Scope: scope}
			n++
		}
		if _, err := store.Fence(b.Context(), "bench", page); err != nil {
			b.Fatal(err)
		}
	}
	b.ReportMetric(float64(b.N*benchPage)/b.Elapsed().Seconds(), "reservations/s")
}

// BenchmarkRecords reads pages of which each id is fenced.
func BenchmarkRecords(b *testing.B) {
	store, scope := benchStore(b), stacktest.Scope(b)
	var ids []string
	for p := range 30 {
		page := make([]reservation.FenceRequest, benchPage)
		for i := range page {
			page[i] = reservation.FenceRequest{ID: fmt.Sprintf("r%09d", p*benchPage+i), Scope: scope}
			ids = append(ids, page[i].ID)
		}
		if _, err := store.Fence(b.Context(), "bench", page); err != nil {
			b.Fatal(err)
		}
	}
	n := 0
	for b.Loop() {
		at := n % 30 * benchPage
		n++
		records, err := store.Records(b.Context(), ids[at:at+benchPage])
		if err != nil || len(records) != benchPage {
			b.Fatal(len(records), err)
		}
	}
	b.ReportMetric(float64(b.N*benchPage)/b.Elapsed().Seconds(), "reservations/s")
}
