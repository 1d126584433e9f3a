package devstack

import (
	"context"
	"errors"
	"fmt"
	"os"
	"os/exec"
	"path/filepath"
)

// axeVersion is that of axe-core, which finds mistakes in the accessibility of
// pages.
const axeVersion = "4.14.1"

// cjkFont is what Chinese pages are drawn with.
const cjkFont = "/usr/share/fonts/opentype/noto/NotoSansCJK-Regular.ttc"

// EnsureBrowser finds Chromium, and installs it and a Chinese font if they are
// missing.
func (in *Installer) EnsureBrowser(ctx context.Context) (path string, err error) {
	err = in.alone(ctx, func() error {
		var missing []string
		if !onPath("chromium")() {
			missing = append(missing, "chromium")
		}
		if !exists(cjkFont) {
			missing = append(missing, "fonts-noto-cjk")
		}
		if len(missing) > 0 {
			if err := in.aptInstall(ctx, missing); err != nil {
				return fmt.Errorf("install a browser: %w (to do it by hand: sudo apt-get install chromium fonts-noto-cjk)", err)
			}
		}
		path, err = exec.LookPath("chromium")
		return err
	})
	return path, err
}

// EnsureAxe fetches axe-core with npm and returns its script.
func (in *Installer) EnsureAxe(ctx context.Context) (script []byte, err error) {
	dir := filepath.Join(in.cache, "axe-core-"+axeVersion)
	file := filepath.Join(dir, "node_modules", "axe-core", "axe.min.js")
	err = in.alone(ctx, func() error {
		if script, err = os.ReadFile(file); !errors.Is(err, os.ErrNotExist) {
			return err
		}
		if !onPath("npm")() {
			if err := in.aptInstall(ctx, []string{"npm"}); err != nil {
				return err
			}
		}
		in.sayf("fetching axe-core %s", axeVersion)
		if err := os.MkdirAll(dir, 0o755); err != nil {
			return err
		}
		if err := in.run(ctx, dir, "", "npm", "install", "--prefix", dir, "--ignore-scripts", "--no-audit", "--no-fund", "axe-core@"+axeVersion); err != nil {
			return err
		}
		script, err = os.ReadFile(file)
		return err
	})
	if err != nil {
		return nil, fmt.Errorf("fetch axe-core: %w", err)
	}
	return script, nil
}
