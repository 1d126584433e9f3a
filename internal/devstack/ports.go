package devstack

import (
	"context"
	"errors"
	"fmt"
	"net"
	"os"
	"path/filepath"
	"strconv"
	"syscall"
)

const (
	firstPort = 20000
	blockSize = 32
	// Blocks end below 32768, where Linux takes outgoing ports from.
	blockCount = (32768 - firstPort) / blockSize
)

// ports hands out free loopback ports from blocks that it holds by file locks.
type ports struct {
	locks []*os.File
	next  int // the next port of the current block
	end   int // one past the current block
}

// take returns the first of n consecutive ports, n ≤ blockSize.
func (p *ports) take(n int) (int, error) {
	if p.next+n > p.end {
		if err := p.acquire(); err != nil {
			return 0, err
		}
	}
	first := p.next
	p.next += n
	return first, nil
}

// acquire locks one more block of which no port is in use. Processes begin
// their search at different places, so that they rarely meet.
func (p *ports) acquire() error {
	start := os.Getpid()
	for i := range blockCount {
		base := firstPort + blockSize*((start+i)%blockCount)
		lock, err := lockBlock(base)
		if err != nil {
			return err
		}
		if lock == nil {
			continue
		}
		if !blockIsFree(base) {
			_ = lock.Close()
			continue
		}
		p.locks = append(p.locks, lock)
		p.next, p.end = base, base+blockSize
		return nil
	}
	return fmt.Errorf("no free block of %d ports between %d and 32768: stop some of the stacks that run on this machine", blockSize, firstPort)
}

// reacquire takes the lock of a block that a recorded stack used before. If
// its living services still hold the lock, there is nothing to do.
func (p *ports) reacquire(port int) error {
	lock, err := lockBlock(port - (port-firstPort)%blockSize)
	if lock != nil {
		p.locks = append(p.locks, lock)
	}
	return err
}

func (p *ports) release() {
	for _, lock := range p.locks {
		_ = lock.Close() // the lock stays with the children that inherited it
	}
	p.locks = nil
	p.next, p.end = 0, 0
}

// lockBlock locks the block that starts at base; nil means that it is taken.
func lockBlock(base int) (*os.File, error) {
	dir := filepath.Join(os.TempDir(), "seckill-devstack-ports-"+strconv.Itoa(os.Getuid()))
	if err := os.MkdirAll(dir, 0o755); err != nil {
		return nil, fmt.Errorf("create the directory of port locks: %w", err)
	}
	f, err := os.OpenFile(filepath.Join(dir, strconv.Itoa(base)), os.O_CREATE|os.O_RDWR, 0o644)
	if err != nil {
		return nil, fmt.Errorf("open the lock of port block %d: %w", base, err)
	}
	err = syscall.Flock(int(f.Fd()), syscall.LOCK_EX|syscall.LOCK_NB)
	if err == nil {
		return f, nil
	}
	_ = f.Close()
	if errors.Is(err, syscall.EWOULDBLOCK) {
		return nil, nil
	}
	return nil, fmt.Errorf("lock port block %d: %w", base, err)
}

// blockIsFree tries every port, because not everyone uses our locks.
func blockIsFree(base int) bool {
	for port := base; port < base+blockSize; port++ {
		if !portIsFree(port) {
			return false
		}
	}
	return true
}

func portIsFree(port int) bool {
	ln, err := listen(port)
	if err != nil {
		return false
	}
	_ = ln.Close()
	return true
}

func listen(port int) (net.Listener, error) {
	var lc net.ListenConfig
	return lc.Listen(context.Background(), "tcp4", address(port)) // binding does not wait
}

// address is the loopback address of a port.
func address(port int) string { return net.JoinHostPort("127.0.0.1", strconv.Itoa(port)) }
