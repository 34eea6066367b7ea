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
];

/// Files in a circle that a module's need of its parent closes.
#[rustfmt::skip]
pub(crate) const PARENTS: &[&str] = &[
    "benches/src/costs/calls.rs",
    "benches/src/costs/mod.rs",
    "benches/src/costs/parts.rs",
    "benches/src/costs/proto.rs",
];

/// Files with comments or prose beyond column 100.
#[rustfmt::skip]
pub(crate) const WIDE: &[&str] = &[
    "tests/guest/kernel",
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
