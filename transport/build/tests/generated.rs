//! The generated code differs from tonic-prost-build's only in the codec, the channel and the type
//! of `bytes` fields.

#![allow(clippy::unwrap_used, reason = "a failed unwrap is a failed test")]

use std::fs;

use prost_types::FileDescriptorSet;
use tonic_rdma_build::Builder;
use tonic_rdma_source_rules::packages::source_of;

const PROTO: &str = r#"
syntax = "proto3";
package store.v1;
// Keeps blobs. Its clients are not of tonic::transport::Channel.
service Store {
    // Gets one.
    rpc Get(Name) returns (Blob);
    rpc Put(stream Blob) returns (Name);
}
message Name { string name = 1; }
message Blob { bytes data = 1; bytes checksum = 2; }
"#;

fn descriptors() -> FileDescriptorSet {
    let dir = tempfile::tempdir().unwrap();
    fs::write(dir.path().join("store.proto"), PROTO).unwrap();
    protox::compile(["store.proto"], [dir.path()]).unwrap()
}

fn generated(set: impl FnOnce(Builder) -> Builder) -> String {
    let out = tempfile::tempdir().unwrap();
    set(tonic_rdma_build::configure()).out_dir(out.path()).compile_fds(descriptors()).unwrap();
    fs::read_to_string(out.path().join("store.v1.rs")).unwrap()
}

fn by_tonic(set: impl FnOnce(tonic_prost_build::Builder) -> tonic_prost_build::Builder) -> String {
    let out = tempfile::tempdir().unwrap();
    set(tonic_prost_build::configure()).out_dir(out.path()).compile_fds(descriptors()).unwrap();
    fs::read_to_string(out.path().join("store.v1.rs")).unwrap()
}

/// Code without its layout, which depends on the length of lines.
fn tokens(code: &str) -> String {
    prettyplease::unparse(&syn::parse_file(code).unwrap())
}

#[test]
fn three_things_differ() {
    let theirs = by_tonic(|builder| builder.bytes("."))
        .replace("tonic_prost::ProstCodec", "tonic_rdma::codec::ProstCodec")
        .replace("<tonic::transport::Channel>", "<::tonic_rdma::Channel>")
        .replace("tonic::transport::Endpoint", "::tonic_rdma::Endpoint")
        .replace("tonic::transport::Error", "::tonic_rdma::Error");
    let ours = generated(|builder| builder);
    assert_eq!(tokens(&ours), tokens(&theirs));
    assert!(ours.contains("pub async fn connect<D>"), "{ours}");
    assert!(ours.contains("impl StoreClient<::tonic_rdma::Channel>"), "{ours}");
    // Comments are the user's own, and stay.
    assert!(ours.contains("not of tonic::transport::Channel"), "{ours}");
}

#[test]
fn settings_pass_through() {
    let client_only = generated(|builder| builder.build_server(false));
    assert!(client_only.contains("StoreClient") && !client_only.contains("StoreServer"));
    let server_only = generated(|builder| builder.build_client(false));
    assert!(!server_only.contains("StoreClient") && server_only.contains("StoreServer"));
    let neither = generated(|builder| builder.build_client(false).build_server(false));
    assert!(!neither.contains("Store") && neither.contains("pub struct Blob"));
    let no_connect = generated(|builder| builder.build_transport(false));
    assert!(!no_connect.contains("fn connect"));
    let derived = generated(|builder| builder.type_attribute(".", "#[derive(Ord)]"));
    assert!(derived.contains("#[derive(Ord)]"));
    let other = generated(|builder| builder.codec_path("crate::Codec"));
    assert!(other.contains("crate::Codec::default()") && !other.contains("ProstCodec"));
    let silent = generated(|builder| builder.disable_comments(["store.v1.Store"]));
    assert!(!silent.contains("Keeps blobs"));
}

#[test]
fn bytes_that_are_named_are_all() {
    let all = generated(|builder| builder);
    assert_eq!(all.matches("::prost::bytes::Bytes").count(), 2, "{all}");
    let named = generated(|builder| builder.bytes(".store.v1.Blob.data"));
    assert_eq!(named.matches("::prost::bytes::Bytes").count(), 1, "{named}");
    assert!(named.contains("pub checksum: ::prost::alloc::vec::Vec<u8>"), "{named}");
    let none = generated(|builder| builder.bytes_as_vec());
    assert_eq!(none.matches("::prost::alloc::vec::Vec<u8>").count(), 2, "{none}");
    assert!(!none.contains("::prost::bytes::Bytes"), "{none}");
}

#[test]
fn settings_of_prost_are_kept() {
    let out = tempfile::tempdir().unwrap();
    let mut config = prost_build::Config::new();
    config.enable_type_names().type_name_domain(["."], "example.com");
    let builder = tonic_rdma_build::configure().out_dir(out.path());
    builder.compile_fds_with_config(descriptors(), config).unwrap();
    let code = fs::read_to_string(out.path().join("store.v1.rs")).unwrap();
    assert!(code.contains("example.com/store.v1.Blob"), "{code}");
    assert!(code.contains("::tonic_rdma::Channel"), "{code}");
}

/// Fails if tonic-prost-build has a setting that this crate lacks.
#[test]
fn every_setting_of_tonic_prost_build_is_there() {
    const OWN: &[&str] = &[
        "bytes",
        "compile_fds",
        "compile_fds_with_config",
        "compile_protos",
        "compile_with_config",
        "disable_comments",
        "service_generator",
        "skip_debug",
    ];
    let source = fs::read_to_string(source_of("tonic-prost-build").join("lib.rs")).unwrap();
    let file = syn::parse_file(&source).unwrap();
    let theirs: Vec<String> = file
        .items
        .iter()
        .filter_map(|item| match item {
            syn::Item::Impl(block) if block.trait_.is_none() => Some(block),
            _ => None,
        })
        .filter(
            |block| matches!(&*block.self_ty, syn::Type::Path(of) if of.path.is_ident("Builder")),
        )
        .flat_map(|block| &block.items)
        .filter_map(|item| match item {
            syn::ImplItem::Fn(method) if matches!(method.vis, syn::Visibility::Public(_)) => {
                Some(method.sig.ident.to_string())
            }
            _ => None,
        })
        .collect();
    assert!(theirs.len() > 30, "tonic-prost-build's methods were not found: {theirs:?}");
    let missing: Vec<_> = theirs
        .iter()
        .filter(|name| {
            !Builder::PASSED_THROUGH.contains(&name.as_str()) && !OWN.contains(&name.as_str())
        })
        .collect();
    assert!(missing.is_empty(), "tonic-prost-build sets what this crate cannot: {missing:?}");
}
