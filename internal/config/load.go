package config

import (
	"errors"
	"fmt"
	"io/fs"
	"maps"
	"os"
	"reflect"
	"slices"
	"strconv"
	"strings"
	"time"

	"github.com/go-viper/mapstructure/v2"
	"github.com/knadh/koanf/parsers/yaml"
	"github.com/knadh/koanf/providers/confmap"
	"github.com/knadh/koanf/providers/env/v2"
	"github.com/knadh/koanf/providers/file"
	"github.com/knadh/koanf/v2"
)

const delim = "."

// DefaultFiles are the files that are looked for, in this order, when none is
// named (interface §7).
var DefaultFiles = []string{"config.yaml", "/etc/reconciler/config.yaml"}

// Options says where settings come from.
type Options struct {
	// File is the file to read. It must exist. "" reads the first of Search
	// that exists, or none.
	File string
	// Search is where a file is looked for; nil means [DefaultFiles].
	Search []string
	// Environ is the environment as name=value; nil means the process's own.
	Environ []string
	// Flags are the settings given on the command line: path → value.
	Flags map[string]string
}

// Loaded is the settings in force and where each came from.
type Loaded struct {
	Config Config
	// File is the file that was read, "" if there is none.
	File    string
	origins map[string]string // path → file, variable or flag; absent: the default
}

// Load reads and validates the settings. Its error joins everything that is
// wrong, one line each.
func Load(opts Options) (Loaded, error) {
	l := loader{
		tree:    koanf.New(delim),
		known:   names(),
		origins: map[string]string{},
	}
	name, err := findFile(opts)
	if err != nil {
		return Loaded{}, err
	}
	if name != "" {
		if err := l.addFile(name); err != nil {
			return Loaded{}, err
		}
	}
	l.addEnvironment(opts.Environ)
	l.addFlags(opts.Flags)
	if err := errors.Join(l.errs...); err != nil {
		return Loaded{}, err
	}
	cfg, err := l.decode()
	if err != nil {
		return Loaded{}, err
	}
	if err := cfg.Validate(); err != nil {
		return Loaded{}, err
	}
	return Loaded{Config: cfg, File: name, origins: l.origins}, nil
}

// findFile returns the file to read, "" if none was named and none is found.
func findFile(opts Options) (string, error) {
	if opts.File != "" {
		if _, err := os.Stat(opts.File); err != nil {
			return "", fmt.Errorf("configuration file %s: %w", opts.File, pathCause(err))
		}
		return opts.File, nil
	}
	search := opts.Search
	if search == nil {
		search = DefaultFiles
	}
	for _, name := range search {
		_, err := os.Stat(name)
		if errors.Is(err, fs.ErrNotExist) {
			continue
		}
		if err != nil {
			return "", fmt.Errorf("configuration file %s: %w", name, pathCause(err))
		}
		return name, nil
	}
	return "", nil
}

// pathCause drops the operation and path that the caller's message has already.
func pathCause(err error) error {
	if pe, ok := errors.AsType[*fs.PathError](err); ok {
		return pe.Err
	}
	return err
}

// loader gathers the layers.
type loader struct {
	tree    *koanf.Koanf
	known   map[string]string // path or variable → path
	origins map[string]string
	errs    []error
}

func (l *loader) failf(format string, args ...any) {
	l.errs = append(l.errs, fmt.Errorf(format, args...))
}

// addFile reads the YAML file. A key without a value leaves the default.
func (l *loader) addFile(name string) error {
	layer := koanf.New(delim)
	if err := layer.Load(file.Provider(name), yaml.Parser()); err != nil {
		return fmt.Errorf("configuration file %s: %w", name, pathCause(err))
	}
	values := map[string]any{}
	for key, value := range layer.All() {
		path, ok := l.known[key]
		switch {
		case ok && path == key:
			if value != nil {
				values[key] = value
			}
		case isSection(key):
			if value != nil && !isEmptyMap(value) {
				l.failf("%s: %s: is a section, not a setting", name, key)
			}
		default:
			l.unknown(name+": "+key, key, false)
		}
	}
	l.add(values, func(string) string { return name })
	return nil
}

func isSection(key string) bool {
	return slices.ContainsFunc(fields, func(f field) bool { return strings.HasPrefix(f.path, key+delim) })
}

func isEmptyMap(v any) bool {
	m, ok := v.(map[string]any)
	return ok && len(m) == 0
}

// addEnvironment reads RECONCILER_*. A variable without a value leaves the
// default, but for a text, which it makes empty.
func (l *loader) addEnvironment(environ []string) {
	values, variables := map[string]any{}, map[string]string{}
	provider := env.Provider("", env.Opt{
		Prefix:      envPrefix,
		EnvironFunc: func() []string { return orEnviron(environ) },
		TransformFunc: func(name, value string) (string, any) {
			path, ok := l.known[name]
			if !ok || path == name {
				l.unknown(name, name, true)
				return "", nil
			}
			if value == "" && !isText(path) {
				return "", nil
			}
			values[path], variables[path] = value, name
			return path, value
		},
	})
	if _, err := provider.Read(); err != nil {
		l.failf("environment: %w", err)
		return
	}
	l.add(values, func(path string) string { return variables[path] })
}

func orEnviron(environ []string) []string {
	if environ == nil {
		return os.Environ()
	}
	return environ
}

func isText(path string) bool {
	return slices.ContainsFunc(fields, func(f field) bool {
		return f.path == path && f.typ.Kind() == reflect.String
	})
}

// addFlags takes what the command line says; cobra has refused unknown flags.
func (l *loader) addFlags(flags map[string]string) {
	values := map[string]any{}
	for path, value := range flags {
		values[path] = value
	}
	l.add(values, flagName)
}

