//! Generates the test service and the Offer from their definitions, without a protoc on the host.

fn main() -> Result<(), Box<dyn std::error::Error>> {
    const BOOTSTRAP: &str = "../transport/tonic/proto";
    let bootstrap = format!("{BOOTSTRAP}/tonic_rdma/v1/bootstrap.proto");
    let sources = ["proto/conformance.proto", "proto/testing.proto", &bootstrap];
    let files = protox::compile(sources, ["proto", BOOTSTRAP])?;
    for source in sources {
        println!("cargo:rerun-if-changed={source}");
    }
    tonic_prost_build::configure()
        .bytes(".")
        .codec_path("crate::codec::TestCodec")
        .compile_fds(files)?;
    Ok(())
}
