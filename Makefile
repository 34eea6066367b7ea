# Targets for people to run. Everything here also works by hand: see README.md and tests/README.md.
CARGO ?= cargo
export CARGO

.DEFAULT_GOAL := help
# The directory in which cargo builds.
TARGET := $(abspath $(or $(CARGO_TARGET_DIR),target))
# Minutes that soak runs.
MINUTES ?= 60

.PHONY: help build demo bench neighbours bench-rdma scale scale-rdma costs costs-record test test-all \
    test-more more-and-checks checks quick test-source test-native test-interop test-patched \
    test-upstream test-sim test-seeds test-conformance test-ecosystem test-costs test-large test-rdma \
    test-rdma-core test-rdma-qemu test-kernels test-aarch64 test-aarch64-guest test-deploy \
    bench-check tools-rdma man soak \
    sanitize kernel fmt fmt-check clippy docs features bindings rust-version minimal-versions \
    targets dependencies package semver clean packages

help: ## list these targets
	@sed -n 's/^\([a-z0-9-]*\):[^#]*## \(.*\)/  make \1\t\2/p' Makefile | expand -t 22

packages:
	@scripts/install-packages workspace

build: packages ## compile the workspace, optimised
	$(CARGO) build --workspace --release

demo: ## send 1 GiB of files to a server and back: TCP, the best path, cp -r (five minutes)
	@scripts/check-machine demo
	@scripts/install-packages build
	@[ -e $(TARGET)/release/rpc-demo ] || echo 'demo: compiles for about three minutes on two cores, then runs for one'
	$(CARGO) run --release -p rpc-demo -- demo --lend

bench: ## compare tonic and tonic-rdma on this machine: a table, JSON and plots
	@scripts/install-packages bench
	$(CARGO) build --release -p benches --bins
	$(CARGO) run --release -p benches --bin compare -- --rows full --counts --json $(TARGET)/bench.json --plots $(TARGET)/bench
	$(CARGO) run --release -p benches --bin compare -- --rows handover --contenders shm-lent,shm --allocators glibc --json $(TARGET)/bench-handover.json
	cd benches/neighbours && $(CARGO) build --release --no-default-features --target-dir $(TARGET)/neighbours
	$(CARGO) run --release -p benches --bin compare -- --rows handover --contenders iceoryx2 --allocators glibc --neighbours $(TARGET)/neighbours/release/neighbours --json $(TARGET)/bench-handover-iceoryx2.json

neighbours: ## compile the contenders of other projects
	@scripts/install-packages neighbours
	cd benches/neighbours && $(CARGO) check --target-dir $(TARGET)/neighbours

bench-rdma: ## compare over real verbs, in the guest and between two guests, on both devices
	@scripts/install-packages bench
	benches/in-guest
	benches/in-guest --between

tools-rdma: ## compare the doctor's bare figures with perftest and qperf, in the guest
	tests/guest/tools

scale: ## measure many clients, connections and streams on this machine: tables, JSON and plots
	@scripts/install-packages bench
	$(CARGO) run --release -p benches --bin scale -- --json $(TARGET)/scale.json --plots $(TARGET)/scale

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
# Incremental compilation takes longer the first time, and twice the disk space.
test test-all: export CARGO_INCREMENTAL := $(or $(CARGO_INCREMENTAL),0)
# The steps of `make test` one after the other, those that run at the same time, and all other
# tests. Guests leave a part of the processors idle.
TESTS := test-source test-native
TESTS_BESIDE := test-sim test-conformance
MORE_TESTS := test-ecosystem test-interop test-patched test-seeds test-costs test-rdma test-rdma-core bench-check
CHECKS := fmt-check clippy features docs bindings rust-version targets dependencies semver
# These checks compile in directories of their own, so they need not wait for the others.
CHECKS_BESIDE := package minimal-versions
# The guest kernel takes minutes to build, and test-conformance needs it.
AHEAD = scripts/install-packages workspace && scripts/install-packages test && tests/guest/kernel --ahead
steps = @for step in $(1); do \
	    scripts/timed $$step $(NICE) $(MAKE) --no-print-directory $$step STARTED=$(STARTED) || exit; \
	done
