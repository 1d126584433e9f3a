#!/bin/bash
# Boots the Debian in ROOT with systemd as process 1, in namespaces of its own but
# for the network, and prints the process id of that process 1:
#
#   boot.sh ROOT
#
# It runs until its standard input ends, and leaves nothing behind. As root; any
# kernel with cgroup v2 will do, and no systemd need run outside.
set -euo pipefail

outside() {
	local root=$1 cgroups group pid
	# A mount of the unified hierarchy of our own: where the system has it differs.
	cgroups=$(mktemp -d)
	mount -t cgroup2 cgroup2 "$cgroups"
	group=$cgroups/reconciler-test-$$
	mkdir "$group"
	(
		echo "$BASHPID" >"$group/cgroup.procs"
		exec unshare --fork --kill-child --pid --mount --uts --ipc --cgroup "$0" inside "$root" </dev/null
	) &
	pid=$!
	read -r _ || true # lasts as long as the test
	kill -KILL "$pid" 2>/dev/null || true
	wait "$pid" 2>/dev/null || true
	# What is left of a killed process 1 goes at once; its groups become empty then.
	for _ in $(seq 100); do
		find "$group" -depth -type d -exec rmdir {} + 2>/dev/null || true
		[ -d "$group" ] || break
		sleep 0.1
	done
	umount "$cgroups"
	rmdir "$cgroups"
}

inside() {
	local root=$1 pid name
	read -r pid _ </proc/self/stat # of the /proc of outside: our number there
	mount --bind "$root" "$root"
	mount -t proc proc "$root/proc"
	# What belongs to the whole machine is not for changing.
	for name in sys sysrq-trigger; do
		[ -e "$root/proc/$name" ] || continue
		mount --bind "$root/proc/$name" "$root/proc/$name"
		mount -o remount,bind,ro "$root/proc/$name"
	done
	mount -t sysfs -o ro sysfs "$root/sys"
	mount -t cgroup2 cgroup2 "$root/sys/fs/cgroup"
	mount -t tmpfs -o mode=755 tmpfs "$root/run"
	mount -t tmpfs tmpfs "$root/tmp"
	mount -t tmpfs -o mode=755 tmpfs "$root/dev"
	for name in null zero full random urandom tty; do
		touch "$root/dev/$name"
		mount --bind "/dev/$name" "$root/dev/$name"
	done
	mkdir "$root/dev/pts" "$root/dev/shm"
	mount -t devpts -o newinstance,ptmxmode=0666 devpts "$root/dev/pts"
	mount -t tmpfs tmpfs "$root/dev/shm"
	ln -s pts/ptmx "$root/dev/ptmx"
	ln -s /proc/self/fd "$root/dev/fd"
	hostname reconciler-test
	cd "$root"
	mkdir -p .outside
	pivot_root . .outside
	echo "$pid"
	# systemd leaves it to whoever boots a container that mounts, such as those of
	# credentials, reach the services.
	exec /usr/bin/env -i container=unshare PATH=/usr/sbin:/usr/bin:/sbin:/bin /bin/sh -c \
		'umount -l /.outside; mount --make-rshared /; exec /lib/systemd/systemd --system --log-target=journal --show-status=no' >&2
}

case "$1" in
inside) inside "$2" ;;
*)
	[ "${BOOT_IN_MOUNT_NAMESPACE:-}" = yes ] ||
		BOOT_IN_MOUNT_NAMESPACE=yes exec unshare --mount --propagation private "$0" "$@"
	outside "$1"
	;;
esac
