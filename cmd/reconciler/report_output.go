package main

import (
	"github.com/spf13/cobra"

	"github.com/seckill/reconciler/reconcile/render"
)

// reportFlag adds --output with the formats of a report.
func reportFlag(a *app, cmd *cobra.Command) *result {
	r := &result{a: a, format: choice{value: render.FormatTable, accepts: render.Formats()}}
	cmd.Flags().VarP(&r.format, "output", "o", "how the result is printed")
	return r
}
