//! The committed gRPC code is what the committed proto files give.
//!
//! To write it anew after a change of a proto file:
//! `TONIC_RDMA_REGENERATE=1 cargo test -p tonic-rdma --test generated`.

use std::{env, fs, path::Path};

struct Generated {
    root: &'static str,
    proto: &'static str,
    package: &'static str,
    committed: &'static str,
    codec: &'static str,
}

const ALL: [Generated; 2] = [
    Generated {
        root: "proto",
        proto: "proto/tonic_rdma/v1/bootstrap.proto",
        package: "tonic_rdma.v1.rs",
        committed: "src/bootstrap/generated/tonic_rdma.v1.rs",
        codec: "tonic_prost::ProstCodec",
    },
    Generated {
        root: "examples/zero_copy",
        proto: "examples/zero_copy/store.proto",
        package: "store.rs",
        committed: "examples/zero_copy/store.rs",
        codec: "tonic_rdma::codec::ProstCodec",
    },
];

#[test]
fn generated_code_is_current() {
    let root = Path::new(env!("CARGO_MANIFEST_DIR"));
    for Generated { root: include, proto, package, committed, codec } in ALL {
        let out = tempfile::tempdir().unwrap();
        let descriptors = protox::compile([root.join(proto)], [root.join(include)]).unwrap();
        tonic_prost_build::configure()
            .codec_path(codec)
            .bytes(".")
            .out_dir(out.path())
            .compile_fds(descriptors)
            .unwrap();
        let fresh = fs::read_to_string(out.path().join(package)).unwrap();
        let path = root.join(committed);
        if env::var_os("TONIC_RDMA_REGENERATE").is_some() {
            fs::write(&path, &fresh).unwrap();
        }
        assert!(
            fs::read_to_string(&path).is_ok_and(|text| text == fresh),
            "{committed} is not what {proto} gives; see the top of this test for how to write it anew"
        );
    }
}
