// Package console is what people see of the daemon in a browser, and the API
// under /api/v1, which answers the JSON that the commands print.
//
// Pages are made on the server and work without scripts; one small script
// fetches a page's main part again while nobody is typing in it. Everything
// needs a token (package admin): one to read, another to change. A change is
// made in the name of the person who signed in, and goes into the audit trail
// like that of a command: pages and API call the same functions.
//
// Nothing that is shown is trusted: ids and messages come from other programs,
// and templates escape them. The pages load nothing from elsewhere, and their
// policy says so to the browser.
package console

import (
	"bytes"
	"context"
	"embed"
	"errors"
	"fmt"
	"html/template"
	"io/fs"
	"log/slog"
	"net/http"
	"slices"
	"strings"
	"time"

	"github.com/seckill/reconciler/internal/admin"
	"github.com/seckill/reconciler/internal/approval"
	"github.com/seckill/reconciler/internal/chart"
	"github.com/seckill/reconciler/internal/daemon"
	"github.com/seckill/reconciler/internal/observe"
	"github.com/seckill/reconciler/internal/pgstore"
)

//go:embed templates assets locales
var files embed.FS

// Options are what a console shows and who may see it.
type Options struct {
	Daemon *daemon.Daemon
	Auth   *admin.Auth
	Hasher observe.UserHasher // user ids are shown as hashes
	Log    *slog.Logger       // nil: [slog.Default]
}

// Console serves pages and API.
type Console struct {
	Options

	pages  map[string]*template.Template
	words  words
	assets http.Handler
}

// New prepares a console; [Console.Register] puts it on a server.
func New(o Options) (*Console, error) {
	if o.Log == nil {
		o.Log = slog.Default()
	}
	c := &Console{Options: o}
	var err error
	if c.words, err = loadWords(); err != nil {
		return nil, err
	}
	if c.pages, err = c.parse(); err != nil {
		return nil, err
	}
	assets, err := fs.Sub(files, "assets")
	if err != nil {
		return nil, err
	}
	c.assets = http.StripPrefix("/assets/", http.FileServerFS(assets))
	return c, nil
}

// Register adds the console's pages to a server.
func (c *Console) Register(s *admin.Server) {
	open := func(pattern string, h http.HandlerFunc) { s.Handle(pattern, c.secure(h)) }
	read := func(pattern string, h handler) {
		s.Handle(pattern, c.secure(c.Auth.Require(admin.RoleRead, c.handle(h), c.deny)))
	}
	change := func(pattern string, h handler) {
		s.Handle(pattern, c.secure(c.Auth.Require(admin.RoleChange, c.handle(h), c.deny)))
	}
	open("GET /assets/", c.serveAsset)
	open("GET /login", c.loginPage)
	open("POST /login", c.login)
	open("POST /logout", c.logout)
	open("POST /language", c.language)

	read("GET /{$}", c.overview)
	read("GET /scopes/{activity}/{sku}/{version}", c.version)
	read("GET /reservations", c.reservations)
	read("POST /reservations", c.search)
	read("GET /tasks", c.tasks)
	read("GET /tasks/{id}", c.task)
	read("GET /reports", c.reports)
	read("GET /reports/{id}", c.report)
	read("GET /reports/{id}/download", c.download)
	read("GET /jobs", c.jobs)
	change("POST /scopes/{activity}/{sku}/{version}", c.changeVersion)
	change("POST /activities/{activity}", c.changeActivity)
	change("POST /tasks/{id}", c.decideTask)
	change("POST /jobs/{name}", c.changeJob)
	c.registerAPI(read, change)
}

// handler makes a page or does something; its error is shown.
type handler func(w http.ResponseWriter, r *http.Request) error

// problem is an error with the status of the answer.
type problem struct {
	status int
	err    error
}

func (p *problem) Error() string { return p.err.Error() }
func (p *problem) Unwrap() error { return p.err }

func failedWith(status int, format string, args ...any) error {
	return &problem{status, fmt.Errorf(format, args...)}
}

// pageLimit bounds the making of one page, below the server's write limit.
const pageLimit = 40 * time.Second

// handle bounds a request and shows its error.
func (c *Console) handle(h handler) http.Handler {
	return http.HandlerFunc(func(w http.ResponseWriter, r *http.Request) {
		ctx, cancel := context.WithTimeout(r.Context(), pageLimit)
		defer cancel()
		if err := h(w, r.WithContext(ctx)); err != nil {
			c.fail(w, r, statusOf(err), err)
		}
	})
}

func statusOf(err error) int {
	if p, ok := errors.AsType[*problem](err); ok {
		return p.status
	}
	_, tooLarge := errors.AsType[*http.MaxBytesError](err)
	switch {
	case errors.Is(err, pgstore.ErrNotFound), errors.Is(err, pgstore.ErrNoReport):
		return http.StatusNotFound
	case stands(err):
		return http.StatusConflict
	case tooLarge:
		return http.StatusRequestEntityTooLarge
	case errors.Is(err, pgstore.ErrUnavailable), errors.Is(err, context.DeadlineExceeded):
		return http.StatusServiceUnavailable
	default:
		return http.StatusInternalServerError
	}
}

// stands says whether a change was refused because of how things stand: asked
// for again it is refused again, and nothing is out of order.
func stands(err error) bool {
	_, decided := errors.AsType[*pgstore.TaskDecidedError](err)
	_, unfenced := errors.AsType[*pgstore.FenceNotReadyError](err)
	return decided || unfenced || slices.ContainsFunc([]error{
		approval.ErrHeld, approval.ErrObserve, pgstore.ErrNotLiftedByHand, pgstore.ErrHaltNotRejected,
	}, func(refused error) bool { return errors.Is(err, refused) })
}

