//! The input of a diagnosis, and the time limit of its steps.

use std::time::Duration;

use crate::context::Context;
use crate::endpoint::Endpoint;
use crate::path::policy::{EnvSettings, FabricKind, Policy};
use crate::path::reason::{Reason, ReasonCode};

/// The subject of a diagnosis, and the settings from environment and code.
#[derive(Debug)]
pub(super) struct DiagnosisRequest {
    pub(super) env: EnvSettings,
    pub(super) context: Context,
    pub(super) peer: Option<Endpoint>,
}

impl DiagnosisRequest {
    pub(super) fn policy(&self) -> Policy {
        self.env.policy(self.peer.as_ref().map_or(Policy::Auto, |peer| peer.shared.policy))
    }

    pub(super) fn fabrics(&self) -> Vec<FabricKind> {
        let fabrics = self.peer.as_ref().and_then(|peer| peer.shared.fabrics.as_deref());
        self.env.fabrics(fabrics, self.policy())
    }

    /// The only allowed device, if one was named.
    pub(super) fn only(&self) -> Option<String> {
        self.context.only(self.env.device.as_deref())
    }

    /// The setting that turned the fast path off.
    pub(super) fn off(&self) -> String {
        match self.env.policy {
            Some(_) => "TONIC_RDMA=off".to_owned(),
            None => "the endpoint's policy is off".to_owned(),
        }
    }
}

/// Time limit of each step towards a peer.
pub(super) const LIMIT: Duration = Duration::from_secs(10);

/// Performs a step within the time limit.
pub(super) async fn limited<T>(work: impl Future<Output = Result<T, Reason>>) -> Result<T, Reason> {
    tokio::time::timeout(LIMIT, work).await.unwrap_or_else(|_| {
        let detail = format!("nothing after {} ms", LIMIT.as_millis());
        Err(Reason::new(ReasonCode::HandshakeTimeout, detail))
    })
}
