//! Replaces SENDs and WRITEs without calls in a build without the feature `measure`.

use std::convert::Infallible;

use http::Uri;

use super::way::{Mover, Row};
use crate::diagnose::peer_report;
use crate::diagnose::request::DiagnosisRequest;
use crate::endpoint::Endpoint;
use crate::path::Path;
use crate::tcp::connector::TcpChannel;

/// A bare connection to a server. This type has no values.
#[derive(Debug)]
pub(in crate::diagnose) struct BareWay(Infallible);

impl BareWay {
    /// Returns the reason why this build has no bare connections.
    pub(in crate::diagnose) async fn open(
        _: &DiagnosisRequest,
        _: &Endpoint,
        _: &TcpChannel,
        _: &Uri,
        _: Path,
    ) -> Result<Self, Option<String>> {
        Err(Some("this program was built without the feature `measure`".to_owned()))
    }

    pub(super) async fn turn(&mut self, _: bool) -> Result<(), String> {
        match self.0 {}
    }

    pub(super) fn result(self) -> peer_report::Bare {
        match self.0 {}
    }
}

impl Mover for BareWay {
    async fn run(&mut self, _: Row, _: usize) -> Result<bool, String> {
        match self.0 {}
    }
}
