//! The accepting side of shared-memory connections.
//!
//! | client | messages | descriptors from the client |
//! |---|---|---|
//! | before its ticket is checked | HELLO: private data with a ticket, and the shape of its ring | no: refused |
//! | admitted | ACCEPT: the file of both rings, and whether this end accepts a wake-up channel | |
//! | let in | READY: the nonce of ACCEPT, and perhaps eventfds and page of a channel; a thread that may block takes the descriptors | yes |
//!
//! A client that has sent READY uses the connection at once: this end has made the rings, and needs
//! no channel if it cannot take the channel's files. This end opens no file of a client before the
//! client's ticket is checked. Descriptors that a client sends earlier are closed with the client's
//! socket. The threads that close such sockets serve no admitted clients. While
//! [`MAX_STRANGER_JOBS`] sockets wait to be closed, no connection is accepted.

use std::hash::{BuildHasher, RandomState};
use std::io;
use std::os::fd::AsFd;
use std::sync::Arc;
use std::sync::atomic::{AtomicU64, Ordering};
use std::time::Duration;

use tokio::task::JoinSet;
use tonic_rdma_memory::{LogThrottle, PerProcess, Pool, throttled};

use crate::addr::{Addr, ShmAddr};
use crate::control_block::ControlBlock;
use crate::error::{ConnectError, ConnectStep, FabricError};
use crate::link::MAX_PRIVATE_DATA;
use crate::link_config::{LinkConfig, Takes};
use crate::shm::context::DeviceContext;
use crate::shm::link::ShmLink;
use crate::shm::offers::Taken;
use crate::shm::ring::Shape;
use crate::shm::same_user::Candidate;
use crate::shm::setup::{Rings, channel_files};
use crate::shm::socket::blocking::{PEERS, STRANGERS};
use crate::shm::socket::wire::{Message, VERSION, not_a_greeting, other_version};
use crate::shm::socket::{Credentials, ListenSocket, Socket, SocketMessage, is_end, is_shortage};
use crate::shm::wakeup::{Wakeup, channels, event_fd};

/// A connection that has not sent HELLO within this time is closed.
const HELLO_TIMEOUT: Duration = Duration::from_secs(5);
/// Maximum number of connections without a HELLO. Further connections wait in the kernel.
const MAX_PENDING: usize = 64;
/// Errors that mean that the process or its host has reached a limit.
const LIMITS: [i32; 3] = [libc::EMFILE, libc::ENFILE, libc::ENOMEM];
/// Maximum number of sockets of clients without a checked ticket that wait to be closed.
const MAX_STRANGER_JOBS: usize = 256;
/// Maximum number of sockets of one user's peers that wait to be closed. Beyond this number, the
/// user's next peer waits to be admitted.
const MAX_CLOSING: usize = 256;
/// Pause before [`MAX_CLOSING`] is checked again.
const CLOSING_PAUSE: Duration = Duration::from_millis(10);
/// Pause after the process has run out of descriptors or memory, and before [`MAX_STRANGER_JOBS`]
/// is checked again.
const SHORTAGE_PAUSE: Duration = Duration::from_millis(100);

/// A listener for processes of this host.
#[derive(Debug)]
pub struct ShmListener {
    context: Arc<DeviceContext>,
    addr: ShmAddr,
    socket: ListenSocket,
    /// Connections that have not sent HELLO yet.
    pending: JoinSet<Option<ShmIncoming>>,
    log: Arc<LogThrottle>,
}

impl ShmListener {
    pub(super) fn new(
        context: Arc<DeviceContext>,
        addr: &ShmAddr,
    ) -> Result<ShmListener, FabricError> {
        let socket = ListenSocket::bind(addr).map_err(|error| match error.kind() {
            io::ErrorKind::AddrInUse => FabricError::AddressInUse { addr: addr.clone().into() },
            _ => FabricError::Shm { what: "no socket to listen on", source: Arc::new(error) },
        })?;
        let log = Arc::default();
        Ok(ShmListener { context, addr: addr.clone(), socket, pending: JoinSet::new(), log })
    }

    /// The name of the listener's socket.
    pub fn local_addr(&self) -> ShmAddr {
        self.addr.clone()
    }

    /// Waits for the next connect request. Cancel safe.
    ///
    /// # Errors
    /// The socket is dead. A peer cannot cause this error.
    pub async fn accept(&mut self) -> Result<ShmIncoming, FabricError> {
        loop {
            let is_crowded = STRANGERS.backlog() >= MAX_STRANGER_JOBS;
            tokio::select! {
                () = tokio::time::sleep(SHORTAGE_PAUSE), if is_crowded => {
                    throttled!(in self.log, warn, "too many processes without a ticket: no connection is accepted");
                }
                Some(done) = self.pending.join_next() => {
                    if let Ok(Some(incoming)) = done {
                        return Ok(incoming);
                    }
                }
                accepted = self.socket.accept(), if self.pending.len() < MAX_PENDING && !is_crowded => match accepted {
                    Ok(socket) => self.receive_hello(socket),
                    Err(error) if is_shortage(&error) => {
                        throttled!(in self.log, warn, %error, "no shared-memory connection can be accepted for now");
                        tokio::time::sleep(SHORTAGE_PAUSE).await;
                    }
                    Err(source) => {
                        return Err(FabricError::Shm { what: "accept failed", source: Arc::new(source) });
                    }
                },
            }
        }
    }

