//! The exit code of a program.

use std::process::ExitCode;

/// Turns a result into an exit code; prints an error on standard error, in one line.
pub fn exit(program: &str, result: anyhow::Result<()>) -> ExitCode {
    match result {
        Ok(()) => ExitCode::SUCCESS,
        Err(error) => {
            eprintln!("{program}: {error:#}");
            ExitCode::FAILURE
        }
    }
}