# The output of each step appears when the step ends.
beside = @$(MAKE) --no-print-directory -j$(words $(1)) --output-sync=target $(addprefix timed-,$(1)) STARTED=$(STARTED)
timed-%:
	$(call steps,$*)

test: ## run the tests, on this machine and over real verbs in the guest
	@scripts/check-machine test
	@$(AHEAD)
	$(call steps,$(TESTS))
	$(call beside,$(TESTS_BESIDE))

test-all: ## run all tests
	@scripts/check-machine test-all
	@$(AHEAD)
	$(call steps,$(TESTS))
	$(call beside,$(TESTS_BESIDE))
	$(call steps,$(MORE_TESTS))
	@tests/figures $(STARTED)

test-more: ## run the tests of test-all that test leaves out
	$(call steps,$(MORE_TESTS))
	@tests/figures $(STARTED)

# Guests leave a part of the processors idle, so steps that compile or wait run at the same time.
# Counts and measurements of speed have the machine to themselves.
BESIDE_RDMA := test-ecosystem test-interop test-patched test-rdma-core
more-and-checks: ## run test-more and checks, most of them beside test-rdma
	$(call steps,$(filter-out test-rdma bench-check $(BESIDE_RDMA),$(MORE_TESTS)))
	@$(MAKE) --no-print-directory -j3 --output-sync=target timed-test-rdma more-and-checks-in-turn checks-beside STARTED=$(STARTED)
	$(call steps,bench-check)
	@tests/figures $(STARTED)

checks: ## run what CI checks besides tests: lints, documentation, features, versions, packages
	@$(MAKE) --no-print-directory -j2 --output-sync=target checks-in-turn checks-beside STARTED=$(STARTED)

.PHONY: checks-in-turn checks-beside more-and-checks-in-turn
checks-in-turn:
	$(call steps,$(CHECKS))

# The guests take longest, so the steps beside them leave them the processors.
more-and-checks-in-turn checks-beside: NICE := nice -n 5
more-and-checks-in-turn:
	$(call steps,$(filter-out test-rdma-core,$(BESIDE_RDMA)) $(CHECKS) test-rdma-core)

checks-beside:
	$(call steps,$(CHECKS_BESIDE))

quick: ## check the format, lint, and run unit tests and 100 seeds of the simulation
	@$(MAKE) --no-print-directory fmt-check clippy
	scripts/cargo-members test --lib --bins
	@$(MAKE) --no-print-directory test-sim SEEDS=100

test-source: packages ## check the source: import circles, line widths, sizes, unsafe, wording
	scripts/cargo-members test --test rules --test made_up

test-native: packages ## run the tests that need no RDMA device
	scripts/test-programs
	@tests/rdma-core ran

# Root takes the same path through the devices, so the cases as root are left to test-rdma.
CONFORMANCE := ^(guest: .*|conformance: .*, ordinary user)$$
test-conformance: ## run the conformance suite over real verbs, in a guest with both devices
	tests/guest/suite '$(CONFORMANCE)'

test-ecosystem: packages ## run libraries around tonic, and Arrow Flight, over tonic-rdma
	$(CARGO) test --workspace --test ecosystem --test flight

test-interop: ## call gRPC's Python implementation, and be called by it
	@scripts/install-packages interop
	tests/interop/run

test-patched: packages ## test a program with tonic-prost patched, and patches that are wrong
	tests/patched/run

test-upstream: packages ## run tonic's own tests from the checkout of tonic in TONIC, on each fabric
	@[ -n "$(TONIC)" ] || { echo 'set TONIC to a git checkout of https://github.com/hyperium/tonic' >&2; exit 2; }
	@scripts/install-packages test
	tests/upstream/run "$(TONIC)"

test-sim: packages ## run the simulation under faults, one run for each of SEEDS seeds (300)
	tests/sim/run seeds --count $(or $(SEEDS),300)

test-seeds: packages ## run 3,000 seeds of the simulation, and the tests of its oracle
	tests/sim/run test
	@mkdir -p $(TARGET)/figures
	bash -o pipefail -c 'tests/sim/run seeds --count $(or $(SEEDS),3000) | tee $(TARGET)/figures/sim'

test-costs: ## fail when calls cost over 5 % more than recorded
	@scripts/install-packages bench
	$(CARGO) build --release -p benches -p tonic-rdma-example-flight --bins
	$(TARGET)/release/costs --check

