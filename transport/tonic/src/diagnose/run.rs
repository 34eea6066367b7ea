//! A diagnosis as a future.

use std::future::IntoFuture;
use std::pin::Pin;

use crate::context::Context;
use crate::diagnose::host::check;
use crate::diagnose::report::Diagnosis;
use crate::diagnose::request::Request;
use crate::diagnose::{findings, peer};
use crate::endpoint::Endpoint;
use crate::error::Error;
use crate::path::policy::EnvSettings;

/// Finds out whether calls would use RDMA, and if not, why and what to do.
///
/// It reads what the system says of itself, makes on each RDMA device all that a connection needs
/// (protection domain, registration, queues, queue pair), connects the device with itself, and asks
/// the transport's own code for its decision. With a [peer](Diagnose::peer) it also asks a server
/// for its offer, connects, and measures both paths for two seconds.
///
/// It works without rdma-core, without the feature `verbs` and on any operating system; what cannot
/// be found out is left empty. What it makes is gone when it ends, except for the pools of the
/// [context](Diagnose::context), which are those that channels and servers use, and RLIMIT_MEMLOCK,
/// whose soft limit they raise to the hard one.
///
/// # Errors
///
/// An environment variable is bad ([`Error::Environment`]). That nothing works is no error.
///
/// # Cancel safety
///
/// Dropping the future ends what it has begun; a call into rdma-core that blocks ends by itself.
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

/// A diagnosis to make: `.await` it.
#[derive(Debug, Clone)]
#[must_use = "nothing is checked before it is awaited"]
pub struct Diagnose {
    context: Option<Context>,
    peer: Option<Endpoint>,
}

impl Diagnose {
    /// The devices and the pool to try. Default is the peer's endpoint's, or else
    /// [`Context::global`].
    pub fn context(mut self, context: Context) -> Self {
        self.context = Some(context);
        self
    }

    /// A server to ask, with all that an [`Endpoint`] may have: TLS, credentials for the Offer,
    /// policy, fabrics.
    ///
    /// The server is sent a few hundred calls and some tens of megabytes, over both paths. They
    /// pass through its layers; the endpoint's [`offer_metadata`](Endpoint::offer_metadata) goes
    /// with them.
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
        let request = Request { env, context, peer };
        let (mut diagnosis, facts) = check::run(&request).await;
        if let Some(endpoint) = &request.peer {
            let peer = peer::run(&request, endpoint).await;
            diagnosis.rdma = peer.path.is_some_and(|path| path.is_fast());
            // What keeps this host from RDMA does so towards any peer, and can be fixed here.
            let local = diagnosis.reason.take();
            diagnosis.reason = if diagnosis.rdma { None } else { peer.reason.clone().or(local) };
            diagnosis.peer = Some(peer);
        }
        diagnosis.findings = findings::findings(&diagnosis, &facts);
        Ok(diagnosis)
    }
}

impl IntoFuture for Diagnose {
    type Output = Result<Diagnosis, Error>;
    type IntoFuture = Pin<Box<dyn Future<Output = Self::Output> + Send>>;

    fn into_future(self) -> Self::IntoFuture {
        Box::pin(self.run())
    }
}
