package main

import (
	"encoding/json"
	"fmt"
	"slices"
	"strings"
	"time"

	"github.com/jedib0t/go-pretty/v6/table"
	"github.com/spf13/cobra"

	"github.com/seckill/reconciler/internal/tabular"
)

// choice is a flag that is one of a few words.
type choice struct {
	value   string
	accepts []string
}

func (c *choice) String() string { return c.value }
func (c *choice) Type() string   { return strings.Join(c.accepts, "|") }
func (c *choice) Set(s string) error {
	if !slices.Contains(c.accepts, s) {
		return fmt.Errorf("want %s", strings.Join(c.accepts, ", "))
	}
	c.value = s
	return nil
}

// result is what a command prints: one value, as people or programs read it.
type result struct {
	a      *app
	format choice
}

// outputFlag adds --output table|json.
func outputFlag(a *app, cmd *cobra.Command) *result {
	r := &result{a: a, format: choice{value: "table", accepts: []string{"table", "json"}}}
	cmd.Flags().VarP(&r.format, "output", "o", "how the result is printed")
	return r
}

// print writes value as JSON, or what human makes of it.
func (r *result) print(value any, human func() error) error {
	if r.format.value != "json" {
		return human()
	}
	enc := json.NewEncoder(r.a.stdout)
	enc.SetIndent("", "  ")
	enc.SetEscapeHTML(false)
	if err := enc.Encode(value); err != nil {
		return fmt.Errorf("write the result: %w", err)
	}
	return nil
}

// table writes rows below a header; without rows it says what there is none of.
func (r *result) table(none string, header table.Row, rows []table.Row) error {
	return tableTo(r.line, none, header, rows)
}

// tableTo is [result.table] to where line writes.
func tableTo(line func(format string, args ...any) error, none string, header table.Row, rows []table.Row) error {
	if len(rows) == 0 {
		return line("%s", none)
	}
	return line("%s", tabular.Render(header, rows))
}

func (r *result) line(format string, args ...any) error {
	if _, err := fmt.Fprintf(r.a.stdout, format+"\n", args...); err != nil {
		return fmt.Errorf("write the result: %w", err)
	}
	return nil
}

// stamp is a time as people read it; "-" for none.
func stamp(t time.Time) string {
	if t.IsZero() {
		return "-"
	}
	return t.UTC().Format(time.RFC3339)
}

// orDash is text that may be empty.
func orDash(s string) string {
	if s == "" {
		return "-"
	}
	return s
}

func yesNo(b bool) string {
	if b {
		return "yes"
	}
	return "no"
}
