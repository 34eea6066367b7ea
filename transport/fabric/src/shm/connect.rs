//! The connecting side of a shared-memory connection.

use std::io;
use std::os::fd::AsFd;
use std::sync::Arc;
use std::time::Duration;

use tonic_rdma_memory::Pool;

use crate::addr::{Addr, ShmAddr};
use crate::control_block::ControlBlock;
use crate::error::{ConnectError, ConnectStep, FabricError, ONE_VERSION};
use crate::link::MAX_PRIVATE_DATA;
use crate::link_config::LinkConfig;
use crate::shm::context::DeviceContext;
use crate::shm::link::ShmLink;
use crate::shm::offers::Taken;
use crate::shm::same_user::Candidate;
use crate::shm::setup::Rings;
use crate::shm::socket::wire::{ANSWERS, Message, VERSION, other_version, unexpected};
use crate::shm::socket::{Socket, SocketMessage, is_end};
use crate::shm::wakeup::Wakeup;
use crate::shm::wakeup::channels::{self, Chosen};

/// Pause before another try if the listener's backlog is full.
const RETRY_PAUSE: Duration = Duration::from_millis(1);

pub(super) async fn connect(
    context: &DeviceContext,
    addr: &ShmAddr,
    config: &LinkConfig,
    pool: &Pool,
    private_data: &[u8],
    timeout: Duration,
) -> Result<(ShmLink, Vec<u8>), ConnectError> {
    if private_data.len() > MAX_PRIVATE_DATA {
        return Err(ConnectError::PrivateDataTooLong { len: private_data.len() });
    }
    let attempt = attempt(context, addr, config, pool, private_data);
    let late = || ConnectError::Timeout {
        addr: addr.clone().into(),
        step: ConnectStep::Connect,
        after: timeout,
    };
    tokio::time::timeout(timeout, attempt).await.map_err(|_| late())?
}

async fn attempt(
    context: &DeviceContext,
    addr: &ShmAddr,
    config: &LinkConfig,
    pool: &Pool,
    private_data: &[u8],
) -> Result<(ShmLink, Vec<u8>), ConnectError> {
    let failed = |source: io::Error| ConnectError::Failed {
        addr: addr.clone().into(),
        step: ConnectStep::Connect,
        source: Arc::new(source),
    };
    let mut socket = loop {
        match Socket::connect(addr) {
            Ok(socket) => break socket,
            Err(error) if error.kind() == io::ErrorKind::WouldBlock => {
                tokio::time::sleep(RETRY_PAUSE).await
            }
            Err(error) if error.kind() == io::ErrorKind::ConnectionRefused => {
                return Err(ConnectError::Refused { addr: addr.clone().into() });
            }
            Err(error) if is_forbidden(&error) => {
                let (what, source) = ("no socket to connect with", Arc::new(error));
                return Err(FabricError::Shm { what, source }.into());
            }
            Err(error) => return Err(failed(error)),
        }
    };
    let peer = socket.peer();
    if !context.allows(peer.uid) {
        return Err(ConnectError::NotAllowed { addr: Addr::Process(peer.pid), uid: peer.uid });
    }
    // Create the candidate before the peer answers, because the sender of the answer may have to
    // confirm the candidate (`same_user`).
    let candidate = Candidate::of(&mut socket);
    let own_shape = Rings::shape(config);
    let hello = Message::Hello {
        shape: own_shape,
        takes: config.takes,
        private_data: private_data.to_vec(),
    };
    match socket.send(&hello.encode(), &[]) {
        Err(error) if !is_end(&error) => return Err(failed(error)),
        _ => {}
    }
    // This work runs while the peer checks the greeting.
    let block = ControlBlock::without_recvs(pool, config)?;
    // The reason is unknown if the server hangs up or its listener is dropped.
    let gone = || ConnectError::Rejected { addr: addr.clone().into(), private_data: Vec::new() };
    let answer = match socket.next().await {
        // A listener that refuses this process's user closes the socket without reading the
        // greeting. The first read then fails, and the next read returns the answer.
        Err(error) if is_end(&error) => socket.receive().unwrap_or(None),
        answer => answer.map_err(failed)?,
    };
    let Some(SocketMessage { bytes, has_fds, .. }) = answer else { return Err(gone()) };
    match (Message::decode(&bytes), has_fds) {
        (Some(Message::Accept { shape, takes, runtime, nonce, private_data }), true) => {
            let (Rings { reader, writer }, confirmed) = socket
                .take_fds(move |taken| {
                    let rings = Rings::take(own_shape, shape, &taken.fds, peer.uid)?;
                    let confirm = |c: Candidate| c.confirm(taken.sender, channels::confirmed);
                    Ok((rings, candidate.and_then(confirm)))
                })
                .await
                .map_err(failed)?;
            let process = confirmed.as_ref().map(|peer| peer.process);
            let chosen = confirmed.filter(|_| runtime != 0);
            let chosen = chosen.and_then(|peer| channels::choose(peer, runtime));
            let (sent, wakeup) = match chosen {
                Some(Chosen { member, name, files }) => {
                    let message = Message::Ready { nonce, channel: Some(name) }.encode();
                    let sent = match &files {
                        Some((channel, page)) => {
                            let [own, servers] = channel.event_fds();
                            socket.send(&message, &[own, servers, page.as_fd()])
                        }
                        None => socket.send(&message, &[]),
                    };
                    (sent, Wakeup::Channel(member))
                }
                None => {
                    let message = Message::Ready { nonce, channel: None }.encode();
                    (socket.send(&message, &[]), Wakeup::Message)
                }
            };
            sent.map_err(|error| if is_end(&error) { gone() } else { failed(error) })?;
            // From here on, this end does not check which of the peer's processes sends.
            let _ = socket.tell_senders(false);
            let ends = (reader, writer, wakeup);
            let peer = (socket, process, Taken { own: config.takes, peer: takes });
            Ok((ShmLink::new(context, peer, ends, (pool, block), config), private_data))
        }
        (Some(Message::Reject { private_data }), false) => {
            Err(ConnectError::Rejected { addr: addr.clone().into(), private_data })
        }
        (Some(Message::OtherUser { uid }), false) => {
            Err(ConnectError::NotWelcome { addr: Addr::Process(peer.pid), uid })
        }
        (Some(Message::NoRoom { errno }), false) => Err(no_room(Addr::Process(peer.pid), errno)),
        (Some(Message::Refused { text }), false) => Err(failed(io::Error::new(
            io::ErrorKind::PermissionDenied,
            format!("the peer says: {text:?}"),
        ))),
        _ => Err(match other_version(&bytes) {
            Some(version) => {
                ConnectError::OtherVersion { addr: addr.clone().into(), version, own: VERSION }
            }
            None => {
                let what = format!("{}; {ONE_VERSION}", unexpected(ANSWERS, &bytes, has_fds));
                failed(io::Error::new(io::ErrorKind::InvalidData, what))
            }
        }),
    }
}

fn no_room(addr: Addr, errno: u32) -> ConnectError {
    let errno = i32::try_from(errno).unwrap_or(0);
    ConnectError::PeerLimit { addr, source: Arc::new(io::Error::from_raw_os_error(errno)) }
}

/// Whether a sandbox forbids Unix sockets.
fn is_forbidden(error: &io::Error) -> bool {
    error.kind() == io::ErrorKind::PermissionDenied
        || error.raw_os_error() == Some(libc::EAFNOSUPPORT)
}
