package admin

import (
	"context"
	"crypto/rand"
	"crypto/sha256"
	"crypto/subtle"
	"encoding/hex"
	"errors"
	"fmt"
	"net/http"
	"strings"
	"sync"
	"time"

	"golang.org/x/time/rate"
)

// Role is what a caller may do. A higher one includes the lower.
type Role int

// The roles.
const (
	RoleNone   Role = iota
	RoleRead        // see everything
	RoleChange      // and change what an operator may change
)

// Token is a hashed secret that stands for a role: the SHA-256 of a token in
// hexadecimal. A token has 128 bits or more of chance in it, so that a plain
// hash is as good as a slow one.
type Token [sha256.Size]byte

// ParseToken reads a hashed token, as `reconciler config token` prints it.
func ParseToken(text string) (Token, error) {
	raw, err := hex.DecodeString(text)
	if err != nil || len(raw) != sha256.Size {
		return Token{}, fmt.Errorf("want the SHA-256 of a token, %d hexadecimal digits", 2*sha256.Size)
	}
	return Token(raw), nil
}

// NewToken draws a token and returns it with its hash.
func NewToken() (token string, hashed Token) {
	token = rand.Text()
	return token, sha256.Sum256([]byte(token))
}

// String is the hash as [ParseToken] reads it.
func (t Token) String() string { return hex.EncodeToString(t[:]) }

// AuthOptions say who may do what.
type AuthOptions struct {
	// Read and Change are hashed tokens; the zero one admits nobody.
	Read, Change Token
	// SessionTime is how long a browser stays signed in.
	SessionTime time.Duration
	// Secure marks cookies for encrypted connections only.
	Secure bool
}

// Auth admits callers: programs by a bearer token with each request, browsers
// by a session that a token opens. Sessions are kept in memory, so that a
// restart, like a sign-out, ends them. It is safe for concurrent use.
type Auth struct {
	opts   AuthOptions
	cross  *http.CrossOriginProtection
	failed *rate.Limiter // of wrong tokens, from whomever

	mu       sync.Mutex
	sessions map[[sha256.Size]byte]*Session // by the hash of the cookie's value
}

// NewAuth makes an Auth without sessions.
func NewAuth(o AuthOptions) *Auth {
	return &Auth{
		opts: o, cross: http.NewCrossOriginProtection(),
		failed:   rate.NewLimiter(wrongPerSecond, wrongBurst),
		sessions: map[[sha256.Size]byte]*Session{},
	}
}

const (
	wrongPerSecond = 1
	wrongBurst     = 20
	maxSessions    = 256
	sessionCookie  = "reconciler_session"
	// ActorHeader names the person behind a program's change, for the audit trail.
	ActorHeader = "Reconciler-Actor"
	// FormToken is the field of a form that proves that it is one of ours.
	FormToken     = "form_token"
	maxActorBytes = 128
)

// Session is a browser that has signed in.
type Session struct {
	Role      Role
	Actor     string // who signed in, by their own word
	FormToken string // goes into every form, see [FormToken]
	until     time.Time
}

// Caller is who makes a request.
type Caller struct {
	Role  Role
	Actor string // empty for a program that only reads
	// FormToken goes into the forms of a page; empty for a program.
	FormToken string
}

type callerKey struct{}

// CallerOf is who makes the request that ctx belongs to.
func CallerOf(ctx context.Context) Caller {
	c, _ := ctx.Value(callerKey{}).(Caller)
	return c
}

// Errors of a request that is not admitted.
var (
	errNoCredentials = errors.New("no token: send it as Authorization: Bearer …, or sign in")
	errWrongToken    = errors.New("the token is wrong")
	errTooMany       = errors.New("too many wrong tokens: wait a while")
	errRole          = errors.New("this token may read and not change")
	errForm          = errors.New("the form is not one of this session: load the page again")
	errCrossOrigin   = errors.New("a request from another site is refused")
	errNoActor       = fmt.Errorf("say who makes the change: header %s with a name of at most %d characters", ActorHeader, maxActorBytes)
)

// Require lets requests through whose caller has the role. Requests that change
// something must come from this site, and from a form of the caller's session
// or with a bearer token and [ActorHeader]. deny answers the others.
func (a *Auth) Require(role Role, next http.Handler, deny func(w http.ResponseWriter, r *http.Request, status int, err error)) http.Handler {
	return http.HandlerFunc(func(w http.ResponseWriter, r *http.Request) {
		caller, status, err := a.admit(r, role)
		if err != nil {
			deny(w, r, status, err)
			return
		}
		next.ServeHTTP(w, r.WithContext(context.WithValue(r.Context(), callerKey{}, caller)))
	})
}

