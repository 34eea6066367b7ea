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
];

/// Files with comments or prose beyond column 100.
#[rustfmt::skip]
pub(crate) const WIDE: &[&str] = &[
    "tests/guest/kernel",
    "tests/src/lib.rs",
    "transport/tonic/src/connection/call/recv_body.rs",
    "transport/tonic/src/connection/config.rs",
    "transport/tonic/src/connection/receive/grant.rs",
    "transport/tonic/src/connection/receive/unread.rs",
    "transport/tonic/src/connection/send/write_window.rs",
];

/// Files with too many lines.
pub(crate) const LONG: &[&str] = &[];

/// Folders with too many files.
pub(crate) const FULL: &[&str] = &[];

/// Files with `unsafe` outside of memory and fabric.
pub(crate) const UNSAFE: &[&str] = &[];

/// Files with a sentence that was to go.
pub(crate) const SENTENCES: &[&str] = &[];
