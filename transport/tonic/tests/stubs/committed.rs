//! The committed gRPC code matches the committed proto file. The code is committed so that users of
//! the crate need no compiler for proto files.
//!
//! To regenerate the code after a change to the proto file:
//! `TONIC_RDMA_REGENERATE=1 cargo test -p tonic-rdma --test stubs`.

use std::path::Path;
use std::{env, fs};

const PROTO: &str = "proto/tonic_rdma/v1/bootstrap.proto";
const COMMITTED: &str = "src/bootstrap/generated/tonic_rdma.v1.rs";

#[test]
fn generated_code_is_current() {
    let root = Path::new(env!("CARGO_MANIFEST_DIR"));
    let out = tempfile::tempdir().unwrap();
    let descriptors = protox::compile([root.join(PROTO)], [root.join("proto")]).unwrap();
    tonic_prost_build::configure().bytes(".").out_dir(out.path()).compile_fds(descriptors).unwrap();
    let fresh = fs::read_to_string(out.path().join("tonic_rdma.v1.rs")).unwrap();
    let path = root.join(COMMITTED);
    if env::var_os("TONIC_RDMA_REGENERATE").is_some() {
        fs::write(&path, &fresh).unwrap();
    }
    assert!(
        fs::read_to_string(&path).is_ok_and(|text| text == fresh),
        "{COMMITTED} is not what {PROTO} gives; see the top of this test for how to regenerate it"
    );
}