func (a *Auth) admit(r *http.Request, role Role) (Caller, int, error) {
	changes := r.Method != http.MethodGet && r.Method != http.MethodHead
	if err := a.cross.Check(r); err != nil {
		return Caller{}, http.StatusForbidden, errCrossOrigin
	}
	token, bearer := strings.CutPrefix(r.Header.Get("Authorization"), "Bearer ")
	if bearer {
		caller := Caller{Actor: r.Header.Get(ActorHeader)}
		var err error
		if caller.Role, err = a.roleOf(token); err != nil {
			return Caller{}, statusOf(err), err
		}
		switch {
		case caller.Role < role:
			return Caller{}, http.StatusForbidden, errRole
		case changes && !validActor(caller.Actor):
			return Caller{}, http.StatusBadRequest, errNoActor
		}
		return caller, 0, nil
	}
	s := a.session(r)
	switch {
	case s == nil:
		return Caller{}, http.StatusUnauthorized, errNoCredentials
	case s.Role < role:
		return Caller{}, http.StatusForbidden, errRole
	case changes && subtle.ConstantTimeCompare([]byte(r.PostFormValue(FormToken)), []byte(s.FormToken)) != 1:
		return Caller{}, http.StatusForbidden, errForm
	}
	return Caller{Role: s.Role, Actor: s.Actor, FormToken: s.FormToken}, 0, nil
}

func statusOf(err error) int {
	if errors.Is(err, errTooMany) {
		return http.StatusTooManyRequests
	}
	return http.StatusUnauthorized
}

// roleOf is the role of a token. Answers to wrong ones are few in any time, so
// that nobody learns anything by trying many.
func (a *Auth) roleOf(token string) (Role, error) {
	hashed := sha256.Sum256([]byte(token))
	role := RoleNone
	if a.opts.Read != (Token{}) && subtle.ConstantTimeCompare(hashed[:], a.opts.Read[:]) == 1 {
		role = RoleRead
	}
	if a.opts.Change != (Token{}) && subtle.ConstantTimeCompare(hashed[:], a.opts.Change[:]) == 1 {
		role = RoleChange
	}
	switch {
	case role != RoleNone:
		return role, nil
	case a.failed.Allow():
		return RoleNone, errWrongToken
	default:
		return RoleNone, errTooMany
	}
}

func validActor(name string) bool {
	return name != "" && len(name) <= maxActorBytes && !strings.ContainsFunc(name, func(r rune) bool { return r < ' ' || r == 0x7f })
}

// session is the caller's session, nil if there is none.
func (a *Auth) session(r *http.Request) *Session {
	cookie, err := r.Cookie(sessionCookie)
	if err != nil {
		return nil
	}
	a.mu.Lock()
	defer a.mu.Unlock()
	key := sha256.Sum256([]byte(cookie.Value))
	s := a.sessions[key]
	if s != nil && !time.Now().Before(s.until) {
		delete(a.sessions, key)
		return nil
	}
	return s
}

// SignIn opens a session for a browser that shows a token, in the name of
// actor. The error is for the person; status is that of the answer.
func (a *Auth) SignIn(w http.ResponseWriter, r *http.Request, token, actor string) (status int, err error) {
	if err := a.cross.Check(r); err != nil {
		return http.StatusForbidden, errCrossOrigin
	}
	actor = strings.TrimSpace(actor)
	if !validActor(actor) {
		return http.StatusBadRequest, errNoActor
	}
	role, err := a.roleOf(strings.TrimSpace(token))
	if err != nil {
		return statusOf(err), err
	}
	value := rand.Text()
	a.keep(sha256.Sum256([]byte(value)), &Session{
		Role: role, Actor: actor, FormToken: rand.Text(), until: time.Now().Add(a.opts.SessionTime),
	})
	a.setCookie(w, value, int(a.opts.SessionTime.Seconds()))
	return 0, nil
}

// keep adds a session; the one that ends first makes room where there is none.
func (a *Auth) keep(key [sha256.Size]byte, s *Session) {
	a.mu.Lock()
	defer a.mu.Unlock()
	for len(a.sessions) >= maxSessions {
		var oldest [sha256.Size]byte
		var until time.Time
		for k, other := range a.sessions {
			if until.IsZero() || other.until.Before(until) {
				oldest, until = k, other.until
			}
		}
		delete(a.sessions, oldest)
	}
	a.sessions[key] = s
}

// SignOut ends the caller's session.
func (a *Auth) SignOut(w http.ResponseWriter, r *http.Request) {
	if cookie, err := r.Cookie(sessionCookie); err == nil {
		a.mu.Lock()
		delete(a.sessions, sha256.Sum256([]byte(cookie.Value)))
		a.mu.Unlock()
	}
	a.setCookie(w, "", -1)
}

func (a *Auth) setCookie(w http.ResponseWriter, value string, maxAge int) {
	http.SetCookie(w, &http.Cookie{ //nolint:gosec // Secure where the server has TLS: without it, on a loopback address, no browser would keep the cookie
		Name: sessionCookie, Value: value, Path: "/", MaxAge: maxAge,
		HttpOnly: true, Secure: a.opts.Secure, SameSite: http.SameSiteStrictMode,
	})
}

// Open says whether any token is configured; without one nobody can sign in.
func (a *Auth) Open() bool {
	return a.opts.Read != (Token{}) || a.opts.Change != (Token{})
}
