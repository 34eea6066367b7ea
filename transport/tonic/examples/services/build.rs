//! Generates the examples' services without a protoc on the host. With protoc, `compile_protos`
//! replaces `protox::compile` and `compile_fds`.

fn main() -> Result<(), Box<dyn std::error::Error>> {
    println!("cargo:rerun-if-changed=proto");
    // Existing services, unchanged.
    let plain = protox::compile(["proto/greeter.proto", "proto/numbers.proto"], ["proto"])?;
    tonic_prost_build::configure().compile_fds(plain)?;
    // A service whose `bytes` fields are not copied, and whose `connect` makes our channel.
    let store = protox::compile(["proto/store.proto"], ["proto"])?;
    Ok(tonic_rdma_build::compile_fds(store)?)
}
