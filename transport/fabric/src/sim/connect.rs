//! Establishes connections: sends, accepts and rejects connect requests.

use std::io;
use std::net::SocketAddr;
use std::sync::Arc;
use std::time::Duration;

use tokio::sync::{mpsc, oneshot};
use tokio::time::timeout as bounded;
use tonic_rdma_memory::Pool;

use crate::control_block::ControlBlock;
use crate::error::{ConnectError, ConnectStep, FabricError};
use crate::link::{MAX_PRIVATE_DATA, PeerInfo};
use crate::link_config::LinkConfig;
use crate::sim::directory::{Answer, Directory, NoListener, SimConnectRequest};
use crate::sim::link::{SimLink, SimSide};
use crate::sim::state::DeviceState;

pub(super) async fn connect(
    device: &Arc<DeviceState>,
    directory: &Directory,
    addr: SocketAddr,
    config: &LinkConfig,
    pool: &Pool,
    private_data: &[u8],
    timeout: Duration,
) -> Result<(SimLink, Vec<u8>), ConnectError> {
    check_private_data(private_data)?;
    if device.faults.removed() {
        return Err(FabricError::DeviceRemoved { device: device.name.clone() }.into());
    }
    let timed_out =
        ConnectError::Timeout { addr: addr.into(), step: ConnectStep::Connect, after: timeout };
    let (to, listener) = match directory.find(addr) {
        Ok(found) => found,
        Err(NoListener::NobodyListens) => return Err(ConnectError::Refused { addr: addr.into() }),
        Err(NoListener::NoSuchAddress) => {
            let source = Arc::new(io::Error::from_raw_os_error(libc::ENETUNREACH));
            return Err(ConnectError::NoRoute {
                addr: addr.into(),
                step: ConnectStep::ResolveAddress,
                source,
            });
        }
    };
    let block = ControlBlock::new(pool, config)?;
    let from = SocketAddr::new(device.addr, device.net.fresh_port());
    let mut link = SimLink::new(device, pool, block, config, peer(device, from, addr));
    directory.add_end(link.end());
    if to.faults.lose_connects() || to.faults.frozen() || device.faults.frozen() {
        tokio::time::sleep(timeout).await;
        return Err(timed_out);
    }
    let (answer, answered) = oneshot::channel();
    let request = SimConnectRequest {
        private_data: private_data.to_vec(),
        from,
        to: addr,
        end: link.end().clone(),
        answer,
    };
    listener.try_send(request).map_err(|_| ConnectError::Refused { addr: addr.into() })?;
    match bounded(timeout, answered).await {
        Err(_) => Err(timed_out),
        Ok(Ok(Answer::Accepted { .. })) if to.faults.lose_accepts() => {
            tokio::time::sleep(timeout).await;
            Err(timed_out)
        }
        Ok(Ok(Answer::Accepted { end, private_data, established })) => {
            link.join(SimSide::Connecting, end);
            // Ignore an error: if the accepting side has given up, nobody waits for this message,
            // and the link ends anyway.
            let _ = established.send(());
            Ok((link, private_data))
        }
        Ok(Ok(Answer::Rejected { private_data })) => {
            Err(ConnectError::Rejected { addr: addr.into(), private_data })
        }
        Ok(Err(_)) => Err(ConnectError::Rejected { addr: addr.into(), private_data: Vec::new() }),
    }
}

fn check_private_data(data: &[u8]) -> Result<(), ConnectError> {
    match data.len() {
        len if len > MAX_PRIVATE_DATA => Err(ConnectError::PrivateDataTooLong { len }),
        _ => Ok(()),
    }
}

fn peer(device: &DeviceState, local: SocketAddr, remote: SocketAddr) -> PeerInfo {
    PeerInfo {
        provider: "sim",
        device: device.name.clone(),
        local: local.into(),
        remote: remote.into(),
        path_mtu: None,
    }
}

