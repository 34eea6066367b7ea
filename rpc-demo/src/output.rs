//! Lines on stdout.

use crate::failure::Failure;
use std::fmt;
use std::io::{self, ErrorKind, Write};

/// Prints a line, above the progress bar if there is one.
pub(crate) fn line(text: fmt::Arguments<'_>) -> Result<(), Failure> {
    checked(crate::progress::aside(|| {
        let mut out = io::stdout().lock();
        writeln!(out, "{text}")?;
        out.flush()
    }))
}

/// A reader that has gone away (`rpc-demo ls | head`) is no failure; a full disk is one.
pub(crate) fn checked(done: io::Result<()>) -> Result<(), Failure> {
    match done {
        Err(error) if error.kind() != ErrorKind::BrokenPipe => {
            Err(Failure::io("cannot write to stdout", &error))
        }
        _ => Ok(()),
    }
}
