package main

import (
	"context"
	"fmt"
	"log/slog"
	"os"
	"strings"
	"sync"
	"time"

	"github.com/jedib0t/go-pretty/v6/table"
	"github.com/jedib0t/go-pretty/v6/text"
	"github.com/spf13/cobra"

	"github.com/seckill/reconciler/internal/config"
	"github.com/seckill/reconciler/internal/doctor"
	"github.com/seckill/reconciler/internal/pgstore"
	"github.com/seckill/reconciler/internal/probe"
	"github.com/seckill/reconciler/internal/redisstore"
	"github.com/seckill/reconciler/internal/rocketmq"
	"github.com/seckill/reconciler/migrations"
	"github.com/seckill/reconciler/reservation"
)

func newDoctor(a *app) *cobra.Command {
	var limit time.Duration
	var all bool
	cmd := &cobra.Command{
		Use:   "doctor",
		Short: "Examine Redis, PostgreSQL and RocketMQ, and say what to put right",
		Long: `Asks every Redis server, PostgreSQL, every name server and broker how it is set up,
and says of each thing whether it is ok, a risk (warning) or broken, why, and what to
do. It changes nothing and uses neither SCAN nor MONITOR.

Exit status: 0 nothing is broken, 1 something is, 3 something could not be read.`,
		Example: "  reconciler doctor\n  reconciler doctor --all --output json",
		Args:    args(),
	}
	cmd.Flags().DurationVar(&limit, "limit", 20*time.Second, "longest time of the whole examination")
	cmd.Flags().BoolVar(&all, "all", false, "show what is ok too (JSON always does)")
	out := outputFlag(a, cmd)
	cmd.RunE = func(cmd *cobra.Command, _ []string) error {
		loaded, err := a.settings(cmd)
		if err != nil {
			return err
		}
		ctx, cancel := context.WithTimeout(cmd.Context(), limit)
		defer cancel()
		report := examine(ctx, loaded.Config)
		if err := printExamination(out, report, all); err != nil {
			return err
		}
		switch {
		case report.Unread > 0:
			return &verdict{exitIncomplete, fmt.Errorf("%d things could not be read", report.Unread)}
		case report.Summary[doctor.Broken] > 0:
			return &verdict{exitFailed, fmt.Errorf("%d things are broken", report.Summary[doctor.Broken])}
		}
		return nil
	}
	return cmd
}

// examine asks all services side by side: one that hangs holds up no other.
func examine(ctx context.Context, c config.Config) doctor.Report {
	report := doctor.Report{StartedAt: time.Now().UTC()}
	redisstore.RouteLibraryLog(slog.Default())
	var nodes []probe.RedisNode
	var nodesErr error
	var keys []doctor.Row
	var postgres probe.Postgres
	var messages probe.RocketMQ
	var messagesErr error
	var asking sync.WaitGroup
	asking.Go(func() { nodes, nodesErr = examineRedis(ctx, c.Redis) })
	asking.Go(func() { postgres, keys = examinePostgres(ctx, c) })
	asking.Go(func() { messages, messagesErr = examineRocketMQ(ctx, c.RocketMQ) })
	asking.Wait()

	report.Rows = append(report.Rows, doctor.Redis(nodes, time.Now())...)
	report.Rows = append(report.Rows, keys...)
	report.Rows = append(report.Rows, doctor.Postgres(postgres)...)
	report.Rows = append(report.Rows, doctor.RocketMQ(messages, doctor.Messaging{
		Topic: c.RocketMQ.Topic, Group: c.RocketMQ.ConsumerGroup, Tag: c.RocketMQ.Tag, Pop: c.RocketMQ.ConsumerProtocol == config.ProtocolPop,
		ClaimsAfter: c.Purge.ClaimsAfter, DeadLetterAfter: c.Fencer.DeadLetterAfter, SweepMargin: c.RocketMQ.SweepMargin,
		Known: postgres.Brokers,
	})...)
	report.Rows = append(report.Rows, doctor.Clocks(nodes, postgres, messages, c.RocketMQ.SweepMargin)...)
	for area, err := range map[string]error{doctor.AreaRedis: nodesErr, doctor.AreaRocketMQ: messagesErr} {
		if err != nil {
			report.Rows = append(report.Rows, doctor.Row{
				Area: area, Check: "settings", State: doctor.Broken, Why: err.Error(), Remedy: "correct the settings: see `reconciler config check`", Unread: true,
			})
		}
	}
	report.FinishedAt = time.Now().UTC()
	report.Complete()
	return report
}

func examineRedis(ctx context.Context, c config.Redis) ([]probe.RedisNode, error) {
	prober, err := redisstore.NewProber(c)
	if err != nil {
		return nil, err
	}
	defer func() { _ = prober.Close() }() // nothing is in flight
	return prober.Nodes(ctx, redisstore.Full), nil
}

