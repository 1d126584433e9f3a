package admin

import (
	"crypto/sha256"
	"net/http"
	"net/http/httptest"
	"net/url"
	"strconv"
	"strings"
	"testing"
	"testing/synctest"
	"time"
)

const (
	readToken   = "may-only-read"
	changeToken = "may-change-too"
)

func testAuth() *Auth {
	return NewAuth(AuthOptions{
		Read: sha256.Sum256([]byte(readToken)), Change: sha256.Sum256([]byte(changeToken)), SessionTime: time.Hour,
	})
}

// request passes a request through Require and returns its status and caller.
func request(a *Auth, role Role, change func(*http.Request), form url.Values) (int, Caller) {
	method, body := http.MethodGet, ""
	if form != nil {
		method, body = http.MethodPost, form.Encode()
	}
	r := httptest.NewRequest(method, "http://localhost:8642/x", strings.NewReader(body))
	if form != nil {
		r.Header.Set("Content-Type", "application/x-www-form-urlencoded")
	}
	change(r)
	var caller Caller
	w := httptest.NewRecorder()
	a.Require(role, http.HandlerFunc(func(_ http.ResponseWriter, r *http.Request) { caller = CallerOf(r.Context()) }),
		func(w http.ResponseWriter, _ *http.Request, status int, err error) {
			http.Error(w, err.Error(), status)
		},
	).ServeHTTP(w, r)
	return w.Code, caller
}

func bearer(token, actor string) func(*http.Request) {
	return func(r *http.Request) {
		r.Header.Set("Authorization", "Bearer "+token)
		if actor != "" {
			r.Header.Set(ActorHeader, actor)
		}
	}
}

// signIn returns the cookie and the form token of a new session.
func signIn(t *testing.T, a *Auth, token, actor string) (*http.Cookie, string) {
	t.Helper()
	w, r := httptest.NewRecorder(), httptest.NewRequest(http.MethodPost, "http://localhost:8642/login", nil)
	if status, err := a.SignIn(w, r, token, actor); err != nil {
		t.Fatalf("sign in: %d, %v", status, err)
	}
	cookie := w.Result().Cookies()[0]
	if !cookie.HttpOnly || cookie.SameSite != http.SameSiteStrictMode {
		t.Errorf("the cookie is %v; scripts and other sites must not have it", cookie)
	}
	_, caller := request(a, RoleRead, func(r *http.Request) { r.AddCookie(cookie) }, nil)
	return cookie, caller.FormToken
}

func TestRequire(t *testing.T) {
	a := testAuth()
	reading, readForm := signIn(t, a, readToken, "bob")
	changing, changeForm := signIn(t, a, " "+changeToken+"\n", "alice") // as pasted
	with := func(c *http.Cookie, more ...string) func(*http.Request) {
		return func(r *http.Request) {
			r.AddCookie(c)
			for i := 0; i < len(more); i += 2 {
				r.Header.Set(more[i], more[i+1])
			}
		}
	}
	form := func(token string) url.Values { return url.Values{FormToken: {token}} }
	for name, c := range map[string]struct {
		role   Role
		change func(*http.Request)
		form   url.Values
		want   int
	}{
		"nobody":                                {RoleRead, func(*http.Request) {}, nil, 401},
		"a wrong token":                         {RoleRead, bearer("guess", ""), nil, 401},
		"an empty token":                        {RoleRead, bearer("", ""), nil, 401},
		"a made-up cookie":                      {RoleRead, with(&http.Cookie{Name: sessionCookie, Value: "x"}), nil, 401},
		"a program reads":                       {RoleRead, bearer(readToken, ""), nil, 200},
		"a program that may change reads":       {RoleRead, bearer(changeToken, ""), nil, 200},
		"a reading program changes":             {RoleChange, bearer(readToken, "ci"), url.Values{}, 403},
		"a program changes":                     {RoleChange, bearer(changeToken, "ci"), url.Values{}, 200},
		"a program changes namelessly":          {RoleChange, bearer(changeToken, ""), url.Values{}, 400},
		"a program changes under a forged line": {RoleChange, bearer(changeToken, "a\tb"), url.Values{}, 400},
		"a browser reads":                       {RoleRead, with(reading), nil, 200},
		"a reading browser changes":             {RoleChange, with(reading), form(readForm), 403},
		"a browser changes":                     {RoleChange, with(changing, "Sec-Fetch-Site", "same-origin"), form(changeForm), 200},
		"a browser without the form's token":    {RoleChange, with(changing, "Sec-Fetch-Site", "same-origin"), form(""), 403},
		"another session's form":                {RoleChange, with(changing, "Sec-Fetch-Site", "same-origin"), form(readForm), 403},
		"another site's form":                   {RoleChange, with(changing, "Sec-Fetch-Site", "cross-site"), form(changeForm), 403},
		"another origin's form":                 {RoleChange, with(changing, "Origin", "http://evil.example"), form(changeForm), 403},
		"another port's form":                   {RoleChange, with(changing, "Origin", "http://localhost:9999"), form(changeForm), 403},
	} {
		if got, _ := request(a, c.role, c.change, c.form); got != c.want {
			t.Errorf("%s: %d, want %d", name, got, c.want)
		}
	}
	if _, caller := request(a, RoleChange, with(changing), form(changeForm)); caller.Actor != "alice" || caller.Role != RoleChange {
		t.Errorf("the caller is %+v, want alice, who may change", caller)
	}
}

