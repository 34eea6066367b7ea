//! `tonic-rdma-doctor` reports whether this host's calls would use RDMA, and otherwise why not.

use std::io::{self, ErrorKind, Write};
use std::process::ExitCode;
use std::time::Duration;

use clap::{Parser, ValueHint, value_parser};
use tonic_rdma::{Endpoint, diagnose};
use tonic_rdma_doctor::{Escaped, Report};

/// Show whether gRPC calls of this host would use RDMA, and if not, why, and how to fix it.
#[derive(Parser, Debug)]
#[command(
    version,
    after_help = "\
Exit codes: 0 if RDMA would be used, 1 if not, 2 if unknown (wrong flag or variable, no server at --peer, unwritable output). \
With --peer, the code is also 0 if the server shares memory with this host. docs/troubleshooting.md of \
tonic-rdma explains the reason codes."
)]
struct Args {
    /// A server to connect to. The program shows what the server offers, which path is chosen and
    /// how long each step takes, and measures both paths for some seconds.
    #[arg(long, value_name = "URL", value_hint = ValueHint::Url)]
    peer: Option<String>,

    /// Seconds to wait for a TCP connection.
    #[arg(long, value_name = "SECONDS", default_value_t = 10, value_parser = value_parser!(u64).range(1..=3600))]
    connect_timeout: u64,

    /// Print the result as one JSON object.
    #[arg(long)]
    json: bool,
}

#[tokio::main]
async fn main() -> ExitCode {
    // An interrupted diagnosis is not a negative result.
    let done = tokio::select! {
        done = run(Args::parse()) => done,
        _ = tokio::signal::ctrl_c() => Err("interrupted".to_owned()),
    };
    ExitCode::from(done.unwrap_or_else(|why| {
        // If stderr is closed, only the exit code is left.
        let _ = writeln!(io::stderr(), "tonic-rdma-doctor: {why}");
        Report::UNKNOWN
    }))
}

async fn run(args: Args) -> Result<u8, String> {
    let mut asked = diagnose();
    if let Some(server) = &args.peer {
        let endpoint = endpoint(server)?;
        asked = asked.peer(endpoint.connect_timeout(Duration::from_secs(args.connect_timeout)));
    }
    let found = asked.await.map_err(|error| format!("no diagnosis: {}", causes(&error)))?;
    let report = Report::new(&found);
    let text = match args.json {
        true => report.to_json().map_err(|error| format!("no JSON: {error}"))?,
        false => report.to_string(),
    };
    let mut out = io::stdout().lock();
    match writeln!(out, "{text}").and_then(|()| out.flush()) {
        // A closed pipe (`tonic-rdma-doctor | head`) is not an error, but a full disk is.
        Err(error) if error.kind() != ErrorKind::BrokenPipe => {
            return Err(format!("cannot write to stdout: {error}"));
        }
        _ => {}
    }
    if let Some((peer, error)) = found.peer.as_ref().and_then(|p| Some((p, p.error.as_ref()?))) {
        return Err(format!(
            "no server answers at {}: {}; name a server that runs with --peer",
            Escaped(&peer.uri),
            Escaped(error)
        ));
    }
    Ok(report.exit_code())
}

/// The endpoint for a server's address, with or without `http://`.
fn endpoint(server: &str) -> Result<Endpoint, String> {
    let url = if server.contains("://") { server.to_owned() } else { format!("http://{server}") };
    let wrong = |why: &str| {
        format!(
            "{} is not a server address: {why}; try --peer http://10.0.0.1:50051",
            Escaped(&url)
        )
    };
    let endpoint = Endpoint::from_shared(url.clone()).map_err(|error| wrong(&causes(&error)))?;
    match (endpoint.uri().scheme_str(), endpoint.uri().host()) {
        (Some("http"), Some(_)) => Ok(endpoint),
        (Some("https"), _) => {
            Err(wrong("this program has no TLS (a program that has it calls tonic_rdma::diagnose)"))
        }
        _ => Err(wrong("it must begin with http://")),
    }
}

/// An error and its causes on one line.
fn causes(error: &dyn std::error::Error) -> String {
    let mut text = error.to_string();
    let mut next = error.source();
    while let Some(cause) = next {
        let more = cause.to_string();
        if !text.contains(&more) {
            text = format!("{text}: {more}");
        }
        next = cause.source();
    }
    Escaped(&text).to_string()
}

#[cfg(test)]
mod tests {
    use std::path::PathBuf;

    use clap::CommandFactory;

    use super::Args;

    /// `make man` sets MAN_PAGES to the directory that it wants the page in.
    #[test]
    fn the_program_has_a_man_page() {
        let scratch = tempfile::tempdir().unwrap();
        let pages = std::env::var_os("MAN_PAGES").map_or(scratch.path().to_owned(), PathBuf::from);
        clap_mangen::generate_to(Args::command(), &pages).unwrap();
        let page = std::fs::read_to_string(pages.join("tonic-rdma-doctor.1")).unwrap();
        let page = page.replace("\\-", "-");
        assert!(page.contains(".TH tonic-rdma-doctor 1"), "{page}");
        for arg in Args::command().get_arguments().filter_map(|arg| arg.get_long()) {
            assert!(page.contains(&format!("--{arg}")), "no --{arg}:\n{page}");
        }
    }
}
