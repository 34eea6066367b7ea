//! What breaks the rules still. These lists only get shorter: print them anew by
//! `cargo run -q -p tonic-rdma-source-rules -- --known` into this file.

/// Files that need each other.
#[rustfmt::skip]
pub(crate) const CIRCLES: &[&str] = &[
    "benches/src/allocator.rs",
    "benches/src/machine.rs",
    "benches/src/pair.rs",
    "benches/src/report.rs",
    "benches/src/results.rs",
    "rpc-demo/src/failure.rs",
    "rpc-demo/src/net.rs",
    "rpc-demo/src/service/get.rs",
    "rpc-demo/src/service/mod.rs",
    "tests/sim/src/figures.rs",
    "tests/sim/src/load.rs",
    "tests/sim/src/plan.rs",
    "tests/sim/src/run.rs",
    "tests/sim/src/runner.rs",
    "tests/sim/src/service.rs",
    "tests/sim/src/world.rs",
    "transport/tonic/src/channel/balance.rs",
    "transport/tonic/src/channel/mod.rs",
    "transport/tonic/src/channel/stack.rs",
    "transport/tonic/src/endpoint/mod.rs",
    "transport/tonic/src/server/fast.rs",
    "transport/tonic/src/server/listeners.rs",
    "transport/tonic/src/telemetry/metrics/meter.rs",
    "transport/tonic/src/telemetry/stats.rs",
];

/// Files in a circle that a module's need of its parent closes.
#[rustfmt::skip]
pub(crate) const PARENTS: &[&str] = &[
    "benches/src/costs/calls.rs",
    "benches/src/costs/mod.rs",
    "benches/src/costs/parts.rs",
    "benches/src/costs/proto.rs",
    "rpc-demo/src/bench/mod.rs",
    "rpc-demo/src/bench/report.rs",
    "rpc-demo/src/demo/mod.rs",
    "rpc-demo/src/demo/place.rs",
    "rpc-demo/src/store/mod.rs",
    "rpc-demo/src/store/upload.rs",
    "rpc-demo/src/transfer/job.rs",
    "rpc-demo/src/transfer/mod.rs",
    "rpc-demo/src/transfer/ranged.rs",
    "transport/tonic/src/bootstrap/client.rs",
    "transport/tonic/src/channel/attempt.rs",
    "transport/tonic/src/channel/manager.rs",
    "transport/tonic/src/channel/select.rs",
    "transport/tonic/src/channel/shards.rs",
    "transport/tonic/src/channel/shared.rs",
    "transport/tonic/src/context/device_monitor.rs",
    "transport/tonic/src/context/mod.rs",
    "transport/tonic/src/diagnose/cures.rs",
    "transport/tonic/src/diagnose/findings.rs",
    "transport/tonic/src/diagnose/kernel.rs",
    "transport/tonic/src/diagnose/local.rs",
    "transport/tonic/src/diagnose/loopback.rs",
    "transport/tonic/src/diagnose/memory.rs",
    "transport/tonic/src/diagnose/mod.rs",
    "transport/tonic/src/diagnose/peer.rs",
    "transport/tonic/src/diagnose/probe.rs",
    "transport/tonic/src/diagnose/sysfs.rs",
    "transport/tonic/src/endpoint/connector.rs",
    "transport/tonic/src/server/mod.rs",
    "transport/tonic/src/server/router.rs",
    "transport/tonic/src/server/serve.rs",
    "transport/tonic/src/server/stack.rs",
    "transport/tonic/src/tcp/retry.rs",
];

/// Files with comments or prose beyond column 100.
#[rustfmt::skip]
pub(crate) const WIDE: &[&str] = &[
    "tests/guest/kernel",
    "tests/src/lib.rs",
    "transport/fabric/src/self_test.rs",
    "transport/fabric/src/shm/mod.rs",
    "transport/fabric/src/sim/config.rs",
    "transport/fabric/src/sim/link/mod.rs",
    "transport/fabric/src/sim/mod.rs",
    "transport/tonic/src/codec/deframer.rs",
    "transport/tonic/src/connection/call/recv_body.rs",
    "transport/tonic/src/connection/config.rs",
    "transport/tonic/src/connection/receive/grant.rs",
    "transport/tonic/src/connection/receive/unread.rs",
    "transport/tonic/src/connection/send/write_window.rs",
    "transport/tonic/src/telemetry/metrics/pool.rs",
];

/// Files with too many lines.
pub(crate) const LONG: &[&str] = &[];

/// Folders with too many files.
#[rustfmt::skip]
pub(crate) const FULL: &[&str] = &[
    "transport/tonic/src/diagnose",
    "transport/tonic/src/tests",
];

/// Files with `unsafe` outside of memory and fabric.
pub(crate) const UNSAFE: &[&str] = &[];

/// Files with a sentence that was to go.
#[rustfmt::skip]
pub(crate) const SENTENCES: &[&str] = &[
    "transport/fabric/src/wake_gate.rs",
    "transport/proto/src/conn/receive.rs",
];