test-rdma: ## run all else over real verbs in the guest: faults, limits, rpc-demo, its doctor
	tests/guest/suite --except '$(CONFORMANCE)'

# After test-native, only the way (with the libraries or without) that test-native did not take.
test-rdma-core: ## run the native tests that may load rdma-core with its libraries and without
	@scripts/install-packages test
	tests/rdma-core $(STARTED)

bench-check: ## hold speeds over real verbs to bounds, as ratios, in the guest
	tests/guest/speed

test-large: packages ## messages of 1 GiB, two files of 4 GiB and 10,000 small ones, by path (20 GB)
	$(CARGO) test --release -p tonic-rdma-tests --test hosts -- --ignored
	$(CARGO) test --release -p rpc-demo --test large -- --nocapture
	RPC_DEMO_TEST_SHM=1 $(CARGO) test --release -p rpc-demo --test large -- --nocapture
	TONIC_RDMA_TEST_LARGE=1 tests/guest/suite '^large'

# Soft-RoCE was rewritten since Linux 6.1: see docs/hardware.md.
KERNELS := ^(guest|conformance|land in|verbs|faults, [A-Za-z ]+|type of service|two rails.*|connections|hosts):
test-kernels: ## run conformance, verbs and faults in a guest with Linux 6.12 (long)
	TONIC_RDMA_LINUX=6.12 tests/guest/suite --except '^(hosts: siw, large|faults, a bond: rxe)' '$(KERNELS)'

test-rdma-qemu: ## run a part of test-rdma on Debian's own kernel under QEMU, with two CPUs (slow)
	TONIC_RDMA_TEST_QEMU=1 tests/guest/suite '^qemu'

test-aarch64: ## run the tests of protocol and bindings for AArch64, under qemu-user
	tests/aarch64

test-aarch64-guest: ## run the tests of memory and shared memory for AArch64, under QEMU
	tests/aarch64-guest

test-deploy: ## build the image of deploy/ without Docker; start it, its pods and its unit (as root)
	tests/deploy/run

man: packages ## write the man pages of rpc-demo and tonic-rdma-doctor to target/man
	@mkdir -p $(TARGET)/man
	MAN_PAGES=$(TARGET)/man scripts/cargo-members test -q --bin rpc-demo --bin tonic-rdma-doctor man_page
	@ls $(TARGET)/man

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

fmt-check: ## fail when the code is not formatted
	$(CARGO) fmt --all --check

# The second line has the test targets that are built only when they are named.
UNNAMED := conformance faults verbs verbs_processes removal large durable disk_full doctor_guest doctor_between fork_device oracle
clippy: packages ## lint; a warning is an error
	$(CARGO) clippy --workspace --all-targets -- -D warnings
	$(CARGO) clippy --workspace $(UNNAMED:%=--test=%) -- -D warnings

docs: packages ## build the API documentation as docs.rs does; a warning is an error
	scripts/check-docs

features: packages ## lint the library with each cargo feature by itself, with none and with all
	scripts/check-features

bindings: ## compare the bindings of rdma-core with its headers and libraries
	scripts/check-bindings

rust-version: packages ## compile the library with the lowest Rust that Cargo.toml declares
	scripts/check-rust-version

minimal-versions: packages ## compile the library with the lowest versions that its manifests allow
	scripts/check-minimal-versions

targets: packages ## compile the library for macOS, Windows, Linux on arm64 and Linux with musl
	scripts/check-targets

dependencies: ## check versions, licences, sources and advisories of the dependencies
	scripts/check-dependencies

package: packages ## package what is published, and build a new program on the packages
	scripts/check-packages

semver: packages ## compare the public API with that of the last tag
	scripts/check-semver

clean: ## remove what cargo built (the guest kernel stays in the user's cache)
	$(CARGO) clean

# Seconds that fuzz runs each target.
SECONDS_EACH ?= 300
.PHONY: fuzz update-check
fuzz: ## run each fuzz target for SECONDS_EACH, under the address sanitizer
	@scripts/install-packages fuzz
	tests/fuzz/run $(SECONDS_EACH)

update-check: packages ## update all dependencies in a copy, then check, compile and test that
	scripts/check-update
