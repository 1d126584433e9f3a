package rocketmq

import (
	"slices"
	"testing"
	"time"

	"github.com/google/go-cmp/cmp"
	"pgregory.net/rapid"
)

// The index against a plain list: runs are added at either end, the start is
// forgotten, and every wanted fingerprint is found where it is.
func TestQueueIndexAgainstAList(t *testing.T) {
	t.Parallel()
	rapid.Check(t, func(t *rapid.T) {
		small := rapid.Uint64Range(1, 40)
		end := rapid.Int64Range(0, 5000).Draw(t, "end")
		x := newQueueIndex(end)
		model := map[int64][]uint64{} // offset → fingerprints
		for range rapid.IntRange(1, 12).Draw(t, "steps") {
			n := rapid.Int64Range(0, 1500).Draw(t, "n")
			from := x.to
			switch rapid.IntRange(0, 2).Draw(t, "what") {
			case 0: // before
				n = min(n, x.from)
				from = x.from - n
			case 1: // forget
				before := x.from + rapid.Int64Range(0, x.len()+10).Draw(t, "before")
				forgotten := x.trim(before)
				if want := min(before, x.to) - (x.from - forgotten); forgotten != max(want, 0) {
					t.Fatalf("forgot %d, want %d", forgotten, want)
				}
				for offset := range model {
					if offset < before {
						delete(model, offset)
					}
				}
				continue
			}
			run := swept{from: from, first: make([]uint64, n), end: recordMark{logOffset: from + n, storeMS: 1}}
			for i := range n {
				f := small.Draw(t, "fingerprint") * uint64(i%3) // every third has none
				run.first[i] = f
				if f != noFingerprint {
					model[from+i] = append(model[from+i], f)
				}
				if i%100 == 7 {
					run.further = append(run.further, keyAt{f + 1000, from + i})
					model[from+i] = append(model[from+i], f+1000)
				}
			}
			x.add(run)
			if n > 0 && from+n == x.to && x.last != run.end {
				t.Fatalf("last is %+v, want %+v", x.last, run.end)
			}
		}
		sought := []uint64{2, 3, 1002, 77}
		var want []hit
		for offset, fingerprints := range model {
			for _, f := range fingerprints {
				if slices.Contains(sought, f) {
					want = append(want, hit{f, offset})
				}
			}
		}
		less := func(a, b hit) int {
			if a.offset != b.offset {
				return int(a.offset - b.offset)
			}
			return int(a.fingerprint) - int(b.fingerprint)
		}
		got := x.find(newWanted(sought))
		slices.SortFunc(want, less)
		slices.SortFunc(got, less)
		if diff := cmp.Diff(want, got, cmp.AllowUnexported(hit{})); diff != "" {
			t.Fatal(diff)
		}
		if blocks := int64(len(x.blocks)); blocks > x.len()>>blockBits+2 {
			t.Fatalf("%d blocks for %d messages", blocks, x.len())
		}
	})
}

func TestClockSkewIsTheDistanceFromWhatTheBrokerSaid(t *testing.T) {
	t.Parallel()
	at := time.UnixMilli
	for _, tt := range []struct {
		redis int64
		want  time.Duration
	}{{100_000, 0}, {100_999, 0}, {101_050, 0}, {101_300, 200 * time.Millisecond}, {99_950, 0}, {99_000, 900 * time.Millisecond}} {
		if got := clockSkew(at(tt.redis), at(100_000), 100*time.Millisecond); got != tt.want {
			t.Errorf("Redis at %d: %s, want %s", tt.redis, got, tt.want)
		}
	}
}

func TestPositionsAreParsedOrOfNoUse(t *testing.T) {
	t.Parallel()
	const id = "7F00000100002A9F0000000000000123"
	p, err := ParsePosition("b,3,7," + id)
	if at, _ := p.LogOffset(); err != nil || p.String() != "b,3,7,"+id || at != 0x123 {
		t.Errorf("%+v, %v", p, err)
	}
	for _, bad := range []string{"", "b,3,7", ",3,7," + id, "b,-1,7," + id, "b,99999999999,7," + id, "b,3,-7," + id, "b,3,7,", "b,3,7,xyz" + id, "b,3,7," + id + ",", "b,3,7,FFFFFFFFFFFFFFFFFFFFFFFFFFFFFFFF"} {
		if _, err := ParsePosition(bad); err == nil {
			t.Errorf("%q was accepted", bad)
		}
	}
}
