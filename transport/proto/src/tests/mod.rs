//! Compares the bytes of everything on the wire with golden/frames.txt, and the layouts of the code
//! with docs/protocol.md.
//!
//! Each case is encoded and decoded, so a layout that changes at both ends fails here.

mod call;
mod frames;
mod headers;
mod hello;

use tonic_rdma_source_rules::golden::Golden;

fn golden() -> Golden {
    Golden::parse(include_str!("../../golden/frames.txt"))
}

/// Every case belongs to a test. Each file lists the prefixes of its cases.
#[test]
fn every_case_belongs_to_a_test() {
    let golden = golden();
    let prefixes: Vec<String> = frames::prefixes()
        .chain(hello::PREFIXES)
        .chain(["BLOCK/", "TABLE/", "CALL/"])
        .map(str::to_owned)
        .collect();
    for name in golden.names("") {
        let owned = prefixes.iter().any(|prefix| name.starts_with(prefix.as_str()));
        assert!(owned, "no test looks at {name}");
    }
}
