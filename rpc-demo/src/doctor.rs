//! The command `rpc-demo doctor`.

use std::process::ExitCode;

use tonic_rdma::{Diagnosis, diagnose};
use tonic_rdma_doctor::Report;

use crate::cli::Doctor;
use crate::failure::{Failure, causes};
use crate::names::Shown;
use crate::{net, output};

/// The exit code if the diagnosis failed.
pub(crate) const ERROR: u8 = Report::UNKNOWN;

/// Reports whether RDMA would be used. If RDMA would not be used, the report says why and how to
/// fix the cause.
pub(crate) async fn run(args: Doctor) -> Result<ExitCode, Failure> {
    let mut asked = diagnose();
    if let Some(server) = &args.peer {
        let way = crate::cli::Path { require: Default::default(), timeout: args.timeout };
        asked = asked.peer(net::endpoint(server, &way, "--peer")?);
    }
    let found = asked.await.map_err(|error| Failure::new("no diagnosis", causes(&error), ""))?;
    let report = Report::new(&found);
    match args.json {
        true => output::json(&found)?,
        false => output::line(format_args!("{report}"))?,
    }
    unreachable_peer(&found)?;
    Ok(ExitCode::from(report.exit_code()))
}

/// Fails if the peer cannot be reached over TCP, because RDMA to that peer is then unknown.
fn unreachable_peer(found: &Diagnosis) -> Result<(), Failure> {
    match found.peer.as_ref().and_then(|peer| Some((peer, peer.error.as_ref()?))) {
        None => Ok(()),
        Some((peer, error)) => Err(Failure::new(
            format!("no server answers at {}", Shown(&peer.uri)),
            Shown(error),
            "name a server that runs with --peer; the results for this host are valid in any case",
        )),
    }
}
