//! The input of a diagnosis.

use crate::context::Context;
use crate::endpoint::Endpoint;
use crate::path::policy::{EnvSettings, FabricKind, Policy};

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
