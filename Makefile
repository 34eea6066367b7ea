# What a person types. Everything here also works by hand: see README.md and tests/README.md.
CARGO ?= cargo
export CARGO

.DEFAULT_GOAL := help
# Seeds that test-sim runs.
SEEDS ?= 3000
# Time that soak takes.
MINUTES ?= 60

.PHONY: help build demo bench bench-rdma scale costs costs-record test test-source test-native \
    test-sim test-costs test-large test-rdma test-rdma-core test-rdma-qemu soak sanitize kernel fmt \
    clippy docs clean packages

help: ## list these targets
	@sed -n 's/^\([a-z-]*\):[^#]*## \(.*\)/  make \1\t\2/p' Makefile | expand -t 22

packages:
	@scripts/install-packages build

build: packages ## compile the workspace, optimised
	$(CARGO) build --workspace --release

demo: packages ## send about 1 GiB of files to a server process and back, over TCP, over the best path, and beside cp -r
	$(CARGO) run --release -p rpc-demo -- demo

bench: ## compare tonic and tonic-rdma over TCP, a unix socket and shared memory on this machine, in a table, JSON and plots
	@scripts/install-packages bench
	$(CARGO) build --release -p benches --bins
	$(CARGO) run --release -p benches --bin compare -- --rows full --counts --json target/bench.json --plots target/bench

bench-rdma: ## compare over real verbs with tonic over TCP, bare verbs and other transports over RDMA, in the guest, on both devices
	@scripts/install-packages bench
	benches/in-guest

scale: ## show what connections and streams cost: memory, descriptors, and the cost of a call beside them
	@scripts/install-packages bench
	$(CARGO) run --release -p benches --bin scale

costs: ## show what calls cost in instructions, allocations, messages and doorbells, beside the record
	@scripts/install-packages bench
	$(CARGO) run --release -p benches --bin costs

costs-record: ## count again, and write the record (benches/costs.toml), to be committed with what changed it
	@scripts/install-packages bench
	$(CARGO) run --release -p benches --bin costs -- --record

STARTED := $(shell date +%s)
test: test-source test-native test-sim test-costs test-rdma test-rdma-core ## run all tests, on this machine and in the guest
	@tests/figures $(STARTED)

test-source: ## check the source: import circles, widths of comments, sizes, unsafe, wording
	$(CARGO) test -p tonic-rdma-source-rules

test-native: packages ## run the tests that need no RDMA device
	$(CARGO) test --workspace
	@tests/rdma-core ran

test-sim: packages ## run the simulation: client and server under faults, one run for each of SEEDS seeds
	tests/sim/run test
	@mkdir -p $${CARGO_TARGET_DIR:-target}/figures
	bash -o pipefail -c 'tests/sim/run seeds --count $(SEEDS) | tee $${CARGO_TARGET_DIR:-target}/figures/sim'

test-costs: ## fail when calls cost over 5 % more than recorded
	@scripts/install-packages bench
	$(CARGO) run --release -p benches --bin costs -- --check

test-rdma: ## run the tests over real verbs, in a guest kernel with Soft-RoCE and Soft-iWARP
	tests/guest/suite

test-rdma-core: ## run the native tests that may load rdma-core with its libraries and without (behind test-native: the other way than it did)
	@scripts/install-packages test
	tests/rdma-core $(STARTED)

test-large: packages ## move 10,000 small files and two of 4 GiB over TCP, over shared memory, and over RDMA in the guest (20 GB of disk)
	$(CARGO) test --release -p rpc-demo --test large -- --nocapture
	RPC_DEMO_TEST_SHM=1 $(CARGO) test --release -p rpc-demo --test large -- --nocapture
	TONIC_RDMA_TEST_LARGE=1 tests/guest/suite '^large'

test-rdma-qemu: ## run a part of test-rdma on Debian's own kernel under QEMU, with two CPUs (no KVM needed; slow)
	TONIC_RDMA_TEST_QEMU=1 tests/guest/suite '^qemu'

soak: ## load and random faults for MINUTES: on Soft-RoCE, Soft-iWARP, shared memory, and in the simulation
	tests/soak $(MINUTES)

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
	$(CARGO) clippy -p tonic-rdma-tests -p tonic-rdma-fabric --features tonic-rdma-fabric/guest-tests --tests --test faults -- -D warnings
	$(CARGO) clippy -p tonic-rdma --no-default-features -- -D warnings
	$(CARGO) clippy -p tonic-rdma --no-default-features --features shm -- -D warnings
	$(CARGO) clippy -p tonic-rdma --no-default-features --features verbs -- -D warnings

docs: packages ## build the API documentation; a warning is an error
	RUSTDOCFLAGS="-D warnings" $(CARGO) doc --workspace --no-deps

clean: ## remove what cargo built (the guest kernel stays in the user's cache)
	$(CARGO) clean
