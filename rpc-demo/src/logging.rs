//! The log, on stderr.

use tracing_subscriber::EnvFilter;

use crate::failure::Failure;
use crate::progress::Aside;

/// Starts logging. Warnings are always shown, because they explain a fallback to TCP; `-v` shows
/// more, and RUST_LOG overrides both.
pub(crate) fn start(verbose: u8) -> Result<(), Failure> {
    let filter = match std::env::var("RUST_LOG") {
        Ok(text) if !text.trim().is_empty() => EnvFilter::try_new(&text).map_err(|error| {
            Failure::usage(
                format!("RUST_LOG={} cannot be used", crate::names::Shown(&text)),
                error,
                "try RUST_LOG=info",
            )
        })?,
        _ => EnvFilter::new(match verbose {
            0 => "warn",
            1 => "warn,rpc_demo=info,tonic_rdma=info",
            _ => "info,rpc_demo=debug,tonic_rdma=debug",
        }),
    };
    tracing_subscriber::fmt()
        .with_env_filter(filter)
        .with_writer(|| Aside)
        .with_ansi(crate::terminal::has_colors())
        .with_target(verbose > 0)
        .without_time()
        .try_init()
        .map_err(|error| Failure::new("cannot log", error, ""))
}
