//! Connects a device to itself, and performs a SEND and a WRITE, which are the operations of a
//! call.

use std::future::poll_fn;
use std::net::{IpAddr, SocketAddr};
use std::time::{Duration, Instant};

use tonic_rdma_fabric::{
    Addr, AnyLink, Completion, Fabric, Link, LinkConfig, LinkError, Work, WriteSource,
};
use tonic_rdma_memory::Pool;

use crate::diagnose::peer_report::Step;
use crate::path::from_error;
use crate::path::reason::{Reason, ReasonCode};

/// Time limit of each step, which usually takes a millisecond.
const LIMIT: Duration = Duration::from_secs(5);
/// Size of the WRITE in bytes.
const BULK: usize = 4096;
/// Size of the SEND in bytes.
const SMALL: usize = 64;

fn config() -> LinkConfig {
    LinkConfig {
        recv_slots: 4,
        slot_size: 1024,
        send_slots: 4,
        staging: BULK,
        send_queue: 8,
        ..LinkConfig::default()
    }
}

/// Connects the device to one of its own addresses, and returns the result of each step.
pub(in crate::diagnose) async fn run(fabric: &Fabric, pool: &Pool, ip: IpAddr) -> Vec<Step> {
    let mut steps = Vec::new();
    let ends = timed(&mut steps, format!("connection to {ip}"), connect(fabric, pool, ip)).await;
    let Some((mut client, mut server)) = ends else { return steps };
    // The connecting side sends first (R3).
    let sent =
        timed(&mut steps, format!("SEND of {SMALL} bytes"), send(&mut client, &mut server)).await;
    if sent.is_some() {
        timed(
            &mut steps,
            format!("RDMA WRITE of {BULK} bytes"),
            write(&mut client, &mut server, pool),
        )
        .await;
    }
    client.disconnect();
    steps
}

async fn timed<T>(
    steps: &mut Vec<Step>,
    name: String,
    work: impl Future<Output = Result<T, Reason>>,
) -> Option<T> {
    let began = Instant::now();
    let done = tokio::time::timeout(LIMIT, work).await.unwrap_or_else(|_| {
        let detail = format!("nothing after {} ms", LIMIT.as_millis());
        Err(Reason::new(ReasonCode::HandshakeTimeout, detail))
    });
    let micros = u64::try_from(began.elapsed().as_micros()).unwrap_or(u64::MAX);
    let (done, reason) = match done {
        Ok(done) => (Some(done), None),
        Err(reason) => (None, Some(reason)),
    };
    steps.push(Step { name, micros, reason, detail: String::new() });
    done
}

async fn connect(fabric: &Fabric, pool: &Pool, ip: IpAddr) -> Result<(AnyLink, AnyLink), Reason> {
    let config = config();
    // The port is open to anyone, so a connect request without this secret is refused.
    let mut word = [0; 16];
    getrandom::fill(&mut word).map_err(no_randomness)?;
    let mut listener =
        fabric.listen(&Addr::Ip(SocketAddr::new(ip, 0))).map_err(from_error::fabric)?;
    let addr = listener.local_addr();
    let accept = async {
        loop {
            let incoming = listener.accept().await.map_err(from_error::fabric)?;
            match incoming.private_data().starts_with(&word) {
                true => {
                    return incoming
                        .accept(&config, pool, &[], LIMIT)
                        .await
                        .map_err(from_error::connect);
                }
                false => incoming.reject(&[]),
            }
        }
    };
    let connect = async {
        fabric.connect(&addr, &config, pool, &word, LIMIT).await.map_err(from_error::connect)
    };
    let (connected, server) = tokio::try_join!(connect, accept)?;
    Ok((connected.link, server))
}

async fn send(client: &mut AnyLink, server: &mut AnyLink) -> Result<(), Reason> {
    let message = fill(client, 0, SMALL)?;
    client.queue(1, Work::Send { offset: 0, len: SMALL }, true).map(drop).map_err(lost)?;
    client.ring_doorbell().map_err(lost)?;
    match receive(client, server).await? == message {
        true => Ok(()),
        false => Err(wrong("the SEND")),
    }
}

async fn write(client: &mut AnyLink, server: &mut AnyLink, pool: &Pool) -> Result<(), Reason> {
    let register = |error| from_error::pool(&tonic_rdma_memory::PoolError::Register(error));
    let landing = pool.landing().alloc(BULK, BULK).map_err(register)?;
    let Some(landing) = landing else {
        return Err(Reason::new(ReasonCode::PoolExhausted, "all landing memory is in use"));
    };
    server.share(landing.rkey()).map_err(lost)?;
    // The WRITE reads the memory after the SEND slots.
    let offset = (config().send_slots * config().slot_size) as usize;
    let payload = fill(client, offset, BULK)?;
    let src = WriteSource::Staged { offset, len: BULK };
    let write = Work::Write { src, remote_addr: landing.addr(), rkey: landing.rkey() };
    client.queue(2, write, false).map(drop).map_err(lost)?;
    client.queue(3, Work::Send { offset: 0, len: SMALL }, true).map(drop).map_err(lost)?;
    client.ring_doorbell().map_err(lost)?;
    // The bytes of the WRITE are present when the SEND behind it arrives (R4).
    receive(client, server).await?;
    match landing.filled(BULK).to_private() == payload {
        true => Ok(()),
        false => Err(wrong("the RDMA WRITE")),
    }
}

/// Fills a part of the link's block with random bytes, and returns these bytes.
fn fill(link: &mut AnyLink, offset: usize, len: usize) -> Result<Vec<u8>, Reason> {
    let mut bytes = vec![0; len];
    getrandom::fill(&mut bytes).map_err(no_randomness)?;
    if let Some(place) = link.block_mut().get_mut(offset..offset + len) {
        place.copy_from_slice(&bytes);
    }
    Ok(bytes)
}

fn no_randomness(error: getrandom::Error) -> Reason {
    let detail = format!("the operating system returns no random bytes: {error}");
    Reason::new(ReasonCode::HandshakeRejected, detail)
}

/// Returns the server's next message. Polls both ends, because either may notice that the link is
/// dead.
async fn receive(client: &mut AnyLink, server: &mut AnyLink) -> Result<Vec<u8>, Reason> {
    let (mut sent, mut got) = (Vec::new(), Vec::new());
    loop {
        poll_fn(|cx| {
            let polls = [client.poll(cx, &mut sent), server.poll(cx, &mut got)];
            let failed = polls.iter().find_map(|poll| match poll {
                std::task::Poll::Ready(Err(error)) => Some(error.clone()),
                _ => None,
            });
            match failed {
                Some(error) => std::task::Poll::Ready(Err(error)),
                None if polls.iter().any(|poll| poll.is_ready()) => std::task::Poll::Ready(Ok(())),
                None => std::task::Poll::Pending,
            }
        })
        .await
        .map_err(lost)?;
        for completion in got.drain(..) {
            if let Completion::Received { slot, len } = completion {
                let message = server.recv_slot(slot, len).to_vec();
                server.repost(slot).map_err(lost)?;
                return Ok(message);
            }
        }
    }
}

fn lost(error: LinkError) -> Reason {
    Reason::new(ReasonCode::LinkLost, error.to_string())
}

fn wrong(what: &str) -> Reason {
    Reason::new(ReasonCode::LinkLost, format!("{what} arrived with different bytes than were sent"))
}