    fn receive_hello(&mut self, socket: Socket) {
        let context = self.context.clone();
        let (local, log) = (self.addr.clone(), self.log.clone());
        self.pending.spawn(async move {
            let peer = socket.peer();
            let hello = hello(context, local, socket, &log);
            tokio::time::timeout(HELLO_TIMEOUT, hello).await.unwrap_or_else(|_| {
                log_refusal(&log, peer, "it connected and said nothing");
                None
            })
        });
    }
}

/// Whether the process or its host has reached a limit.
fn is_limit(error: &io::Error) -> bool {
    error.raw_os_error().is_some_and(|errno| LIMITS.contains(&errno))
}

/// Returns a number that a peer can learn only from the message that carries it.
fn nonce() -> u64 {
    static KEYS: PerProcess<RandomState> = PerProcess::new(RandomState::new);
    static COUNT: AtomicU64 = AtomicU64::new(0);
    // The process id is included because a child of fork(2) may get the same keys that its parent
    // makes next.
    KEYS.hash_one((std::process::id(), COUNT.fetch_add(1, Ordering::Relaxed)))
}

/// Logs a refusal. The log is throttled, because any process that reaches the socket can cause
/// refusals.
fn log_refusal(log: &LogThrottle, peer: Credentials, why: &str) {
    throttled!(in log, warn, pid = peer.pid, uid = peer.uid, why, "shared memory refused");
}

async fn hello(
    context: Arc<DeviceContext>,
    local: ShmAddr,
    socket: Socket,
    log: &LogThrottle,
) -> Option<ShmIncoming> {
    let peer = socket.peer();
    let refuse = |text: String| {
        log_refusal(log, peer, &text);
        // An error is ignored: a peer that does not read its socket does not learn the reason.
        let _ = socket.send(&Message::Refused { text }.encode(), &[]);
    };
    if !context.allows(peer.uid) {
        // This message lets the peer's program distinguish this refusal from others.
        let _ = socket.send(&Message::OtherUser { uid: peer.uid }.encode(), &[]);
        refuse(format!("memory is not shared with user {} (ShmAccess)", peer.uid));
        return None;
    }
    let SocketMessage { bytes, has_fds, .. } = match socket.next().await {
        Ok(Some(message)) => message,
        Ok(None) => return None,
        Err(error) => {
            refuse(error.to_string());
            return None;
        }
    };
    if has_fds {
        refuse("descriptors before they were asked for".to_owned());
        return None;
    }
    let Some(Message::Hello { shape, takes, private_data }) = Message::decode(&bytes) else {
        refuse(match other_version(&bytes) {
            Some(version) => format!("a greeting of version {version}, this end has {VERSION}"),
            None => not_a_greeting(&bytes),
        });
        return None;
    };
    Some(ShmIncoming { context, local, socket, private_data, shape, takes })
}

/// A connect request from a process on this host. Dropping this value rejects the request without
/// private data.
#[derive(Debug)]
pub struct ShmIncoming {
    context: Arc<DeviceContext>,
    local: ShmAddr,
    socket: Socket,
    private_data: Vec<u8>,
    /// The shape of the peer's ring.
    shape: Shape,
    /// The memory that the peer accepts.
    takes: Takes,
}

impl ShmIncoming {
    /// The peer's private data, without padding.
    pub fn private_data(&self) -> &[u8] {
        &self.private_data
    }

    /// The peer's process.
    pub fn peer_addr(&self) -> Addr {
        Addr::Process(self.socket.peer().pid)
    }

    /// The name of the socket on which the request arrived.
    pub fn local_addr(&self) -> ShmAddr {
        self.local.clone()
    }

    /// See [`Incoming::accept`](crate::Incoming::accept).
    ///
    /// Waits until the peer is ready. The peer may pass descriptors as soon as this call has sent
    /// ACCEPT, while the call still waits.
    pub async fn accept(
        self,
        config: &LinkConfig,
        pool: &Pool,
        private_data: &[u8],
        timeout: Duration,
    ) -> Result<ShmLink, ConnectError> {
        if private_data.len() > MAX_PRIVATE_DATA {
            return Err(ConnectError::PrivateDataTooLong { len: private_data.len() });
        }
        let addr = self.peer_addr();
        let late = || ConnectError::Timeout { addr, step: ConnectStep::Accept, after: timeout };
        let attempt = self.attempt(config, pool, private_data);
        tokio::time::timeout(timeout, attempt).await.map_err(|_| late())?
    }

