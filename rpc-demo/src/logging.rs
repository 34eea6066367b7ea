//! The log, on stderr.

use tracing_subscriber::filter::{LevelFilter, ParseError, Targets};
use tracing_subscriber::layer::SubscriberExt as _;
use tracing_subscriber::util::SubscriberInitExt as _;

use crate::failure::Failure;
use crate::progress::Aside;

/// Starts logging. By default warnings are shown, because they explain a fallback to TCP. `-v`
/// shows more. RUST_LOG, if set and not empty, replaces the default and `-v`.
pub(crate) fn start(verbose: u8) -> Result<(), Failure> {
    const OURS: [&str; 2] = ["rpc_demo", "tonic_rdma"];
    let at_least = |level| Targets::new().with_targets(OURS.map(|target| (target, level)));
    let filter = match std::env::var("RUST_LOG") {
        Ok(text) if !text.trim().is_empty() => text.parse().map_err(|error: ParseError| {
            Failure::usage(
                format!("RUST_LOG={} cannot be used", crate::names::Shown(&text)),
                error,
                "name levels and targets: try RUST_LOG=info,tonic_rdma=debug",
            )
        })?,
        _ => match verbose {
            0 => Targets::new().with_default(LevelFilter::WARN),
            1 => at_least(LevelFilter::INFO).with_default(LevelFilter::WARN),
            _ => at_least(LevelFilter::DEBUG).with_default(LevelFilter::INFO),
        },
    };
    let lines = tracing_subscriber::fmt::layer()
        .with_writer(|| Aside)
        .with_ansi(crate::terminal::has_colors())
        .with_target(verbose > 0)
        .without_time();
    tracing_subscriber::registry()
        .with(filter)
        .with(lines)
        .try_init()
        .map_err(|error| Failure::new("cannot log", error, ""))
}
