//! `rpc-demo doctor`.

mod layout;
mod peer;
mod tables;

use std::process::ExitCode;

use tonic_rdma::{Diagnosis, diagnose};

use crate::cli::Doctor;
use crate::failure::{Failure, causes};
use crate::names::Shown;
use crate::{net, output};

/// Exit code: RDMA would be used.
const RDMA: u8 = 0;
/// Exit code: TCP would be used.
const TCP: u8 = 1;
/// Exit code: the diagnosis failed.
pub(crate) const ERROR: u8 = 2;

/// Reports whether RDMA would be used, and if not, why and what to do.
pub(crate) async fn run(args: Doctor) -> Result<ExitCode, Failure> {
    let mut asked = diagnose();
    if let Some(server) = &args.peer {
        let way = crate::cli::Path { require: Default::default(), timeout: args.timeout };
        asked = asked.peer(net::endpoint(server, &way, "--peer")?);
    }
    let found = asked.await.map_err(|error| Failure::new("no diagnosis", causes(&error), ""))?;
    match args.json {
        true => output::json(&found)?,
        false => tables::print(&found)?,
    }
    unreachable_peer(&found)?;
    Ok(ExitCode::from(if found.rdma { RDMA } else { TCP }))
}

/// A peer that is not reachable over TCP gives no information about RDMA.
fn unreachable_peer(found: &Diagnosis) -> Result<(), Failure> {
    match found.peer.as_ref().and_then(|peer| Some((peer, peer.error.as_ref()?))) {
        None => Ok(()),
        Some((peer, error)) => Err(Failure::new(
            format!("no server answers at {}", Shown(&peer.uri)),
            Shown(error),
            "name a server that runs with --peer; what is said about this host holds all the same",
        )),
    }
}
