//! Checks of the source itself, which `tests/rules.rs` runs before all other tests.
//!
//! | module | rule |
//! |---|---|
//! | [`circles`] | files of a crate do not need each other in a circle |
//! | [`width`] | comments and documents end at column 100 |
//! | [`size`] | files are short, folders of transport/tonic have few files, ARCHITECTURE.md has few words |
//! | [`names`] | a type name means one thing in the library |
//! | [`unsafety`] | `unsafe` is in memory/, transport/fabric/ and transport/rdma-sys/ only, with its reason |
//! | [`logging`] | log lines of the libraries above DEBUG are throttled, because a peer may cause them |
//! | [`wording`] | a reader reads each sentence once: comments, documents, texts of the program |
//! | [`figures`] | figures in SECURITY.md are those of the constants |
//! | [`pointers`] | what documents point at exists: paths, headings, modules, make targets |
//! | [`pipes`] | scripts read each pipe to its end |
//! | [`workflows`] | hosted workflows call targets of the Makefile, and every test |
//!
//! [`prose`] finds the paragraphs for [`wording`], and [`packages`] finds the source of a package
//! such as tonic, for tests that compare our code with it. [`golden`] reads files with the bytes of
//! messages, and the tables of docs/protocol.md, for the tests of the crates that define these
//! messages.
//!
//! `tests/known/mod.rs` lists the files that still break a rule, and `tests/known/wording.txt`
//! lists how many wordings to avoid each file still has. A test fails when it finds more than is
//! listed, and also when it finds less, so the lists only get shorter. `cargo run -p
//! tonic-rdma-source-rules` shows every finding with its place. With a path, it shows only the
//! findings below that path. With `--known` or `--wording`, it prints the content of one of the two
//! lists.

pub mod circles;
pub mod figures;
pub mod files;
pub mod golden;
pub mod logging;
pub mod modules;
pub mod names;
pub mod packages;
pub mod pipes;
pub mod pointers;
pub mod prose;
pub mod size;
pub mod unsafety;
pub mod width;
pub mod wording;
pub mod workflows;

mod findings;

pub use findings::{CRATES, Finding, Findings};