func TestSessionsEnd(t *testing.T) {
	synctest.Test(t, func(t *testing.T) {
		a := testAuth()
		cookie, _ := signIn(t, a, readToken, "bob")
		other, _ := signIn(t, a, readToken, "eve")
		use := func(c *http.Cookie) int {
			status, _ := request(a, RoleRead, func(r *http.Request) { r.AddCookie(c) }, nil)
			return status
		}
		r := httptest.NewRequest(http.MethodPost, "/logout", nil)
		r.AddCookie(other)
		a.SignOut(httptest.NewRecorder(), r)
		if got := use(other); got != 401 {
			t.Errorf("after the sign-out: %d, want 401", got)
		}
		time.Sleep(59 * time.Minute)
		if got := use(cookie); got != 200 {
			t.Errorf("within its time: %d, want 200", got)
		}
		time.Sleep(2 * time.Minute)
		if got := use(cookie); got != 401 {
			t.Errorf("after its time: %d, want 401", got)
		}
		for i := range maxSessions + 10 {
			signIn(t, a, readToken, "user"+strconv.Itoa(i))
		}
		if len(a.sessions) > maxSessions {
			t.Errorf("%d sessions are kept, want at most %d", len(a.sessions), maxSessions)
		}
	})
}

func TestFewWrongTokens(t *testing.T) {
	synctest.Test(t, func(t *testing.T) {
		a := testAuth()
		tooMany := 0
		for range 100 {
			if status, _ := request(a, RoleRead, bearer("guess", ""), nil); status == http.StatusTooManyRequests {
				tooMany++
			}
		}
		if tooMany != 100-wrongBurst {
			t.Errorf("%d of 100 guesses were put off, want all but %d", tooMany, wrongBurst)
		}
		if status, _ := request(a, RoleRead, bearer(readToken, ""), nil); status != 200 {
			t.Errorf("the right token after many wrong ones: %d, want 200", status)
		}
	})
}

func TestNobodyWithoutTokens(t *testing.T) {
	a := NewAuth(AuthOptions{SessionTime: time.Hour})
	for _, token := range []string{"", "\x00", string(make([]byte, 32))} {
		if status, _ := request(a, RoleRead, bearer(token, "x"), nil); status != 401 {
			t.Errorf("token %q: %d although none is configured", token, status)
		}
	}
	if a.Open() {
		t.Error("open without a token")
	}
}

func TestTokens(t *testing.T) {
	token, hashed := NewToken()
	if len(token) < 26 {
		t.Errorf("token %q is short", token)
	}
	parsed, err := ParseToken(hashed.String())
	if err != nil || parsed != hashed || parsed != sha256.Sum256([]byte(token)) {
		t.Errorf("%s is read as %s, %v", hashed, parsed, err)
	}
	for _, text := range []string{"", "abc", token, hashed.String()[2:]} {
		if _, err := ParseToken(text); err == nil {
			t.Errorf("%q was accepted", text)
		}
	}
}
