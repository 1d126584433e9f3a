#!/usr/bin/env bash
# Builds dist/reconciler_<version>_<arch>.deb:
#
#   deploy/package.sh [VERSION [ARCH]]
#
# VERSION is by default that of the newest tag, and of the commit behind it; ARCH
# that of this machine. Same commit, version and toolchain: same package.
set -euo pipefail
cd "$(dirname "$0")/.."

NFPM_VERSION=${NFPM_VERSION:?set it, or use make package}
GO=${GO:-go}

# 1.2.0 at tag v1.2.0, 1.2.0+5.gabc1234 five commits later, 1.3.0~rc.1 at
# v1.3.0-rc.1, which is older than 1.3.0, and before the first tag
# 0.0.0+5.gabc1234, which is older than every release.
commit_version() {
	local described
	if described=$(git describe --tags --match 'v[0-9]*' 2>/dev/null); then
		described=${described#v}
	else
		described=0.0.0-$(git rev-list --count HEAD)-g$(git rev-parse --short HEAD)
	fi
	sed -E 's/-([0-9]+)-(g[0-9a-f]+)$/+\1.\2/; s/-/~/g' <<<"$described"
}

VERSION=${1:-$(commit_version)}
ARCH=${2:-$($GO env GOARCH)}
SOURCE_DATE_EPOCH=${SOURCE_DATE_EPOCH:-$(git log -1 --format=%ct 2>/dev/null || date +%s)}
MAINTAINER='Seckill reconciler authors <maintainers@users.noreply.github.com>'
STAGE=dist/stage
export VERSION ARCH SOURCE_DATE_EPOCH MAINTAINER

rm -rf "$STAGE"
mkdir -p "$STAGE/man" "$STAGE/completion"

# The program of this machine writes the manual and the completions for each.
build=(build -trimpath -ldflags "-s -w -X main.version=$VERSION")
CGO_ENABLED=0 GOARCH=$ARCH "$GO" "${build[@]}" -o "$STAGE/reconciler" ./cmd/reconciler
native=$STAGE/reconciler
if [[ $ARCH != $($GO env GOHOSTARCH) ]]; then
	native=$STAGE/native
	CGO_ENABLED=0 GOARCH='' "$GO" "${build[@]}" -o "$native" ./cmd/reconciler
fi
"$native" man "$STAGE/man"
gzip -9n "$STAGE"/man/*
"$native" completion bash >"$STAGE/completion/reconciler.bash"
"$native" completion zsh >"$STAGE/completion/_reconciler"
"$native" completion fish >"$STAGE/completion/reconciler.fish"

# What the licenses of the libraries ask for: their text beside the program.
# shellcheck disable=SC2016 # the template's variables are not the shell's
GOARCH=$ARCH "$GO" list -deps -f '{{with .Module}}{{if not .Main}}{{.Path}} {{.Version}} {{.Dir}}{{end}}{{end}}' ./cmd/reconciler |
	sort -u | while read -r path version dir; do
	found=no
	for text in "$dir"/LICEN[CS]E* "$dir"/COPYING* "$dir"/NOTICE*; do
		if [[ -f $text ]]; then
			printf '\n==== %s %s: %s\n\n' "$path" "$version" "$(basename "$text")"
			cat "$text"
			found=yes
		fi
	done
	if [[ $found = no ]]; then
		echo "package.sh: $path $version comes without a license" >&2
		exit 1
	fi
done | gzip -9n >"$STAGE/licenses.gz"

{
	printf 'reconciler (%s) unstable; urgency=medium\n\n' "$VERSION"
	printf '  * What has changed is told in CHANGELOG.md at\n    https://github.com/seckill/reconciler.\n\n'
	printf ' -- %s  %s\n' "$MAINTAINER" "$(date -uR -d "@$SOURCE_DATE_EPOCH")"
} | gzip -9n >"$STAGE/changelog.gz"

"$GO" run "github.com/goreleaser/nfpm/v2/cmd/nfpm@$NFPM_VERSION" package \
	--config deploy/nfpm.yaml --packager deb --target "dist/reconciler_${VERSION}_${ARCH}.deb" >&2
echo "dist/reconciler_${VERSION}_${ARCH}.deb"