// fail answers with an error, as page or as JSON.
func (c *Console) fail(w http.ResponseWriter, r *http.Request, status int, err error) {
	if status >= http.StatusInternalServerError {
		c.Log.Warn("a page could not be made", "path", r.URL.Path, "error", err)
	}
	if isAPI(r) {
		writeJSON(w, status, map[string]any{"schema": 1, "error": err.Error()})
		return
	}
	c.render(w, r, status, "error", map[string]any{"Status": status, "Error": err.Error()})
}

// deny answers a caller without the right token. A person is led to the page
// where one signs in.
func (c *Console) deny(w http.ResponseWriter, r *http.Request, status int, err error) {
	if status == http.StatusUnauthorized && !isAPI(r) && r.Method == http.MethodGet {
		http.Redirect(w, r, "/login?next="+ //nolint:gosec // to a path of ours; localPath checks where it leads in the end
			template.URLQueryEscaper(r.URL.RequestURI()), http.StatusSeeOther)
		return
	}
	if status == http.StatusUnauthorized && isAPI(r) {
		w.Header().Set("WWW-Authenticate", "Bearer")
	}
	c.fail(w, r, status, err)
}

func isAPI(r *http.Request) bool { return strings.HasPrefix(r.URL.Path, "/api/") }

// policy forbids everything that the pages do not use.
const policy = "default-src 'none'; style-src 'self'; script-src 'self'; img-src 'self'; connect-src 'self'; " +
	"form-action 'self'; base-uri 'none'; frame-ancestors 'none'"

func (c *Console) secure(next http.Handler) http.Handler {
	return http.HandlerFunc(func(w http.ResponseWriter, r *http.Request) {
		h := w.Header()
		h.Set("Content-Security-Policy", policy)
		h.Set("Referrer-Policy", "same-origin")
		h.Set("Cross-Origin-Opener-Policy", "same-origin")
		h.Set("Cross-Origin-Resource-Policy", "same-origin")
		next.ServeHTTP(w, r)
	})
}

func (c *Console) serveAsset(w http.ResponseWriter, r *http.Request) {
	if r.URL.Path == "/assets/chart.css" {
		w.Header().Set("Content-Type", "text/css; charset=utf-8")
		_, _ = w.Write([]byte(chart.CSS)) // the client may be gone
		return
	}
	c.assets.ServeHTTP(w, r)
}

// parse reads the templates: each page with the layout.
func (c *Console) parse() (map[string]*template.Template, error) {
	names, err := fs.Glob(files, "templates/*.tmpl")
	if err != nil {
		return nil, err
	}
	pages := map[string]*template.Template{}
	for _, name := range names {
		page := strings.TrimSuffix(strings.TrimPrefix(name, "templates/"), ".tmpl")
		if page == "layout" {
			continue
		}
		t, err := template.New("layout.tmpl").Funcs(functions(c.words.in(""))).ParseFS(files, "templates/layout.tmpl", name)
		if err != nil {
			return nil, fmt.Errorf("template of page %s: %w", page, err)
		}
		pages[page] = t
	}
	return pages, nil
}

// page is what every template is given.
type page struct {
	Name    string // of the template
	Lang    string
	Path    string // of this page, with its query
	Caller  admin.Caller
	Mode    string
	Now     time.Time
	Changes bool   // the caller may change things
	Done    string // what a change before this page has done
	Data    any
}

// render writes a page. It is made whole first, so that an error is a page too.
func (c *Console) render(w http.ResponseWriter, r *http.Request, status int, name string, data any) {
	caller := admin.CallerOf(r.Context())
	speech := c.words.in(chosenLanguage(r))
	t, err := c.pages[name].Clone()
	var body bytes.Buffer
	if err == nil {
		err = t.Funcs(functions(speech)).Execute(&body, page{
			Name: name, Lang: speech.lang, Path: r.URL.RequestURI(), Caller: caller, Mode: c.Daemon.Mode(),
			Now: time.Now().UTC(), Changes: caller.Role >= admin.RoleChange, Done: takeDone(w, r, speech), Data: data,
		})
	}
	if err != nil {
		c.Log.Error("a page could not be written", "page", name, "error", err)
		http.Error(w, "the page could not be written; the log says why", http.StatusInternalServerError)
		return
	}
	h := w.Header()
	h.Set("Content-Type", "text/html; charset=utf-8")
	h.Set("Content-Language", speech.lang)
	h.Add("Vary", "Accept-Language, Cookie")
	w.WriteHeader(status)
	_, _ = w.Write(body.Bytes()) // the client may be gone
}

// seeOther leads the browser from a change back to a page, with a word on what
// was done.
func seeOther(w http.ResponseWriter, r *http.Request, to, done string) error {
	http.SetCookie(w, &http.Cookie{ //nolint:gosec // a word for the next page, readable by nobody's script; there may be no TLS
		Name: doneCookie, Value: done, Path: "/", MaxAge: 60, HttpOnly: true, SameSite: http.SameSiteStrictMode,
	})
	http.Redirect(w, r, to, http.StatusSeeOther)
	return nil
}

// takeDone is the word on what was done just before, for one page. Names that
// are not ours say nothing: servers on other ports may set cookies too.
func takeDone(w http.ResponseWriter, r *http.Request, s speech) string {
	cookie, err := r.Cookie(doneCookie)
	if err != nil {
		return ""
	}
	http.SetCookie(w, &http.Cookie{ //nolint:gosec // it is removed
		Name: doneCookie, Path: "/", MaxAge: -1, HttpOnly: true, SameSite: http.SameSiteStrictMode,
	})
	return s.orItself("done_"+cookie.Value, "")
}

const doneCookie = "reconciler_done"
