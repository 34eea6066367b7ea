//! Each side has its own time-out for a silent peer.
//!
//! The test uses a paused clock and pipes instead of sockets, as `reconnect_storm` does.

use std::time::Duration;

use tokio::time::Instant;
use tonic_rdma_fabric::sim::{SimConfig, SimNet};

use crate::tests::failure::reconnect_storm::{Port, Serving};
use crate::tests::support::echo::Client;
use crate::{Context, Endpoint, Path, ReasonCode, Server};

const LONG: Duration = Duration::from_secs(3600);

/// When the loss shows on the channel, on the clock of the test, after everything has fallen
/// silent: so long after the last call, with another in flight if it is `busy`.
async fn noticed(
    client: Option<Duration>,
    server: Option<Duration>,
    rest: Duration,
    busy: bool,
) -> Duration {
    let net = SimNet::new(SimConfig::default());
    let devices = [1, 2].map(|n| net.device(format!("sim{n}"), [10, 0, 0, n].into()));
    let [servers, clients] = devices.clone().map(|device| Context::builder().sim(device).build());
    let port = Port::default();
    let mut builder = Server::builder().context(servers);
    let mut endpoint = Endpoint::from_static("http://silence").context(clients);
    if let Some(time) = server {
        builder = builder.dead_peer_timeout(time);
    }
    if let Some(time) = client {
        endpoint = endpoint.dead_peer_timeout(time);
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
    let noticed = match client < Some(LONG) {
        true => {
            let info = channel.path_changed().await;
            assert_eq!((info.path, info.reason.unwrap().code()), (Path::Tcp, ReasonCode::LinkLost));
            begin.elapsed()
        }
        // The server detects the loss.
        false => {
            while stats.get().connections_lost == 0 {
                tokio::time::sleep(Duration::from_millis(10)).await;
            }
            begin.elapsed()
        }
    };
    devices[0].freeze(false);
    if let Some(call) = call {
        call.abort();
    }
    drop(channel);
    serving.end().await;
    noticed
}

#[tokio::test(start_paused = true)]
async fn either_side_waits_as_long_as_it_is_told() {
    for time in [20, 400, 60_000].map(Duration::from_millis) {
        // At once, and just after the answer to the first ping.
        for rest in [Duration::ZERO, time * 11 / 40] {
            for (client, server) in [(time, LONG), (LONG, time)] {
                // A peer that nobody waits for is asked once in 24 times as long.
                for (busy, least, most) in [(true, time / 2, time), (false, time * 24, time * 25)] {
                    let noticed = noticed(Some(client), Some(server), rest, busy).await;
                    assert!(
                        noticed > least && noticed <= most + Duration::from_millis(20),
                        "{client:?}, {server:?}, {rest:?}, busy {busy}: {noticed:?}"
                    );
                }
            }
        }
    }
    let usual = noticed(None, Some(LONG), Duration::ZERO, true).await;
    assert!(
        usual > Duration::from_secs(2) && usual < Duration::from_secs(6),
        "by default after {usual:?}"
    );
}
