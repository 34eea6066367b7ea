//! Generates the test service from `proto/conformance.proto`, without a protoc on the host.

fn main() -> Result<(), Box<dyn std::error::Error>> {
    let files = protox::compile(["proto/conformance.proto"], ["proto"])?;
    println!("cargo:rerun-if-changed=proto/conformance.proto");
    tonic_prost_build::configure().bytes(".").codec_path("crate::codec::Chosen").compile_fds(files)?;
    Ok(())
}
