package lifecycle

import (
	"cmp"
	"errors"
	"fmt"
	"io"
	"time"

	"go.yaml.in/yaml/v3"
)

// sale is a file of versions. What defaults say holds for every version that
// does not say otherwise.
type sale struct {
	Defaults entry   `yaml:"defaults"`
	Versions []entry `yaml:"versions"`
}

// entry is one version in a file.
type entry struct {
	Activity   string   `yaml:"activity"`
	SKU        string   `yaml:"sku"`
	Version    *int64   `yaml:"version"`
	Total      *int64   `yaml:"total"`
	Buckets    *int64   `yaml:"buckets"`
	Starts     *Instant `yaml:"starts"`
	Ends       *Instant `yaml:"ends"`
	Retention  *string  `yaml:"retention"`
	AllowSmall *bool    `yaml:"allow_small"`
}

// ReadFile reads the descriptions of versions from YAML:
//
//	defaults: {activity: "10001", version: 7, starts: 2026-11-11T00:00:00Z, ends: 2026-11-11T02:00:00Z}
//	versions:
//	  - {sku: "88001", total: 10000, buckets: 4}
//	  - {sku: "88002", total: 500}
//
// The keys are those of the flags of `scope create`. A key that is not known
// and one that is missing are errors that name the version.
func ReadFile(r io.Reader) ([]Spec, error) {
	decoder := yaml.NewDecoder(r)
	decoder.KnownFields(true)
	var file sale
	if err := decoder.Decode(&file); err != nil && !errors.Is(err, io.EOF) {
		return nil, fmt.Errorf("read the versions: %w", err)
	}
	if len(file.Versions) == 0 {
		return nil, errors.New("read the versions: the list `versions` is empty or missing")
	}
	specs := make([]Spec, len(file.Versions))
	var errs []error
	for i, e := range file.Versions {
		var err error
		if specs[i], err = e.over(file.Defaults).spec(); err != nil {
			errs = append(errs, fmt.Errorf("versions[%d]: %w", i, err))
		}
	}
	return specs, errors.Join(errs...)
}

// over is the entry, with what it does not say taken from the defaults.
func (e entry) over(d entry) entry {
	return entry{
		Activity: cmp.Or(e.Activity, d.Activity), SKU: cmp.Or(e.SKU, d.SKU), Version: cmp.Or(e.Version, d.Version), Total: cmp.Or(e.Total, d.Total),
		Buckets: cmp.Or(e.Buckets, d.Buckets), Starts: cmp.Or(e.Starts, d.Starts), Ends: cmp.Or(e.Ends, d.Ends),
		Retention: cmp.Or(e.Retention, d.Retention), AllowSmall: cmp.Or(e.AllowSmall, d.AllowSmall),
	}
}

func (e entry) spec() (Spec, error) {
	var errs []error
	for _, required := range []struct {
		key   string
		given bool
	}{
		{"activity", e.Activity != ""},
		{"sku", e.SKU != ""},
		{"version", e.Version != nil},
		{"total", e.Total != nil},
		{"starts", e.Starts != nil},
		{"ends", e.Ends != nil},
	} {
		if !required.given {
			errs = append(errs, fmt.Errorf("%s is missing", required.key))
		}
	}
	retention := DefaultRetention
	if e.Retention != nil {
		var err error
		if retention, err = time.ParseDuration(*e.Retention); err != nil {
			errs = append(errs, fmt.Errorf("retention: want 168h: %w", err))
		}
	}
	if err := errors.Join(errs...); err != nil {
		return Spec{}, err
	}
	return Spec{
		ActivityID: e.Activity, SKUID: e.SKU, Version: *e.Version, Total: *e.Total, Buckets: *cmp.Or(e.Buckets, new(int64(1))),
		StartsAt: e.Starts.At, EndsAt: e.Ends.At, StartsRelative: e.Starts.Relative, EndsRelative: e.Ends.Relative,
		Retention: retention, AllowSmall: *cmp.Or(e.AllowSmall, new(bool)),
	}, nil
}
