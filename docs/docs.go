// Package docs holds the documentation that the program itself gives out.
package docs

import _ "embed" // the schema

// ReportSchema is the JSON Schema (draft 2020-12) of a reconciliation's report.
//
//go:embed report.schema.json
var ReportSchema []byte
