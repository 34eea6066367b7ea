//! SENDs and WRITEs under measurement, over a connection without calls.

use std::time::Instant;

use tonic_rdma_fabric::bare::{self, Bare, BareError, Limits};
use tonic_rdma_fabric::{Fabric, Link};
use tonic_rdma_memory::Pool;
use tonic_rdma_proto::{Accept, Hello};

use super::row::{CALLS, Latencies, Mover, Row, SMALL};
use crate::bootstrap::bare::LIMIT;
use crate::channel::rails::Rail;
use crate::connection::ConnectionConfig;
use crate::diagnose::peer_report::{self, Direction};
use crate::path::from_error;
use crate::path::reason::{Reason, ReasonCode};

/// A bare connection to a server.
#[derive(Debug)]
pub(in crate::diagnose) struct BareWay {
    bare: Bare,
    device: String,
    place: String,
    latencies: Latencies,
}

impl BareWay {
    /// Connects along a rail, with a ticket for such a connection.
    pub(in crate::diagnose) async fn connect(
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
            .connect(&rail.addr, &config, pool, &hello, LIMIT)
            .await
            .map_err(from_error::connect)?;
        Accept::decode(&connected.private_data).map_err(|error| {
            let detail = format!("bad answer from {}: {error}", rail.addr);
            Reason::from_peer(ReasonCode::HandshakeRejected, detail)
        })?;
        let device = connected.link.peer().device.clone();
        let bare = Bare::open(connected.link, pool.clone(), Limits::default())
            .await
            .map_err(|error| Reason::new(ReasonCode::LinkLost, error.to_string()))?;
        let place = rail.addr.to_string();
        Ok(Self { bare, device, place, latencies: Latencies::default() })
    }

    /// A round of SENDs.
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
