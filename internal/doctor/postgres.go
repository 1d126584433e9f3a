package doctor

import (
	"errors"
	"fmt"
	"strings"

	"github.com/seckill/reconciler/internal/probe"
	"github.com/seckill/reconciler/reconcile"
)

// Postgres judges the server, the schema and the evidence.
func Postgres(p probe.Postgres) []Row {
	r := &rows{area: AreaPostgres}
	if p.Err != nil {
		r.unread("answers", p.Err, "start it, or correct postgres.url")
		return r.list
	}
	r.ok("answers", "version "+p.Version)
	r.serverSettings(p)
	if r.schema(p) {
		r.fence(p)
		r.plans(p)
	}
	switch {
	case p.TransactionPooler:
		r.add("pooler", Broken, "the URL leads to a transaction-mode pooler: a lease cannot be held over it", "use the server's address, or a pooler in session mode")
	case p.PoolerErr != nil:
		r.unread("pooler", p.PoolerErr, "see whether the server takes more connections")
	default:
		r.ok("pooler", "a session of its own")
	}
	return r.list
}

// serverChecks are what package reconcile judges, with what is worse than a risk.
var serverChecks = []struct {
	name   string
	broken bool
}{{"recovery", true}, {"synchronous_commit", true}, {"fsync", false}, {"full_page_writes", false}}

func (r *rows) serverSettings(p probe.Postgres) {
	if p.SettingsErr != nil {
		r.unread("settings", p.SettingsErr, "see whether the login may connect")
		return
	}
	issues := map[string]reconcile.EnvironmentIssue{}
	for _, i := range reconcile.JudgePostgres(p.Settings) {
		issues[strings.TrimPrefix(i.Subject, "postgres ")] = i
	}
	fine := map[string]string{
		"recovery": "it is the primary", "synchronous_commit": p.Settings.SynchronousCommit, "fsync": p.Settings.Fsync, "full_page_writes": p.Settings.FullPageWrites,
	}
	for _, check := range serverChecks {
		issue, bad := issues[check.name]
		state := Warning
		if check.broken {
			state = Broken
		}
		r.judge(check.name, !bad, fine[check.name], state, strings.TrimPrefix(issue.Message, "postgres: "), issue.Remedy)
	}
}

// schema judges the schema, without which nothing that lies in it can be.
func (r *rows) schema(p probe.Postgres) bool {
	r.judge("schema", p.SchemaErr == nil, "the one that this release knows", Broken, fmt.Sprint(p.SchemaErr),
		"run `reconciler migrate up`, or use the release that belongs to the schema")
	return p.SchemaErr == nil
}

func (r *rows) fence(p probe.Postgres) {
	const remedy = "run seckill.install_order_fence and seckill.backfill_order_fence (docs/adopting.md)"
	switch {
	case p.FenceErr != nil && p.Settings.InRecovery:
		r.add("order-fence", Broken, "not to be judged on a standby", "name the primary in postgres.url")
	case p.FenceErr != nil:
		r.unread("order-fence", p.FenceErr, "see `reconciler migrate status`")
	case len(p.FenceProblems) > 0:
		r.add("order-fence", Broken, "nothing is released: "+strings.Join(p.FenceProblems, "; "), remedy)
	default:
		r.ok("order-fence", "installed, enabled and back-filled on every order table")
	}
}

func (r *rows) plans(p probe.Postgres) {
	if p.ScansErr != nil {
		r.unread("evidence-indexes", p.ScansErr, "see that the login may read seckill.order_evidence (docs/adopting.md)")
		return
	}
	var parts []string
	for _, s := range p.Scans {
		parts = append(parts, fmt.Sprintf("the query for %s reads %s whole", s.Query, s.Table))
	}
	r.judge("evidence-indexes", len(parts) == 0, "every evidence query has its index", Warning, strings.Join(parts, "; "),
		"make an index on the reservation id, and one that begins with activity and SKU")
}

var errNoServer = errors.New("no name server answered")
