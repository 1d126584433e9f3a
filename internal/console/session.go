package console

import (
	"errors"
	"fmt"
	"net/http"
	"strings"
	"time"

	"github.com/seckill/reconciler/internal/admin"
	"github.com/seckill/reconciler/internal/config"
)

// NewAuth admits whom the settings say.
func NewAuth(c config.Admin) (*admin.Auth, error) {
	read, errRead := parseToken("admin.read_token_sha256", c.ReadTokenSHA256)
	change, errChange := parseToken("admin.change_token_sha256", c.ChangeTokenSHA256)
	if err := errors.Join(errRead, errChange); err != nil {
		return nil, err
	}
	return admin.NewAuth(admin.AuthOptions{Read: read, Change: change, SessionTime: c.SessionTime, Secure: c.TLSCertFile != ""}), nil
}

func parseToken(path, text string) (admin.Token, error) {
	if text == "" {
		return admin.Token{}, nil
	}
	token, err := admin.ParseToken(text)
	if err != nil {
		return token, fmt.Errorf("%s: %w", path, err)
	}
	return token, nil
}

// loginPage is where a person signs in.
func (c *Console) loginPage(w http.ResponseWriter, r *http.Request) {
	c.render(w, r, http.StatusOK, "login", map[string]any{"Next": localPath(r.URL.Query().Get("next")), "Open": c.Auth.Open()})
}

func (c *Console) login(w http.ResponseWriter, r *http.Request) {
	next := localPath(r.PostFormValue("next"))
	status, err := c.Auth.SignIn(w, r, r.PostFormValue("token"), r.PostFormValue("actor"))
	if err != nil {
		c.render(w, r, status, "login", map[string]any{"Next": next, "Open": c.Auth.Open(), "Error": err.Error(), "Actor": r.PostFormValue("actor")})
		return
	}
	http.Redirect(w, r, next, http.StatusSeeOther) //nolint:gosec // localPath leads nowhere else
}

func (c *Console) logout(w http.ResponseWriter, r *http.Request) {
	c.Auth.SignOut(w, r)
	http.Redirect(w, r, "/login", http.StatusSeeOther)
}

// language remembers the language that a person chose.
func (c *Console) language(w http.ResponseWriter, r *http.Request) {
	http.SetCookie(w, &http.Cookie{ //nolint:gosec // a preference; there may be no TLS
		Name: languageCookie, Value: r.PostFormValue("language"), Path: "/", MaxAge: int((365 * 24 * time.Hour).Seconds()),
		HttpOnly: true, SameSite: http.SameSiteStrictMode,
	})
	http.Redirect(w, r, localPath(r.PostFormValue("next")), http.StatusSeeOther) //nolint:gosec // localPath leads nowhere else
}

// localPath is a path on this server, or the first page: nobody is led
// elsewhere by a link to the sign-in page.
func localPath(next string) string {
	if !strings.HasPrefix(next, "/") || strings.HasPrefix(next, "//") || strings.ContainsAny(next, "\\\r\n\t") {
		return "/"
	}
	return next
}
