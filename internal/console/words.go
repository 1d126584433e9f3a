package console

import (
	"encoding/json"
	"fmt"
	"html/template"
	"net/http"
	"strconv"
	"time"

	"github.com/nicksnyder/go-i18n/v2/i18n"
	"golang.org/x/text/language"
)

// languages are those of the pages, the first one where nothing fits.
var languages = []language.Tag{language.English, language.SimplifiedChinese}

var matcher = language.NewMatcher(languages)

// words is every sentence of the pages in every language.
type words struct{ bundle *i18n.Bundle }

func loadWords() (words, error) {
	bundle := i18n.NewBundle(language.English)
	bundle.RegisterUnmarshalFunc("json", json.Unmarshal)
	for _, name := range []string{"locales/en.json", "locales/zh-Hans.json"} {
		if _, err := bundle.LoadMessageFileFS(files, name); err != nil {
			return words{}, fmt.Errorf("read %s: %w", name, err)
		}
	}
	return words{bundle}, nil
}

// speech is the words of one language.
type speech struct {
	lang string
	say  *i18n.Localizer
}

// in is the words in the language that fits best to what is accepted.
func (w words) in(accepted string) speech {
	tag, _ := language.MatchStrings(matcher, accepted)
	base, script := "en", ""
	if b, _ := tag.Base(); b.String() == "zh" {
		base, script = "zh", "-Hans"
	}
	return speech{lang: base + script, say: i18n.NewLocalizer(w.bundle, base+script)}
}

// languageCookie holds the language that a person chose.
const languageCookie = "reconciler_language"

func chosenLanguage(r *http.Request) string {
	accepted := r.Header.Get("Accept-Language")
	if c, err := r.Cookie(languageCookie); err == nil && (c.Value == "en" || c.Value == "zh-Hans") {
		return c.Value + "," + accepted
	}
	return accepted
}

// word is a sentence by its name; count chooses its plural.
func (s speech) word(id string, count ...int) (string, error) {
	c := &i18n.LocalizeConfig{MessageID: id}
	if len(count) > 0 {
		c.PluralCount = count[0]
		c.TemplateData = map[string]int{"Count": count[0]}
	}
	return s.say.Localize(c)
}

// functions are those that templates call.
func functions(s speech) template.FuncMap {
	return template.FuncMap{
		"t":     s.word,
		"state": func(kind, name string) string { return s.orItself(kind+"_"+name, name) },
		"stamp": stamp,
		"when":  stampOf,
		"ago":   duration,
		"num":   number,
		"maybe": maybe,
		"text":  func(v any) string { return fmt.Sprint(v) },
		"jobs": func(rows []jobRow, changes bool, token string) map[string]any {
			return map[string]any{"Jobs": rows, "Changes": changes, "FormToken": token}
		},
	}
}

// orItself is the word of that name, or the text where there is none: names that
// other programs give have no translation.
func (s speech) orItself(id, text string) string {
	word, err := s.word(id)
	if err != nil {
		return text
	}
	return word
}

// must is a word that is there: a test makes sure that every language has all.
func (s speech) must(id string) string { return s.orItself(id, id) }

// maybe is a number that may not have been read.
func maybe(n *int64) string {
	if n == nil {
		return "–"
	}
	return number(*n)
}

func stamp(t time.Time) string {
	if t.IsZero() {
		return "–"
	}
	return t.UTC().Format("2006-01-02 15:04:05")
}

func stampOf(t *time.Time) string {
	if t == nil {
		return "–"
	}
	return stamp(*t)
}

// duration is so exact as a person needs it.
func duration(seconds float64) string {
	d := time.Duration(seconds * float64(time.Second))
	switch {
	case d <= 0:
		return "–"
	case d < 10*time.Second:
		return strconv.FormatFloat(d.Seconds(), 'f', 1, 64) + " s"
	case d < 2*time.Minute:
		return strconv.Itoa(int(d.Seconds())) + " s"
	case d < 2*time.Hour:
		return strconv.Itoa(int(d.Minutes())) + " min"
	case d < 48*time.Hour:
		return strconv.Itoa(int(d.Hours())) + " h"
	default:
		return strconv.Itoa(int(d.Hours()/24)) + " d"
	}
}

// number groups the digits of large numbers.
func number(n int64) string {
	text := strconv.FormatInt(n, 10)
	digits := len(text)
	if n < 0 {
		digits--
	}
	for i := len(text) - 3; digits > 3; i, digits = i-3, digits-3 {
		text = text[:i] + "\u202f" + text[i:]
	}
	return text
}
