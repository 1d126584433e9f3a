package config

import (
	"reflect"
	"slices"
	"strings"
	"time"
)

// envPrefix begins the name of every environment variable that is a setting.
const envPrefix = "RECONCILER_"

// fileSuffix turns the path of a secret into that of a file that holds it.
const fileSuffix = "_file"

// field is one setting: a leaf of [Config].
type field struct {
	path   string
	index  []int // for reflect.Value.FieldByIndex on a Config
	typ    reflect.Type
	oneOf  []string
	secret secrecy
	reload bool // a running daemon can take it over
}

// secrecy says what of a setting is secret.
type secrecy string

const (
	public           secrecy = ""
	secretText       secrecy = "text"       // all of it
	secretConnection secrecy = "connection" // the passwords in a connection string
)

func (f field) env() string { return envName(f.path) }

// envName is the environment variable of a path (interface §2).
func envName(path string) string {
	return envPrefix + strings.ToUpper(strings.ReplaceAll(path, ".", "_"))
}

// fields lists every setting in the order of the struct, which is the order of
// config.yaml.
var fields = walk(reflect.TypeFor[Config](), "", nil)

func walk(t reflect.Type, prefix string, index []int) []field {
	var out []field
	for i := range t.NumField() {
		sf := t.Field(i)
		at := append(slices.Clone(index), i)
		name, squash := strings.CutSuffix(sf.Tag.Get("koanf"), ",squash")
		switch {
		case squash:
			out = append(out, walk(sf.Type, prefix, at)...)
		case sf.Type.Kind() == reflect.Struct:
			out = append(out, walk(sf.Type, prefix+name+".", at)...)
		default:
			out = append(out, field{
				path:   prefix + name,
				index:  at,
				typ:    sf.Type,
				oneOf:  strings.Fields(sf.Tag.Get("oneof")),
				secret: secrecy(sf.Tag.Get("secret")),
				reload: sf.Tag.Get("reload") != "",
			})
		}
	}
	return out
}

// names maps every path and every environment variable that a setting may be
// given by, the *_file forms of secrets included, to the setting's path.
func names() map[string]string {
	m := make(map[string]string, 4*len(fields))
	for _, f := range fields {
		m[f.path], m[f.env()] = f.path, f.path
		if f.secret != public {
			m[f.path+fileSuffix], m[f.env()+strings.ToUpper(fileSuffix)] = f.path+fileSuffix, f.path+fileSuffix
		}
	}
	return m
}

// nearest is the known name that was most likely meant by an unknown one, or
// "" if none is near: at most two letters or a third of them differ.
func nearest(unknown string, known []string) string {
	best, least := "", max(2, len(unknown)/3)+1
	for _, k := range known {
		if d := distance(unknown, k); d < least {
			best, least = k, d
		}
	}
	return best
}

// distance is the number of letters to insert, delete or replace (Levenshtein).
func distance(a, b string) int {
	row := make([]int, len(b)+1)
	for j := range row {
		row[j] = j
	}
	for i := range len(a) {
		diagonal := row[0]
		row[0] = i + 1
		for j := range len(b) {
			cost := diagonal
			if a[i] != b[j] {
				cost++
			}
			diagonal = row[j+1]
			row[j+1] = min(cost, row[j]+1, row[j+1]+1)
		}
	}
	return row[len(b)]
}

// FormatDuration writes a duration as config.yaml does, 24h rather than 24h0m0s.
func FormatDuration(d time.Duration) string {
	s := d.String()
	if rest, ok := strings.CutSuffix(s, "m0s"); ok {
		s = rest + "m"
	}
	if rest, ok := strings.CutSuffix(s, "h0m"); ok {
		s = rest + "h"
	}
	return s
}
