package config

import (
	"cmp"
	"net/url"
	"strconv"
	"strings"
	"time"
)

// ConnString is url, bounded by connect_timeout unless it says a time itself.
func (p Postgres) ConnString() string { return withConnectTimeout(p.URL, p.ConnectTimeout) }

// MigrateString is the same for migrate_url, or for url where there is none.
func (p Postgres) MigrateString() string {
	return withConnectTimeout(cmp.Or(p.MigrateURL, p.URL), p.ConnectTimeout)
}

// withConnectTimeout adds libpq's connect_timeout, which has whole seconds.
func withConnectTimeout(text string, timeout time.Duration) string {
	if strings.Contains(text, "connect_timeout") {
		return text
	}
	seconds := strconv.Itoa(max(1, int((timeout+time.Second-1)/time.Second)))
	if !strings.Contains(text, "://") {
		return text + " connect_timeout=" + seconds
	}
	u, err := url.Parse(text)
	if err != nil {
		return text // Validate has refused it
	}
	query := u.Query()
	query.Set("connect_timeout", seconds)
	u.RawQuery = query.Encode()
	return u.String()
}
