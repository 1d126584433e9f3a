// Package devstack starts real Redis, PostgreSQL and RocketMQ servers on free
// loopback ports, for tests, benchmarks, the demo and `make up`.
//
// A [Stack] is a set of services with one directory. It lives in one of two
// ways:
//
//   - owned: [Start] starts it and [Stack.Stop] ends it. The kernel kills every
//     service if the owner dies first, so a crashed test leaves nothing behind.
//   - detached: [Up] starts it and the services outlive the caller. Running
//     [Up] again starts only what is missing or dead; [Down] ends it and
//     removes its data; [Open] attaches to it from another process.
//
// A process is known by its pid together with its start time and the boot it
// belongs to, so a stranger that got a recycled pid is never signalled.
//
// Ports come in blocks of 32 from 20000 up, below the ephemeral range. A block
// is held by a file lock that the services inherit: it is free again when the
// last of them is gone, whoever started them.
//
// Missing programs are installed: see [Installer].
package devstack
