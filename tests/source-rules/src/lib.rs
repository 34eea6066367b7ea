//! Checks of the source itself, which `tests/rules.rs` runs before all other tests.
//!
//! | module | rule |
//! |---|---|
//! | [`circles`] | no two files of a crate need each other |
//! | [`width`] | comments and documents end at column 100 |
//! | [`size`] | files and folders are short |
//! | [`unsafety`] | `unsafe` is in memory/, transport/fabric/ and transport/rdma-sys/ only, with its reason |
//! | [`logging`] | log lines that a peer can cause are throttled |
//! | [`wording`] | some sentences do not come again |
//! | [`figures`] | figures in SECURITY.md are those of the constants |
//! | [`pointers`] | what documents point at exists: paths, headings, modules, make targets |
//! | [`workflows`] | hosted workflows call targets of the Makefile, and every test |
//!
//! [`packages`] finds the source of tonic, for tests that hold ours against it.
//!
//! What is not done yet is listed in `tests/known/mod.rs`. A test fails when something is found
//! that is not listed, and when something is listed that is not found, so the list only gets
//! shorter. `cargo run -p tonic-rdma-source-rules` shows every finding with its place; with
//! `--known` it prints the list anew.

pub mod circles;
pub mod figures;
pub mod files;
pub mod logging;
pub mod modules;
pub mod packages;
pub mod pointers;
pub mod size;
pub mod unsafety;
pub mod width;
pub mod wording;
pub mod workflows;

mod findings;

pub use findings::{CRATES, Finding, Findings};
