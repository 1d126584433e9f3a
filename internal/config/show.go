package config

import (
	"fmt"
	"net/url"
	"reflect"
	"regexp"
	"strings"
	"time"
)

// masked stands for a secret.
const masked = "********"

// Setting is one setting as it is shown to people. It holds no secret.
type Setting struct {
	Key string `json:"key"`
	// Value is text as it would be written in the environment, masked where it
	// is or contains a secret.
	Value string `json:"value"`
	// Origin is the file, the environment variable or the flag that the value
	// comes from, "" for a default.
	Origin string `json:"origin,omitempty"`
}

// Settings lists every setting in the order of config.yaml, secrets masked.
func (l Loaded) Settings() []Setting {
	v := reflect.ValueOf(l.Config)
	out := make([]Setting, 0, len(fields))
	for _, f := range fields {
		value := format(v.FieldByIndex(f.index).Interface())
		out = append(out, Setting{Key: f.path, Value: f.secret.mask(value), Origin: l.origins[f.path]})
	}
	return out
}

func format(value any) string {
	switch x := value.(type) {
	case time.Duration:
		return FormatDuration(x)
	case []string:
		return strings.Join(x, ",")
	default:
		return fmt.Sprint(x)
	}
}

// passwordWord finds the passwords of a keyword=value connection string.
var passwordWord = regexp.MustCompile(`(?i)\b((?:ssl)?password\s*=\s*)('(?:[^'\\]|\\.)*'|\S+)`)

// mask hides what is secret of a value.
func (s secrecy) mask(value string) string {
	switch {
	case s == public || value == "":
		return value
	case s == secretText:
		return masked
	default:
		return maskConnection(value)
	}
}

// maskConnection hides the passwords only, as the rest helps to find a
// mistake; what is not understood is hidden whole.
func maskConnection(text string) string {
	if strings.Contains(text, "://") {
		return maskURL(text)
	}
	if !strings.Contains(text, "=") {
		return masked
	}
	return passwordWord.ReplaceAllString(text, "${1}"+masked)
}

func maskURL(text string) string {
	u, err := url.Parse(text)
	if err != nil || u.Host == "" {
		return masked
	}
	if u.Fragment != "" || strings.Contains(u.Path+u.RawQuery, "@") {
		return masked // a password with an unescaped /, ? or #, of which the rest is read as something else
	}
	query := u.Query()
	for name := range query {
		if strings.Contains(strings.ToLower(name), "password") {
			query.Set(name, masked)
		}
	}
	if _, given := u.User.Password(); given {
		u.User = url.UserPassword(u.User.Username(), masked)
	}
	u.RawQuery = query.Encode()
	return u.String()
}

// redact takes every password of a connection string out of a message.
func redact(message, connString string) string {
	for _, m := range passwordWord.FindAllStringSubmatch(connString, -1) {
		message = strings.ReplaceAll(message, strings.Trim(m[2], "'"), masked)
	}
	if u, err := url.Parse(connString); err == nil && u.User != nil {
		if password, ok := u.User.Password(); ok && password != "" {
			message = strings.ReplaceAll(message, password, masked)
		}
	}
	return strings.ReplaceAll(message, connString, maskConnection(connString))
}
