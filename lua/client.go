package lua

import (
	"errors"
	"fmt"

	"github.com/redis/go-redis/v9"
	"github.com/redis/go-redis/v9/maintnotifications"
)

// ClientOptions sets in o what [NewRunner] demands of a client, and what makes
// failures show early: no repeats, the context's deadline in force on every
// read and write, one attempt to dial, evidence from masters only, and a quiet
// handshake. Time-outs and pool sizes stay as they are.
func ClientOptions(o *redis.UniversalOptions) *redis.UniversalOptions {
	o.MaxRetries = -1
	o.ContextTimeoutEnabled = true
	o.DialerRetries = 1
	o.ReadOnly, o.RouteByLatency, o.RouteRandomly = false, false, false
	o.DisableIdentity = true
	o.MaintNotificationsConfig = &maintnotifications.Config{Mode: maintnotifications.ModeDisabled}
	return o
}

// ErrUnsafeClient says that a client's options would break a promise of this
// package.
var ErrUnsafeClient = errors.New("unsafe Redis client")

func checkSingle(o *redis.Options) error {
	var errs []error
	if o.MaxRetries != 0 { // -1 as given, 0 once the client is made
		errs = append(errs, fmt.Errorf("MaxRetries is %d: set -1", o.MaxRetries))
	}
	return errors.Join(append(errs, checkTimes(o.ContextTimeoutEnabled, int64(o.ReadTimeout)))...)
}

func checkCluster(o *redis.ClusterOptions) error {
	var errs []error
	if o.MaxRetries > 0 {
		errs = append(errs, fmt.Errorf("MaxRetries is %d: set -1", o.MaxRetries))
	}
	if o.ReadOnly {
		errs = append(errs, errors.New("ReadOnly, RouteByLatency or RouteRandomly is set: evidence must come from masters"))
	}
	return errors.Join(append(errs, checkTimes(o.ContextTimeoutEnabled, int64(o.ReadTimeout)))...)
}

func checkTimes(contextTimeout bool, readTimeout int64) error {
	var errs []error
	if !contextTimeout {
		errs = append(errs, errors.New("ContextTimeoutEnabled is off: set it"))
	}
	if readTimeout <= 0 {
		errs = append(errs, errors.New("there is no ReadTimeout: set one"))
	}
	return errors.Join(errs...)
}
