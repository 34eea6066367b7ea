//! Listeners and connection attempts.

use super::*;

#[tokio::test]
async fn a_wildcard_listener_takes_requests() {
    let _turn = TURN.lock().await;
    let side = on_guest_device();
    let mut listener = side.fabric.listen(&Addr::Ip("0.0.0.0:0".parse().unwrap())).unwrap();
    let port = listener.local_addr().ip().unwrap().port();
    let addr = Addr::Ip(SocketAddr::new(side.ip(), port));
    let config = config();
    let accept =
        async { listener.accept().await.unwrap().accept(&config, &side.pool, b"", TIMEOUT).await };
    let (accepted, connected) = tokio::join!(accept, side.connect(&addr));
    let (mut s, mut c) = (End::new(accepted.unwrap()), End::new(connected.unwrap().link));
    c.send(0, b"x").await;
    assert_eq!(s.receive().await.unwrap(), b"x");
}

/// Attempts are given up at any moment, while their answers arrive on another thread. All their
/// resources are freed.
#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn attempts_that_are_given_up_leave_nothing() {
    let _turn = TURN.lock().await;
    let side = on_guest_device();
    let mut listener = side.listen();
    let (addr, before) = (listener.local_addr(), completion_queues());
    let server = tokio::spawn(async move {
        let side = on_guest_device();
        while let Ok(incoming) = listener.accept().await {
            match rand_bool() {
                true => incoming.reject(b""),
                false => drop(incoming.accept(&small(), &side.pool, b"", TIMEOUT).await),
            }
        }
    });
    for n in 0..300 {
        let limit = Duration::from_micros(n % 30 * 200);
        let _ = tokio::time::timeout(limit, side.connect_with(&addr, &small(), b"")).await;
    }
    server.abort();
    let _ = server.await;
    // On iWARP a separate thread ends an attempt that is unanswered.
    let gone = async {
        while side.pool.stats().control > 0 || completion_queues() > before {
            tokio::time::sleep(Duration::from_millis(20)).await;
        }
    };
    tokio::time::timeout(TIMEOUT, gone).await.expect("something is left of an attempt");
}

/// The connection manager does not know which ports TCP uses, but on iWARP no port may be used by
/// both.
#[tokio::test]
async fn ports_that_tcp_uses_are_passed_over() {
    const RANGE: &str = "/proc/sys/net/ipv4/ip_local_port_range";
    let _turn = TURN.lock().await;
    let side = on_guest_device();
    let before = std::fs::read_to_string(RANGE).unwrap();
    std::fs::write(RANGE, "40000 40063").unwrap();
    let taken: Vec<_> = (40000..40064)
        .filter(|port| port % 4 == 0)
        .map(|port| std::net::TcpListener::bind((side.ip(), port)).unwrap())
        .collect();
    for _ in 0..24 {
        let mut listener = side.listen();
        let addr = listener.local_addr();
        let (accepted, connected) = tokio::join!(
            async {
                let incoming = listener.accept().await.unwrap();
                incoming.accept(&config(), &side.pool, b"", TIMEOUT).await
            },
            async { side.connect(&addr).await.unwrap() }
        );
        drop((accepted.unwrap(), connected));
    }
    std::fs::write(RANGE, before).unwrap();
    assert_eq!(taken.len(), 16);
}

#[tokio::test]
async fn a_dead_address_times_out() {
    let _turn = TURN.lock().await;
    let side = on_guest_device();
    // This is an address in the device's network that no host has.
    let std::net::IpAddr::V4(ip) = side.ip() else { panic!("the guest's addresses are IPv4") };
    let [a, b, c, _] = ip.octets();
    let dead = Addr::Ip(SocketAddr::from(([a, b, c, 77], 18515)));
    let timeout = Duration::from_secs(2);
    let error = side
        .fabric
        .connect(&dead, &config(), &side.pool, b"", timeout)
        .await
        .map(drop)
        .unwrap_err();
    assert!(
        matches!(error, ConnectError::Timeout { .. } | ConnectError::NoRoute { .. }),
        "{error}"
    );
    assert!(error.to_string().contains(&dead.to_string()), "{error}");
}

#[tokio::test]
async fn an_address_off_the_device_is_refused() {
    let _turn = TURN.lock().await;
    let side = on_guest_device();
    let error =
        side.connect(&Addr::Ip("192.0.2.9:1".parse().unwrap())).await.map(drop).unwrap_err();
    let expected = matches!(
        error,
        ConnectError::NoRoute { .. }
            | ConnectError::NotOnRdma { .. }
            | ConnectError::OtherDevice { .. }
    );
    assert!(expected, "{error}");
}

/// On iWARP the listener's port is a TCP port: anybody may connect and send anything.
#[tokio::test]
async fn strangers_on_the_port_are_harmless() {
    let _turn = TURN.lock().await;
    let side = on_guest_device();
    let mut listener = side.listen();
    let addr = listener.local_addr();
    for words in [b"".as_slice(), b"GET / HTTP/1.1\r\n\r\n", &[0xff; 4096]] {
        let stranger = tokio::net::TcpStream::connect(addr.ip().unwrap()).await;
        match transport(&side) {
            Transport::IWarp => drop(stranger.unwrap().try_write(words)),
            _ => assert!(stranger.is_err(), "RoCE's ports are not TCP's"),
        }
    }
    let (mut s, mut c) = pair_over(&mut listener, &side, &side, &config()).await;
    c.send(0, b"x").await;
    assert_eq!(s.receive().await.unwrap(), b"x");
}

/// Connecting to a TCP server that is not an RDMA listener fails within the timeout. This server
/// hangs up: an answer that is not an MPA frame crashes the siw driver of Linux 6.1, and the guest
/// with it.
#[tokio::test]
async fn a_tcp_server_is_no_rdma_listener() {
    let _turn = TURN.lock().await;
    let side = on_guest_device();
    let server = tokio::net::TcpListener::bind(SocketAddr::new(side.ip(), 0)).await.unwrap();
    let addr = Addr::Ip(server.local_addr().unwrap());
    let hang_up = async {
        loop {
            drop(server.accept().await.unwrap());
        }
    };
    let error = tokio::select! {
        outcome = side.connect(&addr) => outcome.map(drop).unwrap_err(),
        () = hang_up => unreachable!("the server goes on"),
    };
    match transport(&side) {
        Transport::IWarp => {
            let named = matches!(
                error,
                ConnectError::Failed { .. }
                    | ConnectError::Rejected { .. }
                    | ConnectError::Timeout { .. }
            );
            assert!(named && error.to_string().contains(&addr.to_string()), "{error}");
        }
        _ => assert!(matches!(error, ConnectError::Refused { .. }), "{error}"),
    }
}

fn rand_bool() -> bool {
    use std::hash::{BuildHasher as _, RandomState};
    RandomState::new().hash_one(0).is_multiple_of(2)
}
