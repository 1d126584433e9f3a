package console

import (
	"context"
	"errors"
	"net/http"
	"strings"

	"github.com/seckill/reconciler/internal/daemon"
	"github.com/seckill/reconciler/internal/view"
	"github.com/seckill/reconciler/reservation"
)

// lookup is what somebody looks for, and what was found.
type lookup struct {
	Kind     string // reservation, request or user
	ID       string // not shown again of a user
	Problem  string
	Found    []view.Explanation
	Results  []view.Result // of a request
	Markers  []view.Marker // of a user
	Orders   []view.Order
	Unread   []view.Unread
	Searched bool
}

// reservations shows the form, and a reservation that a link names.
func (c *Console) reservations(w http.ResponseWriter, r *http.Request) error {
	return c.showLookup(w, r, lookup{Kind: "reservation", ID: strings.TrimSpace(r.URL.Query().Get("id"))})
}

// search looks for what the form says. It is no GET, so that no user's id gets
// into addresses, which browsers and proxies keep.
func (c *Console) search(w http.ResponseWriter, r *http.Request) error {
	return c.showLookup(w, r, lookup{Kind: r.PostFormValue("kind"), ID: strings.TrimSpace(r.PostFormValue("id"))})
}

func (c *Console) showLookup(w http.ResponseWriter, r *http.Request, l lookup) error {
	if l.ID != "" {
		l.Searched = true
		err := c.find(r.Context(), &l)
		switch {
		case errors.Is(err, daemon.ErrNoReservation), errors.Is(err, reservation.ErrInvalidID):
			l.Problem = err.Error()
		case err != nil:
			return err
		}
	}
	if l.Kind == "user" {
		l.ID = ""
	}
	c.render(w, r, http.StatusOK, "reservations", l)
	return nil
}

func (c *Console) find(ctx context.Context, l *lookup) error {
	inspector := c.Daemon.Inspector()
	switch l.Kind {
	case "reservation":
		e, err := inspector.Reservation(ctx, l.ID, daemon.In{})
		if err != nil {
			return err
		}
		l.Found = []view.Explanation{view.OfExplanation(e, c.Hasher)}
	case "request":
		f, err := inspector.Request(ctx, l.ID, daemon.In{})
		if err != nil {
			return err
		}
		v := view.OfRequest(f, c.Hasher)
		l.Found, l.Results, l.Orders, l.Unread = v.Reservations, v.Results, v.Orders, v.Unread
	case "user":
		f, err := inspector.User(ctx, l.ID, daemon.In{})
		if err != nil {
			return err
		}
		v := view.OfUser(l.ID, f, c.Hasher)
		l.Found, l.Markers, l.Orders, l.Unread = v.Reservations, v.Markers, v.Orders, v.Unread
	default:
		return failedWith(http.StatusBadRequest, "%q is nothing to look for: reservation, request or user", l.Kind)
	}
	return nil
}

func (c *Console) apiReservation(w http.ResponseWriter, r *http.Request) error {
	e, err := c.Daemon.Inspector().Reservation(r.Context(), r.PathValue("id"), daemon.In{})
	if err != nil {
		return err
	}
	writeJSON(w, http.StatusOK, view.OfExplanation(e, c.Hasher))
	return nil
}

func (c *Console) apiRequest(w http.ResponseWriter, r *http.Request) error {
	f, err := c.Daemon.Inspector().Request(r.Context(), r.PathValue("id"), daemon.In{})
	if err != nil {
		return err
	}
	writeJSON(w, http.StatusOK, view.OfRequest(f, c.Hasher))
	return nil
}
