//! Finds out why calls do not use RDMA, and how to fix it: see [`diagnose`](fn@diagnose).
//!
//! The decision is that of the code that channels and servers use, so a diagnosis cannot disagree
//! with them. The system's files serve only to find the cause and the cure.
//!
//! | file | what |
//! |---|---|
//! | `request` | the input of a diagnosis |
//! | `report`, `peer_report` | the result |
//! | `serialize` | serialization of the crate's own types in the result |
//! | `host` | this host: its state, and tests on its devices |
//! | `peer`, `measure` | a server: its offer, the steps to it, and a short measurement |
//! | `findings`, `cures` | the problems that prevent RDMA, and the commands that fix them |
//! | `hints` | reasons why RDMA is slower than it could be |

mod cures;
mod findings;
mod hints;
mod host;
mod measure;
mod peer;
mod peer_report;
mod report;
mod request;
#[cfg(feature = "serde")]
mod serialize;
#[cfg(test)]
mod tests;

use std::future::IntoFuture;
use std::pin::Pin;

use crate::context::Context;
use crate::diagnose::hints::Losses;
use crate::diagnose::host::{SystemFiles, check};
use crate::diagnose::request::DiagnosisRequest;
use crate::endpoint::Endpoint;
use crate::error::Error;
use crate::path::policy::EnvSettings;
use crate::path::reason::{Reason, ReasonCode};

pub use peer_report::{Bare, Direction, Measured, Offered, Peer, Rates, Refused, Step};
pub use report::{
    Cure, DescriptorsReport, Device, DeviceFile, Diagnosis, Finding, Gid, Hint, Host,
    HugePagesReport, Library, Limits, MemlockReport, Module, ModuleState, PathSettings as Settings,
    PcieLink, PoolSizeBy, Port, RdmaNamespaces, RunsIn,
};

/// Determines whether calls would use RDMA, and otherwise why not and how to fix it.
///
/// A diagnosis reads the system's own information. On each RDMA device it creates everything that a
/// connection needs (protection domain, registration, queues, queue pair), and connects the device
/// to itself. Then it runs the transport's own decision. With a [peer](Diagnose::peer) it also
/// requests a server's offer, connects, and measures for several seconds: calls over both paths,
/// and SENDs and WRITEs without calls.
///
/// A diagnosis works without rdma-core, without the feature `verbs` and on any operating system.
/// Information that is not available is left empty. The diagnosis releases everything that it
/// creates, with two exceptions that channels and servers share: the pools of the
/// [context](Diagnose::context), and the soft limit of RLIMIT_MEMLOCK, which the pools raise to the
/// hard limit.
///
/// # Errors
///
/// An environment variable has a bad value ([`Cause::Environment`](crate::Cause::Environment)). An
/// unusable path is a result, not an error.
///
/// # Cancel safety
///
/// Dropping the future ends the diagnosis. A blocking call into rdma-core runs to its end.
///
/// ```no_run
/// # async fn run() -> Result<(), tonic_rdma::Error> {
/// let diagnosis = tonic_rdma::diagnose().await?;
/// for finding in &diagnosis.findings {
///     println!("{}: {}", finding.code, finding.what);
///     for cure in &finding.cures {
///         println!("    {}: {}", cure.what, cure.command.as_deref().unwrap_or("-"));
///     }
/// }
/// # Ok(()) }
/// ```
pub fn diagnose() -> Diagnose {
    Diagnose { context: None, peer: None }
}

/// A diagnosis to run by `.await`.
#[derive(Debug, Clone)]
#[must_use = "nothing is checked before it is awaited"]
pub struct Diagnose {
    context: Option<Context>,
    peer: Option<Endpoint>,
}

impl Diagnose {
    /// Set the context, with the devices and the pool to test. The default is the context of the
    /// peer's endpoint, or else [`Context::global`].
    pub fn context(mut self, context: Context) -> Self {
        self.context = Some(context);
        self
    }

    /// Set a server to query, with all settings of an [`Endpoint`]: TLS, credentials for the Offer,
    /// policy, fabrics.
    ///
    /// The diagnosis sends the server several thousand calls and, on a fast network, several
    /// gigabytes, over both paths and without calls. The calls pass through the server's layers,
    /// with the metadata of the endpoint's [`offer_metadata`](Endpoint::offer_metadata).
    ///
    /// ```no_run
    /// # async fn run() -> Result<(), tonic_rdma::Error> {
    /// use tonic_rdma::{Endpoint, diagnose};
    ///
    /// let diagnosis = diagnose().peer(Endpoint::from_static("http://10.0.0.1:50051")).await?;
    /// if let Some(peer) = &diagnosis.peer {
    ///     println!("calls to {} go by {}", peer.uri, peer.path_detail);
    /// }
    /// # Ok(()) }
    /// ```
    pub fn peer(mut self, endpoint: Endpoint) -> Self {
        self.peer = Some(endpoint);
        self
    }

    async fn run(self) -> Result<Diagnosis, Error> {
        let env = EnvSettings::read()?;
        let endpoints = self.peer.as_ref().and_then(|peer| peer.shared.context.clone());
        let context = self.context.or(endpoints).unwrap_or_default();
        let peer = self.peer.map(|peer| peer.context(context.clone()));
        let request = DiagnosisRequest { env, context, peer };
        let (mut diagnosis, facts) = check::run(&request).await;
        let files = SystemFiles::real();
        let settings = hints::HintSettings {
            total_uuars: std::env::var_os("MLX5_TOTAL_UUARS").is_some(),
            type_of_service: request.context.type_of_service(request.env.type_of_service),
        };
        diagnosis.hints = hints::hints(&files, &diagnosis.devices, settings);
        if let Some(endpoint) = &request.peer {
            let before = Losses::read(&files, &diagnosis.devices);
            let mut peer = peer::run(&request, endpoint).await;
            let now = Losses::read(&files, &diagnosis.devices);
            diagnosis.hints.extend(before.grown(&now, &diagnosis.devices));
            if let Some(bare) = &mut peer.bare {
                bare.claimed_mib_s = claimed(&diagnosis.devices, &bare.device);
            }
            let failed = peer.fast_failed.as_ref().map(|why| {
                Reason::new(ReasonCode::LinkLost, format!("calls over the path failed: {why}"))
            });
            diagnosis.rdma = peer.path.is_some_and(|path| path.is_fast()) && failed.is_none();
            // Report a problem of this host only if the peer gives no reason. The problem applies
            // to any peer.
            let local = diagnosis.reason.take();
            diagnosis.reason = match diagnosis.rdma {
                true => None,
                false => failed.or_else(|| peer.reason.clone()).or(local),
            };
            diagnosis.peer = Some(peer);
        }
        diagnosis.findings = findings::findings(&diagnosis, &facts);
        Ok(diagnosis)
    }
}

/// Bandwidth in MiB/s that a device's fastest active port claims.
fn claimed(devices: &[Device], name: &str) -> Option<f64> {
    let ports = &devices.iter().find(|device| device.name == name)?.ports;
    let active = ports.iter().filter(|port| port.is_active());
    let fastest = active.filter_map(Port::gbit_s).reduce(f64::max)?;
    Some(fastest * 1e9 / 8.0 / f64::from(1 << 20))
}

impl IntoFuture for Diagnose {
    type Output = Result<Diagnosis, Error>;
    type IntoFuture = Pin<Box<dyn Future<Output = Self::Output> + Send>>;

    fn into_future(self) -> Self::IntoFuture {
        Box::pin(self.run())
    }
}
