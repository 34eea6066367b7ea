//! A short measurement of each way to a server (TCP, the fast path, a connection without calls), in
//! alternating rounds, so that other load affects all ways equally.
//!
//! | file | what |
//! |---|---|
//! | `way` | measures a path by calls |
//! | `bare` | measures SENDs and WRITEs over a connection without calls |
//! | `not_bare` | replaces `bare` if the feature `measure` is off |

#[cfg(feature = "measure")]
mod bare;
#[cfg(not(feature = "measure"))]
mod not_bare;
mod way;

use std::time::{Duration, Instant};

use http::Uri;
use tonic::Status;
use tonic::metadata::MetadataMap;

#[cfg(feature = "measure")]
pub(super) use self::bare::BareWay;
#[cfg(not(feature = "measure"))]
pub(super) use self::not_bare::BareWay;
use self::way::{Mover, Row, SMALL, Way, failed, row};
use crate::bootstrap::client::OfferHook;
use crate::bootstrap::pb::bootstrap_client::BootstrapClient;
use crate::bootstrap::service::MAX_PROBE;
use crate::channel::Channel;
use crate::diagnose::peer_report::{Direction, Peer, Rates};
use crate::endpoint::Endpoint;

/// After this time no round begins, except the first round and the first round that counts.
const BUDGET: Duration = Duration::from_secs(1);
/// Time limit of the rounds. A network that needs longer is not worth comparing.
const LIMIT: Duration = Duration::from_secs(30);
/// Time limit of the rows. Short transfers come first. On a network that loses packets, long
/// transfers may be left out.
const ROWS_LIMIT: Duration = Duration::from_secs(15);
/// Minimum duration of a row for each way. If the first transfers, one for each that may be in
/// flight, take longer, only these are measured.
const ROW: Duration = Duration::from_millis(20);
const ROWS: [Row; 14] = [
    row(Direction::Both, SMALL, 1),
    row(Direction::Both, SMALL, 16),
    row(Direction::Up, 4096, 1),
    row(Direction::Down, 4096, 1),
    row(Direction::Up, 4096, 8),
    row(Direction::Down, 4096, 8),
    row(Direction::Up, 65_536, 1),
    row(Direction::Down, 65_536, 1),
    row(Direction::Up, 65_536, 8),
    row(Direction::Down, 65_536, 8),
    row(Direction::Up, MAX_PROBE, 1),
    row(Direction::Down, MAX_PROBE, 1),
    row(Direction::Up, MAX_PROBE, 8),
    row(Direction::Down, MAX_PROBE, 8),
];

struct Ways {
    tcp: Way<tonic::transport::Channel>,
    fast: Option<Way<Channel>>,
    bare: Option<BareWay>,
    channel: Channel,
}

/// Measures, and records the results or the reason for their absence.
pub(super) async fn run(
    endpoint: &Endpoint,
    tcp: tonic::transport::Channel,
    channel: Channel,
    origin: Uri,
    bare: Option<BareWay>,
    peer: &mut Peer,
) {
    let metadata = match metadata(endpoint.shared.hook.as_ref()).await {
        Ok(metadata) => metadata,
        Err(status) => return peer.not_measured = Some(failed(&status)),
    };
    let tcp = Way::new(BootstrapClient::with_origin(tcp, origin.clone()), metadata.clone());
    let fast = channel.path().path.is_fast();
    let fast =
        fast.then(|| Way::new(BootstrapClient::with_origin(channel.clone(), origin), metadata));
    let mut ways = Ways { tcp, fast, bare, channel };
    let late = |_| Err(format!("it took longer than {} s", LIMIT.as_secs()));
    let turns = tokio::time::timeout(LIMIT, ways.turns(&mut peer.not_bare)).await;
    let mut done = turns.unwrap_or_else(late);
    if done.is_ok() {
        peer.tcp = Some(ways.tcp.result());
        peer.fast = ways.fast.as_ref().map(Way::result);
        let rows = ways.rows(&mut peer.rates, &mut peer.not_bare);
        // Rows that took too long are left out.
        done = tokio::time::timeout(ROWS_LIMIT, rows).await.unwrap_or(Ok(()));
    }
    peer.not_measured = done.err();
    // A status from the server's layers is not a failure of the path.
    if ways.channel.stats().connections_lost > 0 {
        peer.fast_failed = peer.not_measured.clone();
    }
    peer.bare = ways.bare.map(BareWay::result);
}

impl Ways {
    /// Performs rounds over every way: small and long calls, and SENDs without calls.
    async fn turns(&mut self, not_bare: &mut Option<String>) -> Result<(), String> {
        let began = Instant::now();
        // The first round warms up: connections open their windows, and the codec learns the
        // method.
        for turn in 0.. {
            self.tcp.turn(turn > 0).await.map_err(|status| failed(&status))?;
            if let Some(fast) = &mut self.fast {
                fast.turn(turn > 0).await.map_err(|status| failed(&status))?;
                self.still_fast()?;
            }
            if let Some(way) = &mut self.bare
                && let Err(why) = way.turn(turn > 0).await
            {
                (*not_bare, self.bare) = (Some(why), None);
            }
            if turn > 0 && began.elapsed() > BUDGET {
                break;
            }
        }
        Ok(())
    }

    /// Measures one row after the other, and each row over every way.
    async fn rows(
        &mut self,
        rates: &mut Vec<Rates>,
        not_bare: &mut Option<String>,
    ) -> Result<(), String> {
        for row in ROWS {
            let bare_per_s = match rate(self.bare.as_mut(), row).await {
                Ok(per_s) => per_s,
                Err(why) => {
                    (*not_bare, self.bare) = (Some(why), None);
                    None
                }
            };
            let fast_per_s = rate(self.fast.as_mut(), row).await?;
            if self.fast.is_some() {
                self.still_fast()?;
            }
            let tcp_per_s = rate(Some(&mut self.tcp), row).await?;
            rates.push(Rates {
                direction: row.direction,
                bytes: row.bytes as u32,
                in_flight: row.in_flight as u32,
                bare_per_s,
                fast_per_s,
                tcp_per_s,
            });
        }
        Ok(())
    }

    fn still_fast(&self) -> Result<(), String> {
        match self.channel.path().path.is_fast() {
            true => Ok(()),
            false => Err("the fast path was lost while it was measured".to_owned()),
        }
    }
}

/// The number of operations per second over one way.
async fn rate(way: Option<&mut impl Mover>, row: Row) -> Result<Option<f64>, String> {
    let Some(way) = way else { return Ok(None) };
    let mut count = row.in_flight;
    loop {
        let began = Instant::now();
        if !way.run(row, count).await? {
            return Ok(None);
        }
        let took = began.elapsed();
        if took >= ROW {
            return Ok(Some(count as f64 / took.as_secs_f64()));
        }
        // The factor by which the number of operations has to grow to take `ROW`, with a margin.
        let wanted = ROW.as_secs_f64() * 1.2 / took.as_secs_f64().max(1e-6);
        count = (count as f64 * wanted.clamp(2.0, 16.0)) as usize;
    }
}

/// The metadata that the server's layers require, if any.
async fn metadata(hook: Option<&OfferHook>) -> Result<MetadataMap, Status> {
    match hook {
        Some(hook) => Ok(hook.ask().await?.metadata().clone()),
        None => Ok(MetadataMap::new()),
    }
}
