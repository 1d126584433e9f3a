package stacktest

import (
	"context"
	"testing"
	"time"

	"github.com/seckill/reconciler/internal/devstack"
)

// installLimit bounds the first installation of a browser.
const installLimit = 10 * time.Minute

// Browser is the path of Chromium and the script of axe-core, both installed if
// they are missing.
func Browser(tb testing.TB) (chromium, axe string) {
	tb.Helper()
	ctx, cancel := context.WithTimeout(tb.Context(), installLimit)
	defer cancel()
	in, err := devstack.NewInstaller("", tb.Output())
	if err != nil {
		tb.Fatal(err)
	}
	if chromium, err = in.EnsureBrowser(ctx); err != nil {
		tb.Fatal(err)
	}
	script, err := in.EnsureAxe(ctx)
	if err != nil {
		tb.Fatal(err)
	}
	return chromium, string(script)
}
