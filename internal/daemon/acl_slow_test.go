//go:build slow

package daemon_test

import (
	"os"
	"os/exec"
	"testing"
	"time"

	"github.com/redis/go-redis/v9"

	"github.com/seckill/reconciler/internal/devstack/stacktest"
)

// TestSlowUnderACL runs the daemon's tests on the shared services once more,
// with daemons that have no other rights in Redis than users.acl gives them:
// all pass, and no command was refused.
func TestSlowUnderACL(t *testing.T) {
	began := time.Now()
	cmd := exec.CommandContext(t.Context(), os.Args[0], "-test.run", "^Test[^S]|^TestS[^l]", "-test.count", "1")
	cmd.Env = append(os.Environ(), aclVariable+"=1")
	out, err := cmd.CombinedOutput()
	if err != nil {
		t.Fatalf("%v\n%s", err, out)
	}
	for _, target := range stacktest.RedisTargets(t) {
		for _, addr := range target.Addrs {
			server := redis.NewClient(&redis.Options{Addr: addr})
			log, err := server.ACLLog(t.Context(), 128).Result()
			_ = server.Close() // nothing is in flight
			if err != nil {
				t.Fatal(err)
			}
			for _, e := range log {
				since := time.Duration(e.AgeSeconds * float64(time.Second))
				// The check environment asks for the login's own rights, and takes no for an answer.
				if e.Username == "seckill-daemon" && since < time.Since(began) && e.Object != "acl|getuser" {
					t.Errorf("%s refused: %s %s (%s)", addr, e.Reason, e.Object, e.Context)
				}
			}
		}
	}
}
