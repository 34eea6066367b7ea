//! Generates the benchmark service from `proto/bench.proto`, without a protoc on the host. The same
//! messages get tonic's codec and the zero-copy codec.

fn main() -> Result<(), Box<dyn std::error::Error>> {
    let files = protox::compile(["proto/bench.proto"], ["proto"])?;
    println!("cargo:rerun-if-changed=proto/bench.proto");
    println!("cargo:rustc-env=BUILT_BY={}", compiler()?);
    tonic_prost_build::configure().bytes(".").compile_fds(files.clone())?;
    let out = std::path::Path::new(&std::env::var("OUT_DIR")?).join("zero_copy");
    std::fs::create_dir_all(&out)?;
    tonic_prost_build::configure()
        .codec_path("tonic_rdma::codec::ProstCodec")
        .extern_path(".tonic_rdma.bench.v1.Blob", "crate::pb::Blob")
        .out_dir(out)
        .compile_fds(files)?;
    Ok(())
}

/// The compiler's version string, for the record of counted costs.
fn compiler() -> Result<String, Box<dyn std::error::Error>> {
    let said = std::process::Command::new(std::env::var("RUSTC")?).arg("--version").output()?;
    Ok(String::from_utf8(said.stdout)?.trim().to_owned())
}
