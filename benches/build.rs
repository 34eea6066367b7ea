//! Generates the benchmark service from `proto/bench.proto`, without a protoc on the host.

fn main() -> Result<(), Box<dyn std::error::Error>> {
    let files = protox::compile(["proto/bench.proto"], ["proto"])?;
    println!("cargo:rerun-if-changed=proto/bench.proto");
    tonic_prost_build::configure().bytes(".").compile_fds(files)?;
    Ok(())
}
