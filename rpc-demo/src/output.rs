//! Lines on stdout.

use std::fmt;
use std::io::{self, ErrorKind, Write};

use serde::Serialize;

use crate::failure::Failure;

/// Prints a line above the progress bars.
pub(crate) fn line(text: fmt::Arguments<'_>) -> Result<(), Failure> {
    checked(crate::progress::aside(|| {
        let mut out = io::stdout().lock();
        writeln!(out, "{text}")?;
        out.flush()
    }))
}

/// Prints a JSON object on one line.
pub(crate) fn json(object: &impl Serialize) -> Result<(), Failure> {
    let text = serde_json::to_string(object)
        .map_err(|error| Failure::new("cannot write the result as JSON", error, ""))?;
    line(format_args!("{text}"))
}

/// Converts the result of a write to stdout. A closed pipe (`rpc-demo ls | head`) is not an error,
/// but a full disk is.
pub(crate) fn checked(done: io::Result<()>) -> Result<(), Failure> {
    match done {
        Err(error) if error.kind() != ErrorKind::BrokenPipe => {
            Err(Failure::io("cannot write to stdout", &error))
        }
        _ => Ok(()),
    }
}
