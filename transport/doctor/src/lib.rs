//! Prints why gRPC calls do not use RDMA, and how to fix it: the result of
//! [`diagnose`](tonic_rdma::diagnose()), as text for people and as JSON for scripts.
//!
//! [`Report`] is a diagnosis that can be printed. This package's program `tonic-rdma-doctor`
//! diagnoses a host and the path to a server. A server or a client can also print its own
//! diagnosis:
//!
//! ```no_run
//! # async fn run() -> Result<(), tonic_rdma::Error> {
//! use tonic_rdma::{Endpoint, diagnose};
//! use tonic_rdma_doctor::Report;
//!
//! let endpoint = Endpoint::from_static("http://10.0.0.1:50051");
//! let found = diagnose().peer(endpoint).await?;
//! let report = Report::new(&found);
//! println!("{report}");
//! std::process::exit(report.exit_code().into());
//! # }
//! ```

#![forbid(unsafe_code)]

mod page;
mod peer;
mod tables;

use std::fmt;

pub use page::{ByteSize, Escaped};
use tonic_rdma::Diagnosis;

/// A diagnosis that can be printed. [`Display`](fmt::Display) is the text for people: tables of the
/// examined parts, the problems with the commands that fix them, and the verdict in the last line.
/// Text from files and peers is [`Escaped`].
#[derive(Debug, Clone, Copy)]
pub struct Report<'a> {
    found: &'a Diagnosis,
    width: u16,
}

impl<'a> Report<'a> {
    /// The exit code if a diagnosis could not be made or written, or the peer did not answer.
    pub const UNKNOWN: u8 = 2;

    /// A report whose tables are as wide as the terminal behind stdout, limited to 60 to 120
    /// columns. Without a terminal, the tables have 120 columns.
    pub fn new(found: &'a Diagnosis) -> Self {
        Report { found, width: page::fitting(page::terminal_width()) }
    }

    /// Sets the width of tables in columns. The width is clamped to 60 to 120. The default is the
    /// terminal's width.
    pub fn width(self, columns: u16) -> Self {
        Report { width: page::fitting(Some(columns)), ..self }
    }

    /// The diagnosis as one line of JSON. Its fields have the names of [`Diagnosis`]. Later
    /// versions may add fields.
    ///
    /// # Errors
    ///
    /// No error is known, because all fields of a diagnosis have a JSON form.
    pub fn to_json(&self) -> serde_json::Result<String> {
        serde_json::to_string(self.found)
    }

    /// The exit code of a program with this diagnosis as its result. The code is 0 if calls would
    /// use RDMA or, with a peer, shared memory. The code is 1 if calls would use neither, or if
    /// calls to the peer over that path failed while they were measured. The code is
    /// [`UNKNOWN`](Report::UNKNOWN) if the peer did not answer.
    pub fn exit_code(&self) -> u8 {
        match (&self.found.peer, self.found.rdma) {
            (Some(peer), _) if peer.error.is_some() => Self::UNKNOWN,
            (_, true) => 0,
            (_, false) => 1,
        }
    }
}

impl fmt::Display for Report<'_> {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        tables::print(&mut page::TextPage { out: f, width: self.width }, self.found)
    }
}
