//! The durations of calls.
//!
//! Each channel to a server, and each server, keeps one handle of the histogram for each path and
//! status. A balanced channel has a channel to each server. A call reads the clock twice if a
//! recorder was installed before the channel or the server was made, and otherwise not at all.

use std::error::Error;
use std::sync::{Arc, OnceLock};

use ::metrics::{Histogram, Label, histogram};
use http::{HeaderMap, Uri};
use tokio::time::Instant;
use tonic::Code;
use tonic_rdma_fabric::PeerInfo;
use tonic_rdma_proto::Side;

use crate::path::Path;
use crate::telemetry::metrics::names::{CLIENT_CALLS, SERVER_CALLS};
use crate::telemetry::{server_address, status};

/// Number of gRPC status codes.
const CODES: usize = 17;
/// Number of paths.
const PATHS: usize = 4;

/// The histograms of a channel's or a server's calls. `None` without a recorder.
#[derive(Debug, Clone, Default)]
pub(crate) struct Durations(Option<Arc<Histograms>>);

#[derive(Debug)]
struct Histograms {
    side: Side,
    /// The labels for the address of the channel's server. A server has no such labels.
    server: Vec<Label>,
    by_path: [[OnceLock<Histogram>; CODES]; PATHS],
}

impl Durations {
    /// The histograms of a server.
    pub(crate) fn server() -> Self {
        Self::new(Side::Server, Vec::new)
    }

    /// The histograms of a channel to the server at this URI.
    pub(crate) fn client(server: &Uri) -> Self {
        Self::new(Side::Client, || {
            let address =
                server_address(server).map(|host| Label::new("server_address", host.to_owned()));
            let port = server.port().map(|port| Label::new("server_port", port.to_string()));
            address.into_iter().chain(port).collect()
        })
    }

    fn new(side: Side, server: impl FnOnce() -> Vec<Label>) -> Self {
        let histograms =
            || Arc::new(Histograms { side, server: server(), by_path: Default::default() });
        Durations(is_recording().then(histograms))
    }

    /// Starts to measure a call.
    #[inline]
    pub(crate) fn start(&self) -> CallTimer {
        CallTimer(self.0.as_ref().map(|histograms| Running {
            began: Instant::now(),
            histograms: histograms.clone(),
            path: None,
        }))
    }
}

/// Whether the program has installed a recorder. Without a recorder, the facade uses a recorder of
/// size zero, whose handles look like the handles of other recorders.
fn is_recording() -> bool {
    ::metrics::with_recorder(|recorder| size_of_val(recorder) > 0)
}

impl Histograms {
    fn get(&self, path: Path, code: Code) -> &Histogram {
        let by_code = &self.by_path[path as usize % PATHS];
        by_code[code as usize % CODES].get_or_init(|| {
            let (path, code_name) = (path.as_str(), status::name(code));
            let mut labels = vec![
                Label::from_static_parts("rpc_system_name", "grpc"),
                Label::from_static_parts("rpc_status_code", code_name),
                Label::from_static_parts("path", path),
            ];
            labels.extend_from_slice(&self.server);
            if status::is_error(self.side, code) {
                labels.push(Label::from_static_parts("error_type", code_name));
            }
            match self.side {
                Side::Client => histogram!(CLIENT_CALLS, labels),
                Side::Server => histogram!(SERVER_CALLS, labels),
            }
        })
    }
}

/// Measures a call from its start to its end. If the timer is dropped before the end, the call was
/// cancelled or has panicked.
#[derive(Debug, Default)]
pub(crate) struct CallTimer(Option<Running>);

#[derive(Debug)]
struct Running {
    began: Instant,
    histograms: Arc<Histograms>,
    /// `None` until the call has a path. A call without a path is not recorded.
    path: Option<Path>,
}

impl CallTimer {
    /// Whether the timer measures a call that has not ended.
    #[inline]
    pub(crate) fn is_running(&self) -> bool {
        self.0.is_some()
    }

    /// Records that the call takes TCP.
    #[inline]
    pub(crate) fn took_tcp(&mut self) {
        if let Some(running) = &mut self.0 {
            running.path = Some(Path::Tcp);
        }
    }

    /// Records that the call takes the fast path to `peer`.
    #[inline]
    pub(crate) fn took_fast(&mut self, peer: &PeerInfo) {
        if let Some(running) = &mut self.0 {
            running.path = Some(Path::of(peer));
        }
    }

    /// Ends the call with a status. Later ends are ignored.
    pub(crate) fn end(&mut self, code: Code) {
        if let Some(Running { began, histograms, path: Some(path) }) = self.0.take() {
            histograms.get(path, code).record(began.elapsed().as_secs_f64());
        }
    }

    /// Ends the call if these headers contain a status.
    #[inline]
    pub(crate) fn end_with(&mut self, headers: &HeaderMap) {
        if self.0.is_some()
            && let Some(code) = status::of_headers(headers)
        {
            self.end(code);
        }
    }

    /// Ends the call with the status of `error`.
    #[inline]
    pub(crate) fn fail(&mut self, error: &(dyn Error + 'static)) {
        if self.0.is_some() {
            self.end(status::of_error(error));
        }
    }

    /// Ends the call when the response's body ends without a status. At a client, tonic reports the
    /// missing status as `UNKNOWN`. At a server, the request was not a gRPC call and is not
    /// recorded.
    #[inline]
    pub(crate) fn body_ended(&mut self) {
        match self.0.as_ref().map(|running| running.histograms.side) {
            Some(Side::Client) => self.end(Code::Unknown),
            Some(Side::Server) => self.0 = None,
            None => {}
        }
    }

    /// Ends the measurement without a record.
    pub(crate) fn forget(&mut self) {
        self.0 = None;
    }
}

impl Drop for CallTimer {
    #[inline]
    fn drop(&mut self) {
        if self.0.is_some() {
            self.end(status::of_dropped());
        }
    }
}
