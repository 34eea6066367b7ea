//! Tests of bare connections: measurements, and peers that misuse them.

use std::num::NonZeroU64;

use tonic_rdma_fabric::bare::{self, Bare, BareError, BareLimits};

use super::*;

/// WRITEs that are shorter than the longest use different parts of the source memory in turn.
const LIMITS: BareLimits = BareLimits {
    places: 4,
    place_len: 64 << 10,
    landing_part: 8,
    source_len: 64 << 10,
    requested: 1 << 24,
    requested_writes: 1 << 12,
};

async fn links(server: &Side, client: &Side) -> (AnyLink, AnyLink) {
    let (s, c) = pair_over(&mut server.listen(), server, client, &bare::config()).await;
    (s.link, c.link)
}

/// Returns the serving end's error after the other end has done `work`.
async fn served<F>(server: &Side, client: &Side, work: impl FnOnce(AnyLink) -> F) -> BareError
where
    F: Future<Output = ()>,
{
    let (s, c) = links(server, client).await;
    let serving = bare::serve(s, server.pool.clone(), LIMITS);
    let both = async { tokio::join!(serving, work(c)) };
    tokio::time::timeout(TIMEOUT, both).await.expect("an end hangs").0.unwrap_err()
}

pub async fn a_bare_connection_moves_bytes_both_ways(server: &Side, client: &Side) {
    let before = (server.pool.stats(), client.pool.stats());
    let ended = served(server, client, async |link| {
        let mut bare = Bare::open(link, client.pool.clone(), LIMITS).await.unwrap();
        assert_eq!(bare.longest(), 64 << 10);
        for (len, count, in_flight) in [(1, 1, 1), (64, 100, bare::MAX_ECHOES), (512, 40, 1000)] {
            bare.echo(len, count, in_flight).await.unwrap();
        }
        for (len, count, in_flight) in [(64 << 10, 1, 1), (4096, 100, 8), (64 << 10, 30, 1000)] {
            bare.write(len, count, in_flight).await.unwrap();
            bare.written(len, count, in_flight).await.unwrap();
        }
        // This is more than the other end writes for one request, so it takes several requests.
        let count = LIMITS.requested as usize / 4096 * 3 / 2;
        bare.written(4096, count, 8).await.unwrap();
        bare.written(64, LIMITS.requested_writes as usize * 3 / 2, 8).await.unwrap();
        bare.close();
    });
    let ended = ended.await;
    assert!(matches!(ended, BareError::Link(LinkError::Disconnected { .. })), "{ended}");
    for (pool, before) in [(&server.pool, before.0), (&client.pool, before.1)] {
        assert_eq!(pool.stats().leased, before.leased, "a place was not returned");
    }
}

pub async fn a_bare_connection_is_not_for_longer_writes(server: &Side, client: &Side) {
    let ended = served(server, client, async |link| {
        let small = BareLimits {
            place_len: 4096,
            requested: u64::MAX,
            requested_writes: u64::MAX,
            ..LIMITS
        };
        let mut bare = Bare::open(link, client.pool.clone(), small).await.unwrap();
        // No WRITE may be longer than the places of this end.
        assert_eq!(bare.longest(), 4096);
        let named = "no place for a WRITE of 1048576 bytes: the peer's longest has 4096";
        assert_eq!(bare.write(1 << 20, 1, 1).await.unwrap_err().to_string(), named);
        let error = bare.written(8192, 1, 1).await.unwrap_err();
        assert!(matches!(error, BareError::TooLong { len: 8192, longest: 4096 }), "{error}");
        // This is more than the other end writes for one request.
        let error = bare.written(4096, 1 << 20, 8).await.unwrap_err();
        assert!(matches!(error, BareError::Link(_)), "{error}");
    });
    let ended = ended.await.to_string();
    assert_eq!(ended, "the peer wants 4294967296 bytes written, at most 16777216 are");
}

/// One request for many short WRITEs has few bytes, but would cost the other end a lot of time.
pub async fn a_bare_connection_is_charged_for_each_write(server: &Side, client: &Side) {
    let ended = served(server, client, async |link| {
        let greedy = BareLimits { requested_writes: u64::MAX, ..LIMITS };
        let mut bare = Bare::open(link, client.pool.clone(), greedy).await.unwrap();
        let error = bare.written(1, 1 << 20, 8).await.unwrap_err();
        assert!(matches!(error, BareError::Link(_)), "{error}");
    });
    let ended = ended.await.to_string();
    assert_eq!(ended, "the peer wants 1048576 WRITEs, at most 4096 are done at a request");
}

/// The messages are composed by hand, because no client of this crate sends them.
pub async fn a_bare_connection_ends_for_nonsense(server: &Side, client: &Side) {
    let place = |addr: u64, rkey: u32, len: u32| {
        let mut message = vec![2];
        message.extend(addr.to_le_bytes());
        message.extend(rkey.to_le_bytes());
        message.extend(len.to_le_bytes());
        message
    };
    let write = |len: u32, count: u32, in_flight: u32| {
        let mut message = vec![3];
        [len, count, in_flight].iter().for_each(|field| message.extend(field.to_le_bytes()));
        message
    };
    let nowhere = NonZeroU64::MAX.get() - 4095;
    let cases: [(&[Vec<u8>], &str); 7] = [
        (&[vec![9; 300]], "unknown kind 9: expected 1 to 4, received 300 bytes: [09"),
        (
            &[vec![4]],
            "expected echo, places or write, received written (kind 4); run one version of \
             tonic-rdma at both ends",
        ),
        (&[write(4096, 1, 1)], "the peer's longest has 0"),
        (&[place(nowhere, 7, 4096), place(0, 0, 0)], "granted before, received places"),
        (&[place(nowhere, 7, u32::MAX), write(0, 4096, 1)], "no place for a WRITE of 0 bytes"),
        (
            &[place(nowhere, 7, u32::MAX), write(1 << 20, 1, 1)],
            "the peer wants WRITEs of 1048576 bytes, each may have at most 65536",
        ),
        // No memory has this address and key. The link chooses the text of the error.
        (&[place(nowhere, 0xdead_beef, u32::MAX), write(1, 1000, u32::MAX)], ""),
    ];
    for (messages, named) in cases {
        let ended = served(server, client, async |link| {
            let mut end = End::new(link);
            for message in messages {
                let send = |end: &mut End| -> Result<(), LinkError> {
                    end.link.block_mut()[..message.len()].copy_from_slice(message);
                    end.queue(Work::Send { offset: 0, len: message.len() }, true)?;
                    end.link.ring_doorbell()
                };
                // The other end may have closed the link already.
                if send(&mut end).is_err() || end.poll().await.is_err() {
                    return;
                }
            }
            while end.poll().await.is_ok() {}
        });
        let ended = ended.await.to_string();
        assert!(ended.contains(named), "{messages:02x?}: {ended}");
    }
}
