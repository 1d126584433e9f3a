# Bare `make` lists the targets. Everything that is started or fetched stays under .run and .bin.

SHELL       := /bin/bash
.SHELLFLAGS := -euo pipefail -c
.DEFAULT_GOAL := help
MAKEFLAGS   += --no-print-directory

GO            ?= go
GOLANGCI_LINT := .bin/golangci-lint
GOLANGCI_LINT_VERSION := v2.15.0
GOVULNCHECK   := .bin/govulncheck
GOVULNCHECK_VERSION := v1.9.0
# The vulnerability database as a module: it comes through the module proxy and is the same for everyone.
VULNDB_VERSION := v0.0.0-20261105234957-e22db6528018
NFPM_VERSION  := v2.48.0
DEVSTACK      := .bin/devstack
RECONCILER    := .bin/reconciler

# make up CLUSTER=1 BROKERS=2
CLUSTER ?=
BROKERS ?= 1
# make test PKG=./internal/... TESTFLAGS='-run X -v'
PKG       ?= ./...
TESTFLAGS ?=
# make demo DEMOFLAGS='--users 3000 --units 1000'
DEMOFLAGS ?=

# Two packages at a time: they share one stack, and a machine may have two cores.
GOTEST    := $(GO) test -timeout 10m -p 2
WITH_TEST_STACK = $(DEVSTACK) with --dir .run/test --for-tests --

.PHONY: help
help: ## list the targets
	@awk -F ':.*## ' '/^[a-z][a-z-]*:.*## / { printf "  make %-12s %s\n", $$1, $$2 }' $(MAKEFILE_LIST)

.PHONY: up
up: $(DEVSTACK) build ## start Redis, PostgreSQL and RocketMQ, write .run/env (CLUSTER=1, BROKERS=2)
	@$(DEVSTACK) up $(if $(CLUSTER),--cluster) --brokers $(BROKERS) --binary $(RECONCILER)
	@. .run/env && $(RECONCILER) migrate up --with-reference >&2

.PHONY: down
down: $(DEVSTACK) ## end what `make up` started and remove its data
	@$(DEVSTACK) down

.PHONY: demo
demo: build ## break a whole flash sale and watch the daemon repair it; leaves .run/demo/report.md (DEMOFLAGS='--seed 7')
	@$(RECONCILER) demo $(DEMOFLAGS)

.PHONY: build
build: ## build the daemon, .bin/reconciler
	@$(GO) build -o $(RECONCILER) ./cmd/reconciler

# make package VERSION=1.2.0 ARCH=arm64
VERSION ?=
ARCH    ?=

.PHONY: package
package: ## build the Debian package, dist/reconciler_*.deb (VERSION=1.2.0 ARCH=arm64)
	@GO='$(GO)' NFPM_VERSION='$(NFPM_VERSION)' deploy/package.sh '$(VERSION)' '$(ARCH)'

.PHONY: test
test: $(DEVSTACK) $(GOLANGCI_LINT) ## vet, lint and test on real services (PKG=./lua/..., TESTFLAGS='-run X')
	$(GO) vet ./...
	$(GOLANGCI_LINT) config verify
	$(GOLANGCI_LINT) run ./...
	$(WITH_TEST_STACK) $(GOTEST) $(TESTFLAGS) $(PKG)

.PHONY: test-slow
test-slow: $(DEVSTACK) ## only the slow tests: faults and installation
	$(WITH_TEST_STACK) $(GO) test -timeout 30m -p 1 -tags slow -run '^TestSlow' $(TESTFLAGS) $(PKG)

.PHONY: test-package
test-package: $(DEVSTACK) ## only the slow tests of the package: it is installed on a Debian 12 that systemd runs (as root)
	$(WITH_TEST_STACK) $(GO) test -timeout 20m -count 1 -tags slow -v $(TESTFLAGS) ./deploy

# make soak SOAK=30m
SOAK ?= 10m
.PHONY: soak
soak: $(DEVSTACK) ## sell a hot scope under full load while it is reconciled, for ten minutes (SOAK=30m)
	@$(GO) test -timeout 3h -count 1 -tags slow -run '^TestSlowHotScope$$' -v ./internal/daemon -soak $(SOAK)

.PHONY: test-all
test-all: test test-slow ## everything: test and test-slow

.PHONY: test-up
test-up: $(DEVSTACK) ## start the shared test stack and leave it running, for `go test` by hand
	@$(DEVSTACK) up --dir .run/test --for-tests

.PHONY: test-down
test-down: $(DEVSTACK) ## end the shared test stack
	@$(DEVSTACK) down --dir .run/test

.PHONY: bench
bench: $(DEVSTACK) ## each stage of the daemon and each level of a reconciliation beside bare loops of the same round trips, as ratios
	@$(WITH_TEST_STACK) $(GO) test -timeout 30m -count 1 -p 1 -tags bench -run '^TestBench' -v $(TESTFLAGS) ./internal/daemon ./reconcile ./client

.PHONY: lint
lint: $(GOLANGCI_LINT) ## run the linters (make lint FIX=1 corrects what it can)
	$(GOLANGCI_LINT) config verify
	$(GOLANGCI_LINT) run $(if $(FIX),--fix) ./...

.PHONY: vuln
vuln: $(GOVULNCHECK) ## look for known vulnerabilities in what the daemon calls
	@db=$$($(GO) mod download -json golang.org/x/vulndb@$(VULNDB_VERSION) | sed -n 's/^\t"Dir": "\(.*\)",$$/\1/p'); \
	$(GOVULNCHECK) -db "file://$$db/data/osv" ./cmd/reconciler

.PHONY: cover
cover: $(DEVSTACK) ## test with coverage of all packages, written to coverage.out
	$(WITH_TEST_STACK) $(GOTEST) -coverpkg ./... -coverprofile coverage.out $(TESTFLAGS) $(PKG)
	$(GO) tool cover -func coverage.out | tail -1

.PHONY: clean
clean: down test-down ## end all stacks and remove what was built and fetched
	rm -rf .bin .run dist coverage.out

# Compiling them again is a cache hit if nothing changed.
.PHONY: $(DEVSTACK)
$(DEVSTACK):
	@$(GO) build -o $@ ./internal/devstack/cmd/devstack

# Each tool is built once per version.
.PHONY: $(GOLANGCI_LINT)
$(GOLANGCI_LINT):
	@if ! $@ version --short 2>/dev/null | grep -qx '$(GOLANGCI_LINT_VERSION:v%=%)'; then \
		echo 'building golangci-lint $(GOLANGCI_LINT_VERSION), which takes two minutes once' >&2; \
		GOBIN='$(CURDIR)/.bin' $(GO) install github.com/golangci/golangci-lint/v2/cmd/golangci-lint@$(GOLANGCI_LINT_VERSION); \
	fi

.PHONY: $(GOVULNCHECK)
$(GOVULNCHECK):
	@if ! $(GO) version -m $@ 2>/dev/null | grep -q 'golang.org/x/vuln[[:space:]]$(GOVULNCHECK_VERSION)'; then \
		GOBIN='$(CURDIR)/.bin' $(GO) install golang.org/x/vuln/cmd/govulncheck@$(GOVULNCHECK_VERSION); \
	fi
