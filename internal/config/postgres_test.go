package config

import (
	"testing"
	"time"

	"github.com/jackc/pgx/v5/pgconn"
)

func TestConnectTimeout(t *testing.T) {
	for text, want := range map[string]time.Duration{
		"postgres://u:p%40@db:5433/s?sslmode=disable":     2 * time.Second, // 1.5 s rounded up
		"postgres://db/s?connect_timeout=9":               9 * time.Second,
		"host=db port=5433 user=u password='p@' dbname=s": 2 * time.Second,
		"host=db connect_timeout=9":                       9 * time.Second,
	} {
		p := Postgres{URL: text, ConnectTimeout: 1500 * time.Millisecond}
		for _, got := range []string{p.ConnString(), p.MigrateString()} {
			c, err := pgconn.ParseConfig(got)
			if err != nil {
				t.Fatalf("%s: %v", got, err)
			}
			if c.ConnectTimeout != want || c.Host != "db" {
				t.Errorf("%s: connect timeout %s, want %s", got, c.ConnectTimeout, want)
			}
			if c.User == "u" && (c.Password != "p@" || c.Port != 5433) {
				t.Errorf("%s: the rest has changed", got)
			}
		}
	}
	p := Postgres{URL: "host=a", MigrateURL: "host=b", ConnectTimeout: time.Millisecond}
	if p.MigrateString() != "host=b connect_timeout=1" {
		t.Error(p.MigrateString())
	}
}
