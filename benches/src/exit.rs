//! The exit code of a program.

use std::process::ExitCode;

/// Turns a result into an exit code, and prints an error on stderr in one line.
pub fn exit(program: &str, result: anyhow::Result<()>) -> ExitCode {
    match result {
        Ok(()) => ExitCode::SUCCESS,
        Err(error) => {
            eprintln!("{program}: {error:#}");
            ExitCode::FAILURE
        }
    }
}
