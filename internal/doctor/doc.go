// Package doctor judges how an installation is set up: what the probes read of
// Redis, PostgreSQL and RocketMQ becomes rows that say ok, warning or broken,
// why, and what to do.
//
// Broken is what makes the daemon stop, wait for ever, or break a promise
// (protocol): it has to be put right. A warning is a risk that an installation
// may choose to live with. What could not be read is broken too, and marked:
// nothing is said of it.
//
// Judging is pure. What the check environment of a reconciliation judges
// (package reconcile) is taken from there.
package doctor

import (
	"cmp"
	"slices"
	"time"
)

// State is what a row says.
type State string

// The states.
const (
	OK      State = "ok"
	Warning State = "warning"
	Broken  State = "broken"
)

// Areas of the rows.
const (
	AreaRedis    = "redis"
	AreaKeys     = "keys"
	AreaPostgres = "postgres"
	AreaRocketMQ = "rocketmq"
	AreaClocks   = "clocks"
)

// Row is one thing that was looked at.
type Row struct {
	Area    string `json:"area"`
	Subject string `json:"subject"` // a server, a broker or a scope; "" for the area as a whole
	Check   string `json:"check"`
	State   State  `json:"state"`
	Why     string `json:"why"`
	Remedy  string `json:"remedy"` // "" for what is ok
	Unread  bool   `json:"unread"` // it could not be read, so nothing is known
}

// Report is everything that was looked at.
type Report struct {
	Schema     int           `json:"schema"`
	StartedAt  time.Time     `json:"started_at"`
	FinishedAt time.Time     `json:"finished_at"`
	Rows       []Row         `json:"rows"`
	Summary    map[State]int `json:"summary"`
	Unread     int           `json:"unread"`
}

// Complete counts the rows, which come in the order of areas and subjects.
func (r *Report) Complete() {
	r.Schema = 1
	areas := []string{AreaRedis, AreaKeys, AreaPostgres, AreaRocketMQ, AreaClocks}
	slices.SortStableFunc(r.Rows, func(a, b Row) int {
		return cmp.Or(cmp.Compare(slices.Index(areas, a.Area), slices.Index(areas, b.Area)), cmp.Compare(a.Subject, b.Subject))
	})
	r.Summary, r.Unread = map[State]int{OK: 0, Warning: 0, Broken: 0}, 0
	for _, row := range r.Rows {
		r.Summary[row.State]++
		if row.Unread {
			r.Unread++
		}
	}
}

// rows gathers what is said of one subject.
type rows struct {
	area, subject string
	list          []Row
}

func (r *rows) add(check string, state State, why, remedy string) {
	r.list = append(r.list, Row{Area: r.area, Subject: r.subject, Check: check, State: state, Why: why, Remedy: remedy})
}

func (r *rows) ok(check, why string) { r.add(check, OK, why, "") }

// unread says that nothing is known.
func (r *rows) unread(check string, err error, remedy string) {
	r.list = append(r.list, Row{
		Area: r.area, Subject: r.subject, Check: check, State: Broken, Why: "could not be read: " + err.Error(), Remedy: remedy, Unread: true,
	})
}

// judge says why it is ok, or else in which state it is.
func (r *rows) judge(check string, fine bool, why string, otherwise State, whyNot, remedy string) {
	if fine {
		r.ok(check, why)
		return
	}
	r.add(check, otherwise, whyNot, remedy)
}