    async fn attempt(
        self,
        config: &LinkConfig,
        pool: &Pool,
        private_data: &[u8],
    ) -> Result<ShmLink, ConnectError> {
        let ShmIncoming { context, mut socket, shape, takes, .. } = self;
        let peer = socket.peer();
        let addr = Addr::Process(peer.pid);
        let gone = || ConnectError::PeerGone { addr: addr.clone(), step: ConnectStep::Accept };
        let failed = |source: io::Error| match is_end(&source) {
            true => gone(),
            false => ConnectError::Failed {
                addr: addr.clone(),
                step: ConnectStep::Accept,
                source: Arc::new(source),
            },
        };
        let refuse = |socket: &Socket, error: &io::Error| {
            let message = match error.raw_os_error() {
                Some(errno) if is_limit(error) => Message::NoRoom { errno: errno.unsigned_abs() },
                _ => Message::Refused { text: error.to_string() },
            };
            // An error is ignored: a peer that does not read its socket does not learn the reason.
            let _ = socket.send(&message.encode(), &[]);
        };
        let tell = |socket: &Socket, error: io::Error| {
            refuse(socket, &error);
            failed(error)
        };
        let block = ControlBlock::without_recvs(pool, config)?;
        let own = Rings::shape(config);
        let (rings, file) = Rings::make(own, shape, peer.uid).inspect_err(|error| match error {
            FabricError::MemoryFile { source, .. } => refuse(&socket, source),
            error => refuse(&socket, &io::Error::other(error.to_string())),
        })?;
        // Create the candidate before the peer sends READY, because the sender of READY may have to
        // confirm the candidate (`same_user`).
        let candidate = Candidate::of(&mut socket);
        let takes_channel = candidate.is_some() && event_fd::is_supported();
        let runtime = if takes_channel { channels::runtime() } else { 0 };
        let private_data = private_data.to_vec();
        let (takes_own, nonce) = (config.takes, nonce());
        let accept = Message::Accept { shape: own, takes: takes_own, runtime, nonce, private_data };
        while PEERS.closing(peer.uid) >= MAX_CLOSING {
            tokio::time::sleep(CLOSING_PAUSE).await;
        }
        socket.admit();
        // A new socket has room for the message, so the call does not wait.
        socket.send(&accept.encode(), &[file.as_fd()]).map_err(failed)?;
        drop(file);
        let SocketMessage { bytes, has_fds, sender } =
            socket.next().await.map_err(failed)?.ok_or_else(gone)?;
        let refuse = |error: io::Error| tell(&socket, error);
        let breach = |what| refuse(io::Error::new(io::ErrorKind::InvalidData, what));
        let channel = match Message::decode(&bytes) {
            Some(Message::Ready { nonce: answered, channel }) if answered == nonce => channel,
            Some(Message::Ready { .. }) => {
                return Err(breach("its READY does not answer the nonce of ACCEPT"));
            }
            _ => return Err(breach("it was let in, and is not ready")),
        };
        let confirm =
            move |sender| candidate.and_then(|peer| peer.confirm(sender, channels::confirmed));
        let (files, confirmed) = match has_fds {
            true => {
                let taken = socket.take_fds(move |taken| {
                    let confirmed = confirm(taken.sender);
                    let files = channel_files(&mut taken.fds, peer.uid)?;
                    Ok((files.filter(|_| takes_channel && confirmed.is_some()), confirmed))
                });
                match taken.await {
                    Err(error) if is_limit(&error) => {
                        tracing::debug!(%error, "no wake-up channel");
                        (None, None)
                    }
                    taken => taken.map_err(refuse)?,
                }
            }
            false => (None, confirm(sender)),
        };
        let process = confirmed.as_ref().map(|peer| peer.process);
        let member = match (confirmed, channel) {
            (Some(peer), Some(name)) => channels::join(peer, name, files),
            _ => None,
        };
        let wakeup = member.map_or(Wakeup::Message, Wakeup::Channel);
        // From here on, this end does not check which of the peer's processes sends.
        let _ = socket.tell_senders(false);
        let ends = (rings.reader, rings.writer, wakeup);
        let taken = Taken { own: config.takes, peer: takes };
        Ok(ShmLink::new(&context, (socket, process, taken), ends, (pool, block), config))
    }

    /// Rejects the request.
    pub fn reject(self, private_data: &[u8]) {
        let private_data = private_data[..private_data.len().min(MAX_PRIVATE_DATA)].to_vec();
        let _ = self.socket.send(&Message::Reject { private_data }.encode(), &[]);
    }
}
