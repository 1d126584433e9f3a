// Package reportfile keeps the reports of reconciliations as files, beside
// those in PostgreSQL: each one as JSON and as a page to look at, named after
// its run. A file is there as a whole or not at all, also after a crash.
package reportfile

import (
	"cmp"
	"errors"
	"fmt"
	"io"
	"io/fs"
	"os"
	"path/filepath"
	"regexp"
	"slices"
	"strings"
	"time"

	"github.com/seckill/reconciler/reconcile"
	"github.com/seckill/reconciler/reconcile/render"
)

// formats are what is written of each report, by the files' endings.
var formats = map[string]string{".json": render.FormatJSON, ".html": render.FormatHTML}

// ours is the name of a file that [Write] makes, or was making when it was cut
// off. The run's id begins with its time.
var ours = regexp.MustCompile(`^(?:reconcile-(\d{8}T\d{6}Z)-[a-z0-9]+\.(?:json|html)|\.reconcile-(\d{8}T\d{6}Z)-.*\.tmp)$`)

// Write writes a report into a directory that exists, and returns the files.
func Write(dir string, r *reconcile.Report) ([]string, error) {
	var files []string
	for _, ending := range []string{".json", ".html"} {
		name := "reconcile-" + r.RunID + ending
		if !ours.MatchString(name) {
			return files, fmt.Errorf("write the report into %s: %q is no run's id", dir, r.RunID)
		}
		file := filepath.Join(dir, name)
		err := Atomically(file, func(w io.Writer) error { return render.Write(w, formats[ending], r) })
		if err != nil {
			return files, err
		}
		files = append(files, file)
	}
	return files, nil
}

// Atomically writes a file by way of another one in the same directory, which
// takes its name when it is on the disk: whoever reads sees the old content or
// the new one. The file is its owner's alone.
func Atomically(file string, write func(io.Writer) error) error {
	dir, name := filepath.Split(file)
	dir = cmp.Or(dir, ".")
	action := "write " + file
	f, err := os.CreateTemp(dir, "."+strings.TrimPrefix(name, ".")+"-*.tmp")
	if err != nil {
		return fmt.Errorf("%s: %w", action, err)
	}
	err = write(f)
	if err == nil {
		err = f.Sync()
	}
	if err = errors.Join(err, f.Close()); err == nil {
		err = os.Rename(f.Name(), file)
	}
	if err != nil {
		return errors.Join(fmt.Errorf("%s: %w", action, err), os.Remove(f.Name()))
	}
	if err := syncDir(dir); err != nil {
		return fmt.Errorf("%s: %w", action, err)
	}
	return nil
}

// syncDir makes the new name last.
func syncDir(dir string) error {
	d, err := os.Open(dir)
	if err != nil {
		return err
	}
	return errors.Join(d.Sync(), d.Close())
}

// File is a report that lies in a directory.
type File struct {
	Path string
	At   time.Time // of its run
}

// Older lists the files of reports whose runs began before a time, the oldest
// first. What [Write] did not make is not among them.
func Older(dir string, before time.Time) ([]File, error) {
	entries, err := os.ReadDir(dir)
	if err != nil {
		return nil, fmt.Errorf("list the reports in %s: %w", dir, err)
	}
	var files []File
	for _, e := range entries {
		m := ours.FindStringSubmatch(e.Name())
		if m == nil || !e.Type().IsRegular() {
			continue
		}
		at, err := time.Parse("20060102T150405Z", cmp.Or(m[1], m[2]))
		if err == nil && at.Before(before) {
			files = append(files, File{filepath.Join(dir, e.Name()), at})
		}
	}
	slices.SortFunc(files, func(a, b File) int { return cmp.Or(a.At.Compare(b.At), cmp.Compare(a.Path, b.Path)) })
	return files, nil
}

// Remove removes a file; one that is gone already is no error.
func (f File) Remove() error {
	if err := os.Remove(f.Path); err != nil && !errors.Is(err, fs.ErrNotExist) {
		return fmt.Errorf("remove the report: %w", err)
	}
	return nil
}

// Archive is [Write] into dir, as what keeps each report; nil without a
// directory.
func Archive(dir string) func(*reconcile.Report) error {
	if dir == "" {
		return nil
	}
	return func(r *reconcile.Report) error {
		_, err := Write(dir, r)
		return err
	}
}
