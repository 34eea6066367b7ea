//! Replaces the module `metrics` in a build without the feature `metrics`. Nothing is recorded, and
//! [`TransportStats`](crate::TransportStats) still counts.

use std::error::Error;
use std::time::Duration;

use http::{HeaderMap, Uri};
use tonic::Code;
use tonic_rdma_fabric::PeerInfo;
use tonic_rdma_proto::{Reject, Side, Stats};

use crate::path::Path;
use crate::path::reason::Reason;

pub(crate) fn fallback(_: Side, _: &Reason) {}

pub(crate) fn refused(_: Reject) {}

pub(crate) fn reconnect(_: Path) {}

pub(crate) fn handshake(_: Path, _: Duration) {}

/// A recorder's counter.
#[derive(Debug)]
pub(crate) struct RecorderCounter;

impl RecorderCounter {
    pub(crate) fn noop() -> Self {
        RecorderCounter
    }

    pub(crate) fn increment(&self, _: u64) {}
}

pub(crate) fn calls(_: &'static str, _: &'static str) -> RecorderCounter {
    RecorderCounter
}

pub(crate) fn copied(_: &'static str, _: &'static str, _: &'static str) -> RecorderCounter {
    RecorderCounter
}

pub(crate) fn payload(
    _: &'static str,
    _: &'static str,
    _: &'static str,
    _: &'static str,
) -> RecorderCounter {
    RecorderCounter
}

/// The histograms of calls.
#[derive(Debug, Clone, Default)]
pub(crate) struct Durations;

impl Durations {
    pub(crate) fn server() -> Self {
        Durations
    }

    pub(crate) fn client(_: &Uri) -> Self {
        Durations
    }

    pub(crate) fn start(&self) -> CallTimer {
        CallTimer(())
    }
}

/// Measures a call.
#[derive(Debug, Default)]
pub(crate) struct CallTimer(());

impl CallTimer {
    pub(crate) fn is_running(&self) -> bool {
        false
    }

    pub(crate) fn took_tcp(&mut self) {}

    pub(crate) fn took_fast(&mut self, _: &PeerInfo) {}

    pub(crate) fn end(&mut self, _: Code) {}

    pub(crate) fn end_with(&mut self, _: &HeaderMap) {}

    pub(crate) fn fail(&mut self, _: &(dyn Error + 'static)) {}

    pub(crate) fn body_ended(&mut self) {}

    pub(crate) fn forget(&mut self) {}
}

/// The metrics of one connection.
#[derive(Debug)]
pub(crate) struct ConnectionMeter;

impl ConnectionMeter {
    pub(crate) fn open(_: Side, _: Path) -> Self {
        ConnectionMeter
    }

    #[inline]
    pub(crate) fn polled(&self, _: usize) {}

    /// The last argument is a `Copied`. Its type is not named, because the module of `Copied` uses
    /// this module.
    #[inline]
    pub(crate) fn tell(&mut self, _: Stats, _: impl Copy) {}

    pub(crate) fn asked(&mut self) {}

    pub(crate) fn answered(&mut self, _: &PeerInfo) {}

    pub(crate) fn close(&mut self) {}
}