// examinePostgres asks PostgreSQL, which also knows the scopes whose keys are
// measured.
func examinePostgres(ctx context.Context, c config.Config) (probe.Postgres, []doctor.Row) {
	p := c.Postgres
	store, err := pgstore.Open(ctx, pgstore.Config{
		URL: p.URL, MaxConns: p.MaxConns, ConnectTimeout: p.ConnectTimeout, StatementTimeout: p.StatementTimeout, ApplicationName: "reconciler-doctor",
	})
	if err != nil {
		return probe.Postgres{Err: err}, nil
	}
	defer store.Close()
	found := store.Examine(ctx, p.URL, c.RocketMQ.Topic, p.ConnectTimeout)
	if found.Err != nil {
		return found, nil
	}
	found.SchemaErr = migrations.Check(ctx, store.Pool())
	if found.SchemaErr != nil {
		return found, nil
	}
	return found, examineKeys(ctx, c.Redis, store)
}

// Looks at the keys are a second apart, so that they show how hot a slot is.
const (
	heatInterval = time.Second
	keysAtOnce   = 8
	mostScopes   = 200 // measured by doctor; the daemon's metrics cover all in turn
)

// examineKeys measures the keys of the live scopes, twice.
func examineKeys(ctx context.Context, c config.Redis, registry *pgstore.Store) []doctor.Row {
	unread := func(err error) []doctor.Row {
		return []doctor.Row{{
			Area: doctor.AreaKeys, Check: "scopes", State: doctor.Broken, Why: "could not be read: " + err.Error(), Unread: true,
			Remedy: "see the rows of Redis and PostgreSQL",
		}}
	}
	registered, err := registry.Scopes(ctx, pgstore.ScopeFilter{Live: true})
	if err != nil {
		return unread(err)
	}
	scopes := make([]reservation.Scope, 0, len(registered))
	for _, r := range registered[:min(len(registered), mostScopes)] {
		scopes = append(scopes, r.Scope)
	}
	clients, err := redisstore.Open(ctx, c)
	if err != nil {
		return unread(err)
	}
	defer func() { _ = clients.Close() }() // nothing is in flight
	store, err := redisstore.New(clients, c.CommandTimeout)
	if err != nil {
		return unread(err)
	}
	began := time.Now()
	first := measureKeys(ctx, store, scopes)
	if len(scopes) > 0 {
		timer := time.NewTimer(heatInterval - time.Since(began))
		defer timer.Stop()
		select {
		case <-ctx.Done():
		case <-timer.C:
		}
	}
	second := measureKeys(ctx, store, scopes)
	rates := make([]float64, len(scopes))
	for i := range second {
		rates[i] = second[i].RequestRate(first[i])
	}
	return doctor.Keys(second, rates)
}

func measureKeys(ctx context.Context, store *redisstore.Store, scopes []reservation.Scope) []probe.KeySizes {
	sizes := make([]probe.KeySizes, 0, len(scopes))
	for begin := 0; begin < len(scopes); begin += keysAtOnce {
		sizes = append(sizes, store.KeySizes(ctx, scopes[begin:min(begin+keysAtOnce, len(scopes))])...)
	}
	return sizes
}

func examineRocketMQ(ctx context.Context, c config.RocketMQ) (probe.RocketMQ, error) {
	mq, err := rocketmq.FromSettings(c)
	if err != nil {
		return probe.RocketMQ{}, err
	}
	evidence, err := rocketmq.NewEvidence(mq, nil, slog.Default())
	if err != nil {
		return probe.RocketMQ{}, err
	}
	defer evidence.Close()
	return evidence.Examine(ctx), nil
}

// printExamination writes the rows; what is ok only if all are wanted.
func printExamination(out *result, report doctor.Report, all bool) error {
	return out.print(report, func() error {
		coloured := os.Getenv("NO_COLOR") == "" && isTerminal(out.a.stdout)
		var rows []table.Row
		for _, r := range report.Rows {
			if r.State != doctor.OK || all {
				rows = append(rows, table.Row{paint(r.State, coloured), r.Area, orDash(r.Subject), r.Check, wrapped(r.Why), wrapped(orDash(r.Remedy))})
			}
		}
		if err := out.table("nothing is broken, and there is no warning", table.Row{"STATE", "AREA", "SUBJECT", "CHECK", "WHY", "REMEDY"}, rows); err != nil {
			return err
		}
		return out.line("\n%d ok, %d warnings, %d broken (%d of them could not be read)",
			report.Summary[doctor.OK], report.Summary[doctor.Warning], report.Summary[doctor.Broken], report.Unread)
	})
}

// columnWidth is how wide a column of prose gets.
const columnWidth = 60

func wrapped(s string) string { return text.WrapSoft(strings.ReplaceAll(s, "\n", " "), columnWidth) }

// paint colours a state, on terminals only.
func paint(s doctor.State, coloured bool) string {
	colour := map[doctor.State]text.Color{doctor.OK: text.FgGreen, doctor.Warning: text.FgYellow, doctor.Broken: text.FgRed}[s]
	if !coloured {
		return string(s)
	}
	return text.Colors{colour}.EscapeSeq() + string(s) + text.Reset.EscapeSeq()
}
