//! Compares the public API with `tonic::transport` of the version in Cargo.lock. Each of tonic's
//! items exists here under the same path below the crate's root, or is in [`DIFFERENCES`] with a
//! reason. [`pool`] checks the one type that must not do more than what it is for.

#![allow(clippy::unwrap_used, reason = "a failed unwrap is a failed test")]

mod drop_in;
mod pool;
mod surface;

use std::collections::BTreeSet;
use std::path::Path;

use surface::Surface;
use tonic_rdma_source_rules::packages::source_of;

/// tonic's items that this crate lacks, or has with another signature, and why.
const DIFFERENCES: &[(&str, &str)] = &[];

/// Types that this crate defines. All other types are tonic's, and only their names are compared.
const TYPES: &[&str] = &["Server", "Router", "Endpoint", "Channel", "ResponseFuture"];

/// Returns the differences that are not listed, and the mistakes in the list.
fn faults(theirs: &Surface, ours: &Surface, listed: &[(&str, &str)]) -> Vec<String> {
    let names: BTreeSet<&str> = listed.iter().map(|(name, _)| *name).collect();
    let mut faults = Vec::new();
    for (name, signature) in theirs {
        let fault = match ours.get(name) {
            None => format!("tonic has {name} {signature}, and this crate has not"),
            Some(own) if own != signature => {
                format!("{name} is {signature} in tonic, and {own} here")
            }
            Some(_) => continue,
        };
        if !names.contains(&**name) {
            faults.push(format!("{fault}: add it, or list it with the reason"));
        }
    }
    for (name, reason) in listed {
        match theirs.get(*name) {
            None => faults.push(format!("{name} is listed, and tonic has no such thing")),
            Some(signature) if ours.get(*name) == Some(signature) => {
                faults.push(format!("{name} is listed, and is here as in tonic"));
            }
            Some(_) => {}
        }
        if reason.split_whitespace().count() < 4 {
            faults.push(format!("{name} is listed without a reason"));
        }
    }
    if names.len() != listed.len() {
        faults.push("a name is listed twice".to_owned());
    }
    faults
}

#[test]
fn what_tonic_has_is_here_or_listed() {
    let faults = faults(&theirs(), &ours(), DIFFERENCES);
    assert!(faults.is_empty(), "\n{}\n", faults.join("\n"));
}

/// [`drop_in`] covers all of tonic's exports except the types that are ours.
#[test]
fn exports_are_tonics_own_or_listed_as_ours() {
    let name = |key: &str| key.rsplit("::").next().unwrap().to_owned();
    let is_export = |key: &&String| !key.contains(['(', ' ']);
    let theirs = theirs();
    let exports: Vec<_> = theirs.keys().filter(is_export).collect();
    assert!(exports.len() > 15, "{exports:?}");
    for export in exports {
        let is_module = ["channel", "server"].contains(&export.as_str());
        let known = drop_in::SAME.contains(&export.as_str()) || TYPES.contains(&&*name(export));
        assert!(known || is_module, "{export} is not in drop_in.rs");
    }
}

/// If a source had another layout, nothing would be read from it, and no difference would be found.
#[test]
fn both_sources_are_read() {
    for (whose, surface) in [("tonic", theirs()), ("tonic-rdma", ours())] {
        for known in [
            "Channel",
            "Certificate",
            "server",
            "server::TcpIncoming",
            "channel::Change",
            "channel::ResponseFuture",
            "Server::serve_with_incoming()",
            "Router::serve()",
            "Endpoint::http2_adaptive_window()",
            "Channel: Service<Request<Body>>",
            "Endpoint: TryFrom<&'static str>",
            "Server: Clone",
            "Error",
        ] {
            assert!(surface.contains_key(known), "{whose}: no {known} in {surface:#?}");
        }
        assert_eq!(surface["Server::load_shed()"], "(self, bool) -> Self", "{whose}");
        assert_eq!(surface["Endpoint::connect()"], "async (&self) -> Result<Channel,Error>");
        assert!(surface.len() > 100, "{whose}: {surface:#?}");
    }
}

#[test]
fn faults_are_found() {
    let surface = |entries: &[(&str, &str)]| -> Surface {
        entries.iter().map(|(k, v)| ((*k).to_owned(), (*v).to_owned())).collect()
    };
    let theirs = surface(&[("A", ""), ("A::f()", "(self) -> u8"), ("B", "")]);
    let why = "it has no meaning here";
    assert_eq!(faults(&theirs, &theirs, &[]), [""; 0]);
    let fewer = surface(&[("A", ""), ("A::f()", "(self) -> u8"), ("C", "")]);
    assert!(faults(&theirs, &fewer, &[])[0].contains("tonic has B"));
    assert_eq!(faults(&theirs, &fewer, &[("B", why)]), [""; 0]);
    let other = surface(&[("A", ""), ("A::f()", "(self) -> u16"), ("B", "")]);
    assert!(faults(&theirs, &other, &[])[0].contains("(self) -> u8 in tonic"));
    assert_eq!(faults(&theirs, &other, &[("A::f()", why)]), [""; 0]);
    assert!(faults(&theirs, &theirs, &[("B", why)])[0].contains("is here as in tonic"));
    assert!(faults(&theirs, &theirs, &[("D", why)])[0].contains("no such thing"));
    assert!(faults(&theirs, &fewer, &[("B", "why")])[0].contains("without a reason"));
    assert!(faults(&theirs, &fewer, &[("B", why), ("B", why)])[0].contains("twice"));
}

fn theirs() -> Surface {
    surface::read(
        &source_of("tonic").join("transport"),
        &[("", "mod.rs"), ("server", "server/mod.rs"), ("channel", "channel/mod.rs")],
        TYPES,
        &[
            "server/mod.rs",
            "channel/mod.rs",
            "channel/endpoint.rs",
            "channel/service/discover.rs",
            "error.rs",
        ],
    )
}

fn ours() -> Surface {
    surface::read(
        &Path::new(env!("CARGO_MANIFEST_DIR")).join("src"),
        &[("", "lib.rs"), ("server", "server/mod.rs"), ("channel", "channel/mod.rs")],
        TYPES,
        &["server", "channel", "endpoint", "error.rs"],
    )
}
