//! Generates the benchmark service from `proto/bench.proto`, without a protoc on the host. The
//! stubs are generated three times: for tonic's codec, the zero-copy codec and a codec of this
//! program.

fn main() -> Result<(), Box<dyn std::error::Error>> {
    let files = protox::compile(["proto/bench.proto"], ["proto"])?;
    println!("cargo:rerun-if-changed=proto/bench.proto");
    println!("cargo:rustc-env=BUILT_BY={}", compiler()?);
    tonic_prost_build::configure().bytes(".").compile_fds(files.clone())?;
    let codecs =
        [("zero_copy", "tonic_rdma::codec::ProstCodec"), ("own", "crate::own_codec::OwnCodec")];
    for (folder, codec) in codecs {
        let out = std::path::Path::new(&std::env::var("OUT_DIR")?).join(folder);
        std::fs::create_dir_all(&out)?;
        tonic_prost_build::configure()
            .codec_path(codec)
            .extern_path(".tonic_rdma.bench.v1.Blob", "crate::pb::Blob")
            .out_dir(out)
            .compile_fds(files.clone())?;
    }
    Ok(())
}

/// The compiler's version string, for the record of counted costs.
fn compiler() -> Result<String, Box<dyn std::error::Error>> {
    let said = std::process::Command::new(std::env::var("RUSTC")?).arg("--version").output()?;
    Ok(String::from_utf8(said.stdout)?.trim().to_owned())
}
