//! Queue pairs and completion queues: how many links share a completion queue, and what ends a
//! link.

use super::*;

/// No attribute of a device says how long inline data may be, and Soft-iWARP accepts less than
/// others.
#[tokio::test]
async fn inline_data_is_as_long_as_the_device_takes() {
    let _turn = TURN.lock().await;
    let side = on_guest_device();
    let mut listener = side.listen();
    let mut granted = async |inline| {
        let config = LinkConfig { inline, ..small() };
        let (_, client) = pair_over(&mut listener, &side, &side, &config).await;
        client.link.caps().max_inline as u32
    };
    let longest = granted(256).await;
    assert!(longest >= 64, "{longest}");
    assert_eq!(granted(longest).await, longest);
    assert_eq!(granted(longest - 1).await, longest - 1);
    assert_eq!(granted(256).await, longest);
    println!("at most {longest} of 256 bytes inline");
    match transport(&side) {
        Transport::IWarp => assert!(longest < 256, "it was not searched"),
        _ => assert_eq!(longest, 256),
    }
}

#[tokio::test]
async fn a_full_completion_queue_is_followed_by_another() {
    let _turn = TURN.lock().await;
    let side = on_guest_device();
    let mut listener = side.listen();
    let before = completion_queues();
    let mut links = Vec::new();
    for n in 1..=6 {
        links.push(pair_over(&mut listener, &side, &side, &small()).await);
        assert_eq!(completion_queues(), before + n, "two links fill a queue");
    }
    for round in 0..20_u8 {
        for (server, client) in &mut links {
            let posted: Vec<u64> =
                (0..4).map(|slot| client.post(slot, &[round, slot as u8])).collect();
            for slot in 0..4 {
                assert_eq!(server.receive().await.unwrap(), [round, slot]);
            }
            client.done(posted[3]).await.unwrap();
        }
    }
    // New links take the places of links that were dropped.
    links.drain(2..4);
    links.push(pair_over(&mut listener, &side, &side, &small()).await);
    links.push(pair_over(&mut listener, &side, &side, &small()).await);
    assert_eq!(completion_queues(), before + 6);
    drop(links);
    assert_eq!(completion_queues(), before);
    let too_small = LinkConfig { max_cq_entries: 12, ..small() };
    let addr = listener.local_addr();
    let error = side.connect_with(&addr, &too_small, b"").await.map(drop).unwrap_err();
    assert!(matches!(error, ConnectError::Config(_)), "{error}");
}

#[tokio::test]
async fn links_have_no_descriptors_of_their_own() {
    let _turn = TURN.lock().await;
    let side = on_guest_device();
    let mut listener = side.listen();
    let shared = LinkConfig { max_cq_entries: 1 << 15, ..small() };
    let mut links = vec![pair_over(&mut listener, &side, &side, &shared).await];
    let (descriptors, queues) = (descriptors(), completion_queues());
    for _ in 0..3 {
        links.push(pair_over(&mut listener, &side, &side, &shared).await);
    }
    assert_eq!(completion_queues(), queues, "eight links fit into the first one");
    assert_eq!(self::descriptors(), descriptors);
}

/// Some pairs exchange messages while other pairs end in every possible way.
#[tokio::test]
async fn a_link_that_dies_takes_no_other_with_it() {
    let _turn = TURN.lock().await;
    let side = on_guest_device();
    let mut listener = side.listen();
    let shared = LinkConfig { max_cq_entries: 1 << 15, ..small() };
    let mut stay = Vec::new();
    for _ in 0..4 {
        stay.push(pair_over(&mut listener, &side, &side, &shared).await);
    }
    for round in 0..24_u8 {
        let (mut s, mut c) = pair_over(&mut listener, &side, &side, &shared).await;
        c.send(0, b"first").await;
        assert_eq!(s.receive().await.unwrap(), b"first");
        // Work is in flight when the link ends, and nobody takes its completions.
        for slot in 0..4 {
            c.post(slot, &[round; 300]);
        }
        match round % 6 {
            0 => c.link.disconnect(),
            1 => s.link.disconnect(),
            2 => drop(c),
            3 => drop(s),
            // One SEND more than the peer has RECVs for.
            4 => {
                c.post(0, b"too many");
                c.death().await;
            }
            // A WRITE that the peer's device refuses.
            _ => {
                let src = WriteSource::Staged { offset: 0, len: 64 };
                c.queue(Work::Write { src, remote_addr: 4096, rkey: 0xdead }, true).unwrap();
                c.link.ring_doorbell().unwrap();
                c.death().await;
            }
        }
        for (server, client) in &mut stay {
            for slot in 0..4 {
                client.post(slot, &[round, slot as u8]);
            }
            for slot in 0..4 {
                assert_eq!(server.receive().await.unwrap(), [round, slot]);
            }
            server.send(0, &[round]).await;
            assert_eq!(client.receive().await.unwrap(), [round]);
        }
    }
}

#[tokio::test]
async fn a_send_without_a_recv_kills_the_link() {
    let _turn = TURN.lock().await;
    let side = on_guest_device();
    // The same happens if no completion is signalled.
    for signal in [true, false] {
        let (mut s, mut c) = greeted_pair(&side, &side).await;
        for i in 0..config().recv_slots as usize + 1 {
            c.queue_send(i, b"flood", signal).unwrap();
        }
        c.link.ring_doorbell().unwrap();
        let error = c.death().await;
        match transport(&side) {
            Transport::RoCE => {
                assert!(matches!(error, LinkError::Completion { code: 13, .. }), "{error}")
            }
            _ => assert!(matches!(error, LinkError::Disconnected { .. }), "{error}"),
        }
        drop(c);
        for _ in 0..config().recv_slots {
            assert_eq!(s.receive_and_hold().await.unwrap().1, b"flood");
        }
        let error = s.death().await;
        assert!(matches!(error, LinkError::Disconnected { .. }), "{error}");
    }
}

#[tokio::test]
async fn a_message_longer_than_the_slot_kills_the_link() {
    let _turn = TURN.lock().await;
    let side = on_guest_device();
    let mut listener = side.listen();
    let addr = listener.local_addr();
    let small = LinkConfig { slot_size: 64, ..config() };
    let accept =
        async { listener.accept().await.unwrap().accept(&small, &side.pool, b"", TIMEOUT).await };
    let (accepted, connected) = tokio::join!(accept, side.connect(&addr));
    let (mut s, mut c) = (End::new(accepted.unwrap()), End::new(connected.unwrap().link));
    c.post(1, &[7; 65]);
    let receiver = s.death().await;
    assert!(!matches!(receiver, LinkError::Closed { .. }), "{receiver}");
    drop(s);
    c.death().await;
}

/// The application at the other end cannot block this end.
#[tokio::test]
async fn a_peer_that_does_not_look_holds_nobody_up() {
    let _turn = TURN.lock().await;
    let side = on_guest_device();
    let (mut s, mut c) = greeted_pair(&side, &side).await;
    for i in 0..config().recv_slots as usize {
        c.send(i, &[i as u8; 100]).await;
    }
    for i in 0..config().recv_slots as usize {
        assert_eq!(s.receive().await.unwrap(), [i as u8; 100]);
    }
}