/// A listener of the in-process network.
#[derive(Debug)]
pub struct SimListener {
    device: Arc<DeviceState>,
    directory: Arc<Directory>,
    addr: SocketAddr,
    requests: mpsc::Receiver<SimConnectRequest>,
}

impl SimListener {
    pub(super) fn new(
        device: &Arc<DeviceState>,
        directory: &Arc<Directory>,
        addr: SocketAddr,
    ) -> Result<SimListener, FabricError> {
        if device.faults.removed() {
            return Err(FabricError::DeviceRemoved { device: device.name.clone() });
        }
        if !addr.ip().is_unspecified() && addr.ip() != device.addr {
            return Err(FabricError::NotOnRdma { addr: addr.ip() });
        }
        let port = if addr.port() == 0 { device.net.fresh_port() } else { addr.port() };
        let addr = SocketAddr::new(device.addr, port);
        let requests =
            directory.add_listener(addr).ok_or(FabricError::AddressInUse { addr: addr.into() })?;
        let (device, directory) = (device.clone(), directory.clone());
        Ok(SimListener { device, directory, addr, requests })
    }

    /// The address of the listener. A listener on all addresses has the device's address.
    pub fn local_addr(&self) -> SocketAddr {
        self.addr
    }

    /// Waits for the next connect request.
    ///
    /// # Errors
    /// The device was removed.
    ///
    /// # Cancel safety
    /// Cancel safe.
    pub async fn accept(&mut self) -> Result<SimIncoming, FabricError> {
        match self.requests.recv().await {
            Some(request) => {
                let (device, directory) = (self.device.clone(), self.directory.clone());
                Ok(SimIncoming { device, directory, request })
            }
            None => Err(FabricError::DeviceRemoved { device: self.device.name.clone() }),
        }
    }
}

impl Drop for SimListener {
    fn drop(&mut self) {
        self.requests.close();
        self.directory.remove_listener(self.addr);
    }
}

/// A connect request of the in-process network.
#[derive(Debug)]
pub struct SimIncoming {
    device: Arc<DeviceState>,
    directory: Arc<Directory>,
    request: SimConnectRequest,
}

impl SimIncoming {
    /// The peer's private data, without padding.
    pub fn private_data(&self) -> &[u8] {
        &self.request.private_data
    }

    /// The peer's address.
    pub fn peer_addr(&self) -> SocketAddr {
        self.request.from
    }

    /// This end's address.
    pub fn local_addr(&self) -> SocketAddr {
        self.request.to
    }

    /// See [`Incoming::accept`](crate::Incoming::accept).
    pub async fn accept(
        self,
        config: &LinkConfig,
        pool: &Pool,
        private_data: &[u8],
        timeout: Duration,
    ) -> Result<SimLink, ConnectError> {
        check_private_data(private_data)?;
        let SimIncoming { device, directory, request } = self;
        let SimConnectRequest { from, to, end, answer, .. } = request;
        let block = ControlBlock::new(pool, config)?;
        let mut link = SimLink::new(&device, pool, block, config, peer(&device, to, from));
        directory.add_end(link.end());
        link.join(SimSide::Accepting, end);
        let gone = ConnectError::PeerGone { addr: from.into(), step: ConnectStep::Accept };
        let (established, stands) = oneshot::channel();
        let private_data = private_data.to_vec();
        if answer
            .send(Answer::Accepted { end: link.end().clone(), private_data, established })
            .is_err()
        {
            return Err(gone);
        }
        match bounded(timeout, stands).await {
            Ok(Ok(())) => Ok(link),
            Ok(Err(_)) => Err(gone),
            Err(_) => Err(ConnectError::Timeout {
                addr: from.into(),
                step: ConnectStep::Accept,
                after: timeout,
            }),
        }
    }

    /// Rejects the request.
    pub fn reject(self, private_data: &[u8]) {
        let private_data = private_data[..private_data.len().min(MAX_PRIVATE_DATA)].to_vec();
        // A peer that has given up is not notified.
        let _ = self.request.answer.send(Answer::Rejected { private_data });
    }
}
