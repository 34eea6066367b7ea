//! Each side notices the loss of a path, whatever the settings. A program's keep-alive only makes a
//! side ask earlier.
//!
//! The test uses a paused clock and pipes instead of sockets, as `reconnect_storm` does.

use std::time::Duration;

use tokio::time::Instant;
use tonic_rdma_fabric::sim::{SimConfig, SimNet};

use crate::tests::failure::reconnect_storm::{Port, Serving};
use crate::tests::support::echo::Client;
use crate::{Context, Endpoint, Path, ReasonCode, Server};

const SECOND: Duration = Duration::from_secs(1);

/// The side that must notice the loss.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
enum Side {
    Client,
    Server,
}

/// The time on the test's clock from the stop of all traffic until `side` notices the loss. The
/// last call ended `rest` before the stop, and another call is in flight if `busy`.
async fn noticed(side: Side, keep_alive: Option<Duration>, rest: Duration, busy: bool) -> Duration {
    let net = SimNet::new(SimConfig::default());
    let devices = [1, 2].map(|n| net.device(format!("sim{n}"), [10, 0, 0, n].into()));
    let [servers, clients] = devices.clone().map(|device| Context::builder().sim(device).build());
    let port = Port::default();
    let mut builder = Server::builder().context(servers);
    let mut endpoint = Endpoint::from_static("http://silence").context(clients);
    if let Some(time) = keep_alive {
        // TCP is not frozen in this test, so the same setting has no effect on the TCP connection.
        builder = builder.http2_keepalive_interval(Some(time)).http2_keepalive_timeout(Some(time));
        endpoint = endpoint.http2_keep_alive_interval(time).keep_alive_timeout(time);
    }
    let stats = builder.stats();
    let serving = Serving::start(&port, builder);
    let connector = tower::service_fn(move |_| std::future::ready(port.connect()));
    let mut channel = endpoint.connect_with_connector(connector).await.unwrap();
    assert_eq!(channel.path().path, Path::Sim, "{}", channel.path());
    assert_eq!(Client::new(channel.clone()).say("hello").await.unwrap(), "hello");
    let call = busy.then(|| {
        let mut client = Client::new(channel.clone());
        tokio::spawn(async move { client.say("zzz").await })
    });
    tokio::time::sleep(rest.max(Duration::from_millis(1))).await;
    devices[0].freeze(true);
    let begin = Instant::now();
    match side {
        Side::Client => {
            let info = channel.path_changed().await;
            assert_eq!((info.path, info.reason.unwrap().code()), (Path::Tcp, ReasonCode::LinkLost));
        }
        Side::Server => {
            while stats.get().connections_lost == 0 {
                tokio::time::sleep(Duration::from_millis(10)).await;
            }
        }
    }
    let noticed = begin.elapsed();
    devices[0].freeze(false);
    if let Some(call) = call {
        call.abort();
    }
    drop(channel);
    serving.end().await;
    noticed
}

/// Timers may be late by a 32nd of their wait, and one of the server's timers checks every 10 ms.
fn late(time: Duration) -> Duration {
    time + time / 32 + Duration::from_millis(20)
}

#[tokio::test(start_paused = true)]
async fn a_path_that_is_gone_is_noticed_by_either_side() {
    for side in [Side::Client, Side::Server] {
        // The traffic stops immediately, or just after the answer to a probe.
        for rest in [Duration::ZERO, Duration::from_millis(1300)] {
            // A peer that no call waits for is asked once in two minutes.
            for (busy, least, most) in [(true, 2, 5), (false, 60, 126)] {
                let noticed = noticed(side, None, rest, busy).await;
                assert!(
                    noticed > SECOND * least && noticed <= late(SECOND * most),
                    "{side:?}, {rest:?}, busy {busy}: {noticed:?}"
                );
            }
        }
    }
}

#[tokio::test(start_paused = true)]
async fn a_keep_alive_notices_it_earlier() {
    for side in [Side::Client, Side::Server] {
        for time in [50, 400, 1000].map(Duration::from_millis) {
            let noticed = noticed(side, Some(time), Duration::ZERO, true).await;
            assert!(noticed > time && noticed <= late(time * 2), "{side:?}, {time:?}: {noticed:?}");
        }
    }
}
