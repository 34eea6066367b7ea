//! Generates the store's messages and stubs. `protox` compiles the `.proto` file in pure Rust, so
//! that no `protoc` is needed on the machine that builds.

type Error = Box<dyn std::error::Error>;

fn main() -> Result<(), Error> {
    let file = "proto/rpc_demo/v1/store.proto";
    println!("cargo:rerun-if-changed={file}");
    let descriptors = protox::compile([file], ["proto"])?;
    Ok(tonic_rdma_build::compile_fds(descriptors)?)
}
