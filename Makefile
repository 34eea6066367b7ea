# What a person types. Everything here also works by hand: see README.md and tests/README.md.
CARGO ?= cargo
export CARGO

.DEFAULT_GOAL := help
# Seeds that test-sim runs.
SEEDS ?= 3000

.PHONY: help build demo bench test test-native test-sim test-rdma sanitize kernel fmt clippy docs clean packages

help: ## list these targets
	@sed -n 's/^\([a-z-]*\):[^#]*## \(.*\)/  make \1\t\2/p' Makefile | expand -t 22

packages:
	@scripts/install-packages build

build: packages ## compile the workspace, optimised
	$(CARGO) build --workspace --release

demo: packages ## send about 1 GiB of files to a server process and back, compare, and report the path taken
	$(CARGO) run --release -p rpc-demo -- demo

test: test-native test-sim test-rdma ## run all tests, on this machine and in the guest

test-native: packages ## run the tests that need no RDMA device
	$(CARGO) test --workspace

test-sim: packages ## run the simulation: client and server under faults, one run for each of SEEDS seeds
	tests/sim/run test
	tests/sim/run seeds --count $(SEEDS)

test-rdma: ## run the tests over real verbs, in a guest kernel with Soft-RoCE and Soft-iWARP
	tests/guest/suite

sanitize: packages ## run the tests of memory, fabric and protocol under the address sanitizer, then under the thread sanitizer
	tests/sanitize address
	tests/sanitize thread

kernel: ## build the guest kernel, if it is not in the cache, and print its path
	@scripts/install-packages test
	@tests/guest/kernel

fmt: ## format the code
	$(CARGO) fmt --all

clippy: packages ## lint; a warning is an error
	$(CARGO) clippy --workspace --all-targets -- -D warnings

docs: packages ## build the API documentation; a warning is an error
	RUSTDOCFLAGS="-D warnings" $(CARGO) doc --workspace --no-deps

clean: ## remove what cargo built (the guest kernel stays in the user's cache)
	$(CARGO) clean
