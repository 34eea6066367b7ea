//! Measures SENDs and WRITEs over a connection without calls.

use std::time::Instant;

use http::Uri;
use tonic_rdma_fabric::bare::{self, Bare, BareError, BareLimits};
use tonic_rdma_fabric::{Fabric, Link};
use tonic_rdma_memory::Pool;
use tonic_rdma_proto::{Accept, Hello};

use super::way::{CALLS, Latencies, Mover, Row, SMALL};
use crate::bootstrap::client::offer_bare;
use crate::bootstrap::tickets::BARE_LIMIT;
use crate::channel::rails::{self, Rail};
use crate::connection::ConnectionConfig;
use crate::diagnose::peer_report::{self, Direction};
use crate::diagnose::request::{DiagnosisRequest, LIMIT as STEP, limited};
use crate::endpoint::Endpoint;
use crate::path::reason::{Reason, ReasonCode};
use crate::path::{Path, from_error};
use crate::tcp::connector::TcpChannel;

/// The reason to report if the server's ticket is for calls and not for a bare connection.
const NOT_SERVED: &str = "the server does not serve them: its program turns them on with the \
                          feature `measure` and Server::measuring(true)";

/// A bare connection to a server.
#[derive(Debug)]
pub(in crate::diagnose) struct BareWay {
    bare: Bare,
    device: String,
    place: String,
    latencies: Latencies,
}

impl BareWay {
    /// Opens a bare connection along the first rail of the channel's path. The error says why the
    /// connection could not be opened.
    pub(in crate::diagnose) async fn open(
        request: &DiagnosisRequest,
        endpoint: &Endpoint,
        tcp: &TcpChannel,
        origin: &Uri,
        path: Path,
    ) -> Result<Self, Option<String>> {
        let why = |reason: Reason| Some(reason.to_string());
        let hook = endpoint.shared.hook.as_ref();
        let offered = limited(offer_bare(tcp, origin.clone(), hook, &[path])).await.map_err(why)?;
        if !offered.bare {
            return Err(Some(NOT_SERVED.to_owned()));
        }
        let device = request.env.device.as_deref();
        let rails = rails::find(&request.context, device, &offered.places, 0).await;
        let no_rail = || Some("the server offers no address that this host can reach".to_owned());
        let rail = rails.first().ok_or_else(no_rail)?;
        let way = request.context.toward(path, &rail.addr, rail.source, device, STEP);
        let (fabric, pool) = limited(way).await.map_err(why)?;
        limited(Self::connect(&fabric, &pool, rail, offered.ticket.0)).await.map_err(why)
    }

    /// Connects along a rail, with a ticket for a bare connection.
    async fn connect(
        fabric: &Fabric,
        pool: &Pool,
        rail: &Rail,
        ticket: [u8; 16],
    ) -> Result<Self, Reason> {
        let mut config = bare::config();
        config.source = rail.source;
        let settings = ConnectionConfig::for_pool(pool, fabric.grows(), None).proto.settings();
        let hello = Hello::new(ticket, settings).encode();
        let connected = fabric
            .connect(&rail.addr, &config, pool, &hello, BARE_LIMIT)
            .await
            .map_err(from_error::connect)?;
        Accept::decode(&connected.private_data).map_err(|error| {
            let detail = format!("bad answer from {}: {error}", rail.addr);
            Reason::from_peer(ReasonCode::HandshakeRejected, detail)
        })?;
        let device = connected.link.peer().device.clone();
        let bare = Bare::open(connected.link, pool.clone(), BareLimits::default())
            .await
            .map_err(|error| Reason::new(ReasonCode::LinkLost, error.to_string()))?;
        let place = rail.addr.to_string();
        Ok(Self { bare, device, place, latencies: Latencies::default() })
    }

    /// Performs a round of SENDs.
    pub(super) async fn turn(&mut self, counts: bool) -> Result<(), String> {
        for _ in 0..CALLS {
            let began = Instant::now();
            self.bare.echo(SMALL, 1, 1).await.map_err(failed)?;
            if counts {
                self.latencies.push(began.elapsed());
            }
        }
        Ok(())
    }

    pub(super) fn result(self) -> peer_report::Bare {
        self.bare.close();
        peer_report::Bare {
            device: self.device,
            place: self.place,
            sends: self.latencies.count(),
            latency_median_us: self.latencies.percentile_us(50),
            latency_p99_us: self.latencies.percentile_us(99),
            claimed_mib_s: None,
        }
    }
}

impl Mover for BareWay {
    async fn run(&mut self, row: Row, count: usize) -> Result<bool, String> {
        let Row { direction, bytes, in_flight } = row;
        match direction {
            Direction::Both => self.bare.echo(bytes, count, in_flight).await,
            _ if bytes > self.bare.longest() => return Ok(false),
            Direction::Up => self.bare.write(bytes, count, in_flight).await,
            Direction::Down => self.bare.written(bytes, count, in_flight).await,
        }
        .map(|()| true)
        .map_err(failed)
    }
}

fn failed(error: BareError) -> String {
    format!("the connection without calls failed: {error}")
}