// flagName is the command-line flag of a path: --log-level for log.level.
func flagName(path string) string {
	return "--" + strings.NewReplacer(delim, "-", "_", "-").Replace(path)
}

// add merges one layer, after reading the files that its *_file names point to.
func (l *loader) add(values map[string]any, origin func(path string) string) {
	l.readSecrets(values, origin)
	for path := range values {
		if from := origin(path); from != "" { // else its *_file name is the origin
			l.origins[path] = from
		}
	}
	if err := l.tree.Load(confmap.Provider(values, delim), nil); err != nil {
		l.failf("merge settings: %w", err)
	}
}

// readSecrets replaces each <secret>_file by the secret it holds.
func (l *loader) readSecrets(values map[string]any, origin func(path string) string) {
	for _, f := range fields {
		at := f.path + fileSuffix
		name, given := values[at]
		if f.secret == public || !given {
			continue
		}
		delete(values, at)
		from := origin(at)
		text, ok := name.(string)
		switch _, both := values[f.path]; {
		case !ok:
			l.failf("%s: %s: want the name of a file", from, at)
		case text == "":
		case both:
			l.failf("%s: %s and %s are both given: give one", from, f.path, at)
		default:
			secret, err := os.ReadFile(text)
			if err != nil {
				l.failf("%s: %s: read %s: %w", from, at, text, pathCause(err))
				continue
			}
			values[f.path] = strings.TrimRight(string(secret), "\r\n")
			l.origins[f.path] = from
		}
	}
}

// unknown reports a name that is not a setting, and the one that was meant. A
// variable is reported with the path it would stand for.
func (l *loader) unknown(label, name string, variable bool) {
	var candidates []string
	for _, known := range slices.Sorted(maps.Keys(l.known)) {
		if strings.HasPrefix(known, envPrefix) == variable {
			candidates = append(candidates, known)
		}
	}
	hint := "`reconciler config show` lists all settings"
	if near := nearest(name, candidates); near != "" {
		hint = "did you mean " + near + "?"
		if variable {
			hint = "did you mean " + near + " (" + l.known[near] + ")?"
		}
	}
	l.failf("%s: unknown setting; %s", label, hint)
}

// decode lays the merged layers over the defaults. Unused is a second net: every
// layer has refused what it does not know.
func (l *loader) decode() (Config, error) {
	cfg := Default()
	var meta mapstructure.Metadata
	err := l.tree.UnmarshalWithConf("", &cfg, koanf.UnmarshalConf{DecoderConfig: &mapstructure.DecoderConfig{
		DecodeHook: mapstructure.DecodeHookFuncValue(convert),
		MatchName:  func(key, name string) bool { return key == name },
		Metadata:   &meta,
		TagName:    "koanf",
		ZeroFields: true, // a list replaces the default one instead of overwriting its head
	}})
	var errs []error
	for _, key := range meta.Unused {
		errs = append(errs, fmt.Errorf("%s: unknown setting", key))
	}
	for _, e := range leaves(err) {
		errs = append(errs, l.describe(e))
	}
	return cfg, errors.Join(errs...)
}

// leaves flattens joined errors.
func leaves(err error) []error {
	if err == nil {
		return nil
	}
	if de, ok := err.(*mapstructure.DecodeError); ok { //nolint:errorlint // a wrapped one is found by unwrapping below
		return []error{de}
	}
	if many, ok := err.(interface{ Unwrap() []error }); ok {
		var out []error
		for _, e := range many.Unwrap() {
			out = append(out, leaves(e)...)
		}
		return out
	}
	if inner := errors.Unwrap(err); inner != nil {
		return leaves(inner)
	}
	return []error{err}
}

// describe names a decoding error's path and where its value came from.
func (l *loader) describe(err error) error {
	de, ok := errors.AsType[*mapstructure.DecodeError](err)
	if !ok {
		return err
	}
	cause := de.Unwrap()
	path, _, _ := strings.Cut(de.Name(), "[")
	if from := l.origins[path]; from != "" {
		return fmt.Errorf("%s: %s: %w", from, de.Name(), cause)
	}
	return fmt.Errorf("%s: %w", de.Name(), cause)
}

// convert makes a setting's type from the text of a variable or flag, and
// refuses a value of another kind rather than guess. Its errors never contain
// the value, which may be a secret.
func convert(from, to reflect.Value) (any, error) {
	text, isText := reflect.TypeAssert[string](from)
	switch to.Interface().(type) {
	case time.Duration:
		d, err := time.ParseDuration(text)
		if !isText || err != nil {
			return nil, errors.New("want a duration with its unit, such as 300ms, 3s or 24h")
		}
		return d, nil
	case []string:
		if isText {
			return splitList(text), nil
		}
	case string:
		if !isText {
			return nil, errors.New("want a text: put the value in quotes")
		}
	case bool:
		if isText {
			b, err := strconv.ParseBool(text)
			return b, kindError(err, "true or false")
		}
	case int, int64:
		if isText {
			n, err := strconv.ParseInt(text, 10, 64)
			return n, kindError(err, "a whole number")
		}
		if !from.CanInt() {
			return nil, errors.New("want a whole number")
		}
	case float64:
		if isText {
			x, err := strconv.ParseFloat(text, 64)
			return x, kindError(err, "a number")
		}
	}
	return from.Interface(), nil
}

func kindError(err error, want string) error {
	if err != nil {
		return errors.New("want " + want)
	}
	return nil
}

// splitList reads a,b,c; blanks around the commas and empty parts do not count.
func splitList(text string) []string {
	out := []string{} // not nil, which would leave the default
	for part := range strings.SplitSeq(text, ",") {
		if part = strings.TrimSpace(part); part != "" {
			out = append(out, part)
		}
	}
	return out
}
