# What a person types. Everything here also works by hand: see README.md and tests/README.md.
CARGO ?= cargo
export CARGO

.DEFAULT_GOAL := help
# Seeds that test-sim runs.
SEEDS ?= 3000
# Time that soak takes.
MINUTES ?= 60

.PHONY: help build demo bench bench-rdma scale scale-rdma costs costs-record test test-source \
    test-native test-interop test-patched test-upstream test-sim test-costs test-large test-rdma \
    test-rdma-core test-rdma-qemu soak sanitize kernel fmt clippy docs features bindings \
    rust-version dependencies package semver clean packages

help: ## list these targets
	@sed -n 's/^\([a-z-]*\):[^#]*## \(.*\)/  make \1\t\2/p' Makefile | expand -t 22

packages:
	@scripts/install-packages workspace

build: packages ## compile the workspace, optimised
	$(CARGO) build --workspace --release

demo: ## send 1 GiB of files to a server and back, over TCP, the best path, and cp -r
	@scripts/install-packages build
	$(CARGO) run --release -p rpc-demo -- demo

bench: ## compare tonic and tonic-rdma on this machine: a table, JSON and plots
	@scripts/install-packages bench
	$(CARGO) build --release -p benches --bins
	$(CARGO) run --release -p benches --bin compare -- --rows full --counts --json target/bench.json --plots target/bench
	$(CARGO) run --release -p benches --bin compare -- --rows handover --contenders shm-lent,shm --allocators glibc --json target/bench-handover.json
	cd benches/neighbours && $(CARGO) build --release --no-default-features --target-dir ../../target/neighbours
	$(CARGO) run --release -p benches --bin compare -- --rows handover --contenders iceoryx2 --allocators glibc --neighbours target/neighbours/release/neighbours --json target/bench-handover-iceoryx2.json

bench-rdma: ## compare over real verbs, in the guest and between two guests, on both devices
	@scripts/install-packages bench
	benches/in-guest
	benches/in-guest --between

scale: ## measure many clients, connections and streams on this machine: tables, JSON and plots
	@scripts/install-packages bench
	$(CARGO) run --release -p benches --bin scale -- --json target/scale.json --plots target/scale

scale-rdma: ## measure them over real verbs, in the guest, on both devices
	@scripts/install-packages bench
	benches/in-guest --scale

costs: ## show what calls cost in instructions, allocations, messages and doorbells
	@scripts/install-packages bench
	$(CARGO) run --release -p benches --bin costs

costs-record: ## count again, and write the record, benches/costs.toml
	@scripts/install-packages bench
	$(CARGO) run --release -p benches --bin costs -- --record

STARTED := $(or $(STARTED),$(shell date +%s))
TESTS := test-source test-native test-interop test-patched test-sim test-costs test-rdma test-rdma-core
test: ## run all tests, on this machine and in the guest
	@for step in $(TESTS); do \
	    scripts/timed $$step $(MAKE) --no-print-directory $$step STARTED=$(STARTED) || exit; \
	done
	@tests/figures $(STARTED)

test-source: packages ## check the source: import circles, line widths, sizes, unsafe, wording
	$(CARGO) test -p tonic-rdma-source-rules

test-native: packages ## run the tests that need no RDMA device
	$(CARGO) test --workspace
	@tests/rdma-core ran

test-interop: ## call gRPC's Python implementation, and be called by it
	@scripts/install-packages interop
	tests/interop/run

test-patched: packages ## test a program with tonic-prost patched, and patches that are wrong
	tests/patched/run

test-upstream: packages ## run tonic's own tests from the checkout of tonic in TONIC, on each fabric
	@[ -n "$(TONIC)" ] || { echo 'set TONIC to a git checkout of https://github.com/hyperium/tonic' >&2; exit 2; }
	@scripts/install-packages test
	tests/upstream/run "$(TONIC)"

test-sim: packages ## run the simulation under faults, one run for each of SEEDS seeds
	tests/sim/run test
	@mkdir -p $${CARGO_TARGET_DIR:-target}/figures
	bash -o pipefail -c 'tests/sim/run seeds --count $(SEEDS) | tee $${CARGO_TARGET_DIR:-target}/figures/sim'

test-costs: ## fail when calls cost over 5 % more than recorded
	@scripts/install-packages bench
	$(CARGO) run --release -p benches --bin costs -- --check

test-rdma: ## run the tests over real verbs, in a guest kernel with Soft-RoCE and Soft-iWARP
	tests/guest/suite

# Behind test-native, only the way that it did not go.
test-rdma-core: ## run the native tests that may load rdma-core with its libraries and without
	@scripts/install-packages test
	tests/rdma-core $(STARTED)

test-large: packages ## move 10,000 small files and two of 4 GiB over each path (20 GB of disk)
	$(CARGO) test --release -p rpc-demo --test large -- --nocapture
	RPC_DEMO_TEST_SHM=1 $(CARGO) test --release -p rpc-demo --test large -- --nocapture
	TONIC_RDMA_TEST_LARGE=1 tests/guest/suite '^large'

test-rdma-qemu: ## run a part of test-rdma on Debian's own kernel under QEMU, with two CPUs (slow)
	TONIC_RDMA_TEST_QEMU=1 tests/guest/suite '^qemu'

soak: ## load and random faults for MINUTES on every fabric, real and simulated
	tests/soak $(MINUTES)

sanitize: packages ## run tests under the address sanitizer, then under the thread sanitizer
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

docs: packages ## build the API documentation; a warning is an error
	RUSTDOCFLAGS="-D warnings" $(CARGO) doc --workspace --no-deps --all-features

features: packages ## lint the library with each cargo feature by itself, with none and with all
	scripts/check-features

bindings: ## compare the bindings of rdma-core with its headers and libraries
	scripts/check-bindings

rust-version: packages ## compile the library with the lowest Rust that Cargo.toml declares
	scripts/check-rust-version

dependencies: ## check versions, licences, sources and advisories of the dependencies
	scripts/check-dependencies

package: packages ## package what is published, and build a new program on the packages
	scripts/check-packages

semver: packages ## compare the public API with that of the last tag
	scripts/check-semver

clean: ## remove what cargo built (the guest kernel stays in the user's cache)
	$(CARGO) clean
