//! Generates the store's messages and stubs. `protox` compiles the `.proto` file in pure Rust, so
//! that no `protoc` is needed on the machine that builds.

type Error = Box<dyn std::error::Error>;

fn main() -> Result<(), Error> {
    let file = "proto/rpc_demo/v1/store.proto";
    println!("cargo:rerun-if-changed={file}");
    let descriptors = protox::compile([file], ["proto"])?;
    tonic_prost_build::configure()
        // `bytes` fields are sent from where they lie, and received as slices of what landed.
        .codec_path("tonic_rdma::codec::ProstCodec")
        .bytes(".")
        .compile_fds(descriptors)?;
    Ok(())
}
