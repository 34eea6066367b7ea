//! The connecting side.

use std::io;
use std::sync::Arc;
use std::time::Duration;

use tonic_rdma_memory::Pool;

use super::link::ShmLink;
use super::setup::{Own, Theirs};
use super::socket::{Received, Socket};
use super::wire::Message;
use super::{ShmDevice, is_kin};
use crate::addr::{Addr, ShmAddr};
use crate::block::ControlBlock;
use crate::error::{ConnectError, ConnectStep};
use crate::link::{LinkConfig, MAX_PRIVATE_DATA};

/// Pause before another try where the listener has more to do than it takes on.
const BUSY: Duration = Duration::from_millis(1);

/// The peer has closed its end.
fn has_gone(error: &io::Error) -> bool {
    matches!(error.kind(), io::ErrorKind::ConnectionReset | io::ErrorKind::BrokenPipe)
}

pub(super) async fn connect(
    device: &ShmDevice,
    addr: &ShmAddr,
    config: &LinkConfig,
    pool: &Pool,
    private_data: &[u8],
    timeout: Duration,
) -> Result<(ShmLink, Vec<u8>), ConnectError> {
    if private_data.len() > MAX_PRIVATE_DATA {
        return Err(ConnectError::PrivateDataTooLong { len: private_data.len() });
    }
    let attempt = attempt(device, addr, config, pool, private_data);
    let late =
        || ConnectError::Timeout { addr: addr.clone().into(), step: ConnectStep::Connect, after: timeout };
    tokio::time::timeout(timeout, attempt).await.map_err(|_| late())?
}

async fn attempt(
    device: &ShmDevice,
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
    let block = ControlBlock::new(pool, config)?;
    let own = Own::new(config).map_err(failed)?;
    let socket = loop {
        match Socket::connect(addr) {
            Ok(socket) => break socket,
            Err(error) if error.kind() == io::ErrorKind::WouldBlock => tokio::time::sleep(BUSY).await,
            Err(error) if error.kind() == io::ErrorKind::ConnectionRefused => {
                return Err(ConnectError::Refused { addr: addr.clone().into() });
            }
            Err(error) => return Err(failed(error)),
        }
    };
    let peer = socket.peer().map_err(failed)?;
    if !device.allows(peer.uid) {
        return Err(ConnectError::NotAllowed { addr: Addr::Process(peer.pid), uid: peer.uid });
    }
    let hello = Message::Hello { shape: own.shape, private_data: private_data.to_vec() };
    match own.with_fds(|fds| socket.send(&hello.encode(), fds)) {
        Err(error) if !has_gone(&error) => return Err(failed(error)),
        _ => {}
    }
    // One that hangs up has nothing to say about it; a listener that goes does so too.
    let gone = || ConnectError::Rejected { addr: addr.clone().into(), private_data: Vec::new() };
    let answer = match socket.next().await {
        // A listener that refuses does not read the greeting first, and that is told before what it said.
        Err(error) if has_gone(&error) => socket.receive().unwrap_or(None),
        answer => answer.map_err(failed)?,
    };
    let Some(Received { bytes, fds }) = answer else { return Err(gone()) };
    match Message::decode(&bytes) {
        Some(Message::Accept { shape, private_data }) => {
            let theirs = Theirs::new(shape, fds, is_kin(peer.uid)).map_err(failed)?;
            Ok((ShmLink::new(device, socket, peer, own, theirs, block, config), private_data))
        }
        Some(Message::Reject { private_data }) => {
            Err(ConnectError::Rejected { addr: addr.clone().into(), private_data })
        }
        Some(Message::OtherUser { uid }) => {
            Err(ConnectError::NotWelcome { addr: Addr::Process(peer.pid), uid })
        }
        Some(Message::Refused { text }) => {
            Err(failed(io::Error::new(io::ErrorKind::PermissionDenied, format!("the peer says: {text:?}"))))
        }
        _ => Err(failed(io::Error::new(io::ErrorKind::InvalidData, "an answer that makes no sense"))),
    }
}
