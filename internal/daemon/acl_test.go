package daemon_test

import (
	"crypto/sha256"
	"encoding/hex"
	"os"
	"path/filepath"
	"strings"
	"testing"

	"github.com/redis/go-redis/v9"

	"github.com/seckill/reconciler/internal/config"
	"github.com/seckill/reconciler/internal/devstack"
)

// aclVariable makes the tests' daemons log in to Redis as seckill-daemon of
// deploy/redis/users.acl: see TestSlowUnderACL.
const aclVariable = "DAEMON_TEST_UNDER_ACL"

// limitRights gives the daemon that user, if the run asks for it.
func limitRights(t *testing.T, c *config.Config) {
	t.Helper()
	if os.Getenv(aclVariable) == "" {
		return
	}
	root, err := devstack.ModuleRoot()
	if err != nil {
		t.Fatal(err)
	}
	text, err := os.ReadFile(filepath.Join(root, "deploy", "redis", "users.acl"))
	if err != nil {
		t.Fatal(err)
	}
	const password = "daemon"
	hash := sha256.Sum256([]byte(password))
	for line := range strings.Lines(string(text)) {
		words := strings.Fields(strings.ReplaceAll(line, strings.Repeat("0", 64), hex.EncodeToString(hash[:])))
		if words[1] != "seckill-daemon" {
			continue
		}
		args := []any{"acl", "setuser", words[1]}
		for _, w := range words[2:] {
			args = append(args, w)
		}
		for _, addr := range c.Redis.Addrs {
			server := redis.NewClient(&redis.Options{Addr: addr})
			err := server.Do(t.Context(), args...).Err()
			_ = server.Close() // nothing is in flight
			if err != nil {
				t.Fatal(err)
			}
		}
	}
	c.Redis.Username, c.Redis.Password = "seckill-daemon", password
}
