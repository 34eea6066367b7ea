//! The accepting side.

use std::io;
use std::sync::Arc;
use std::time::Duration;

use tokio::task::JoinSet;
use tonic_rdma_memory::Pool;

use super::link::ShmLink;
use super::ring::Shape;
use super::setup::{Own, Theirs};
use super::socket::{Credentials, Listening, Received, Socket};
use super::wire::Message;
use super::{ShmDevice, is_kin};
use crate::addr::{Addr, ShmAddr};
use crate::block::ControlBlock;
use crate::error::{ConnectError, ConnectStep, FabricError};
use crate::link::{LinkConfig, MAX_PRIVATE_DATA};

/// A connection that has not said HELLO by then is closed.
const HELLO_LIMIT: Duration = Duration::from_secs(5);
/// Connections that may be waited for at a time; further ones wait in the kernel.
const PENDING: usize = 64;
/// Pause after the process has run out of descriptors or memory.
const SHORT_OF: Duration = Duration::from_millis(100);

/// A listener for processes of this host.
#[derive(Debug)]
pub struct ShmListener {
    device: ShmDevice,
    addr: ShmAddr,
    listening: Listening,
    /// Those that have connected and not yet said HELLO.
    pending: JoinSet<Option<ShmIncoming>>,
}

impl ShmListener {
    pub(super) fn new(device: ShmDevice, addr: &ShmAddr) -> Result<ShmListener, FabricError> {
        let listening = Listening::bind(addr).map_err(|error| match error.kind() {
            io::ErrorKind::AddrInUse => FabricError::AddressInUse { addr: addr.clone().into() },
            _ => FabricError::Shm { what: "no socket to listen on", source: Arc::new(error) },
        })?;
        Ok(ShmListener { device, addr: addr.clone(), listening, pending: JoinSet::new() })
    }

    /// The name of its socket.
    pub fn local_addr(&self) -> ShmAddr {
        self.addr.clone()
    }

    /// Waits for the next connect request. Cancel safe.
    ///
    /// # Errors
    /// The socket is dead. A peer cannot cause that.
    pub async fn accept(&mut self) -> Result<ShmIncoming, FabricError> {
        loop {
            tokio::select! {
                Some(done) = self.pending.join_next() => {
                    if let Ok(Some(incoming)) = done {
                        return Ok(incoming);
                    }
                }
                accepted = self.listening.accept(), if self.pending.len() < PENDING => match accepted {
                    Ok(socket) => self.greet(socket),
                    Err(error) if is_shortage(&error) => {
                        tracing::warn!(%error, "no shared-memory connection can be accepted for now");
                        tokio::time::sleep(SHORT_OF).await;
                    }
                    Err(source) => {
                        return Err(FabricError::Shm { what: "accept failed", source: Arc::new(source) });
                    }
                },
            }
        }
    }

    fn greet(&mut self, socket: Socket) {
        let device = self.device.clone();
        let local = self.addr.clone();
        self.pending.spawn(async move {
            let hello = tokio::time::timeout(HELLO_LIMIT, hello(device, local, socket)).await;
            hello.unwrap_or_else(|_| {
                tracing::warn!("a process connected for shared memory and said nothing");
                None
            })
        });
    }
}

fn is_shortage(error: &io::Error) -> bool {
    // EMFILE, ENFILE, ENOBUFS, ENOMEM.
    matches!(error.raw_os_error(), Some(libc::EMFILE | libc::ENFILE | libc::ENOBUFS | libc::ENOMEM))
}

async fn hello(device: ShmDevice, local: ShmAddr, socket: Socket) -> Option<ShmIncoming> {
    let peer = socket.peer().ok()?;
    let refuse = |text: String| {
        tracing::warn!(pid = peer.pid, uid = peer.uid, text, "shared memory refused");
        // A peer that does not listen need not hear it.
        let _ = socket.send(&Message::Refused { text }.encode(), &[]);
    };
    if !device.allows(peer.uid) {
        // First what the peer's program can tell from other refusals.
        let _ = socket.send(&Message::OtherUser { uid: peer.uid }.encode(), &[]);
        refuse(format!("memory is not shared with user {} (ShmAccess)", peer.uid));
        return None;
    }
    let Received { bytes, fds } = match socket.next().await {
        Ok(Some(received)) => received,
        Ok(None) => return None,
        Err(error) => {
            refuse(error.to_string());
            return None;
        }
    };
    let Some(Message::Hello { shape, private_data }) = Message::decode(&bytes) else {
        refuse("a greeting that makes no sense, or of another version".to_owned());
        return None;
    };
    match Theirs::new(shape, fds, is_kin(peer.uid)) {
        Ok(theirs) => Some(ShmIncoming { device, local, socket, peer, private_data, theirs }),
        Err(error) => {
            refuse(error.to_string());
            None
        }
    }
}

/// A connect request of a process of this host. Dropping it rejects it without private data.
#[derive(Debug)]
pub struct ShmIncoming {
    device: ShmDevice,
    local: ShmAddr,
    socket: Socket,
    peer: Credentials,
    private_data: Vec<u8>,
    theirs: Theirs,
}

impl ShmIncoming {
    /// What the peer said, exactly.
    pub fn private_data(&self) -> &[u8] {
        &self.private_data
    }

    /// The peer's process.
    pub fn peer_addr(&self) -> Addr {
        Addr::Process(self.peer.pid)
    }

    /// The socket that it came by.
    pub fn local_addr(&self) -> ShmAddr {
        self.local.clone()
    }

    /// See [`Incoming::accept`](crate::Incoming::accept).
    ///
    /// Waits for nothing: when the peer has gone, the link says so.
    pub async fn accept(
        self,
        config: &LinkConfig,
        pool: &Pool,
        private_data: &[u8],
        _timeout: Duration,
    ) -> Result<ShmLink, ConnectError> {
        if private_data.len() > MAX_PRIVATE_DATA {
            return Err(ConnectError::PrivateDataTooLong { len: private_data.len() });
        }
        let ShmIncoming { device, socket, peer, theirs, .. } = self;
        let addr = Addr::Process(peer.pid);
        let failed = |source: io::Error| match source.kind() {
            io::ErrorKind::BrokenPipe | io::ErrorKind::ConnectionReset => {
                ConnectError::PeerGone { addr: addr.clone(), step: ConnectStep::Accept }
            }
            _ => ConnectError::Failed {
                addr: addr.clone(),
                step: ConnectStep::Accept,
                source: Arc::new(source),
            },
        };
        let block = ControlBlock::new(pool, config)?;
        let own = Own::new(config).map_err(failed)?;
        let Shape { slots, slot_size } = own.shape;
        let accept =
            Message::Accept { shape: Shape { slots, slot_size }, private_data: private_data.to_vec() };
        // A fresh socket has room for it, so this waits for nothing.
        own.with_fds(|fds| socket.send(&accept.encode(), fds)).map_err(failed)?;
        Ok(ShmLink::new(&device, socket, peer, own, theirs, block, config))
    }

    /// Says no.
    pub fn reject(self, private_data: &[u8]) {
        let private_data = private_data[..private_data.len().min(MAX_PRIVATE_DATA)].to_vec();
        let _ = self.socket.send(&Message::Reject { private_data }.encode(), &[]);
    }
}
