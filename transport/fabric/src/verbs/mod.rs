//! RDMA through rdma-core, loaded at run time.

use std::net::{IpAddr, SocketAddr};
use std::sync::Arc;
use std::task::{Context, Poll};
use std::time::Duration;

use tonic_rdma_memory::{Pool, Registrar};

use crate::device::DeviceInfo;
use crate::error::{ConnectError, FabricError, LinkError};
use crate::link::{Caps, Completion, Link, LinkConfig, PeerInfo, Work};

/// A device.
#[derive(Clone, Debug)]
pub enum VerbsDevice {}

#[allow(missing_docs)]
impl VerbsDevice {
    pub fn name(&self) -> &str {
        match *self {}
    }
    pub fn info(&self) -> Result<DeviceInfo, FabricError> {
        match *self {}
    }
    pub fn addresses(&self) -> Result<Vec<IpAddr>, FabricError> {
        match *self {}
    }
    pub fn registrar(&self) -> Arc<dyn Registrar> {
        match *self {}
    }
    pub fn listen(&self, _: SocketAddr) -> Result<VerbsListener, FabricError> {
        match *self {}
    }
    pub async fn connect(
        &self,
        _: SocketAddr,
        _: &LinkConfig,
        _: &Pool,
        _: &[u8],
        _: Duration,
    ) -> Result<(VerbsLink, Vec<u8>), ConnectError> {
        match *self {}
    }
    pub fn open(_: Option<&str>) -> Result<VerbsDevice, FabricError> {
        Err(FabricError::Platform)
    }
    pub fn at(_: IpAddr) -> Result<VerbsDevice, FabricError> {
        Err(FabricError::Platform)
    }
    pub async fn toward(_: SocketAddr, _: Option<&str>, _: Duration) -> Result<VerbsDevice, ConnectError> {
        Err(FabricError::Platform.into())
    }
}

/// A listener.
#[derive(Debug)]
pub enum VerbsListener {}

#[allow(missing_docs)]
impl VerbsListener {
    pub fn local_addr(&self) -> SocketAddr {
        match *self {}
    }
    pub async fn accept(&mut self) -> Result<VerbsIncoming, FabricError> {
        match *self {}
    }
}

/// A connect request.
#[derive(Debug)]
pub enum VerbsIncoming {}

#[allow(missing_docs)]
impl VerbsIncoming {
    pub fn private_data(&self) -> &[u8] {
        match *self {}
    }
    pub fn peer_addr(&self) -> SocketAddr {
        match *self {}
    }
    pub fn local_addr(&self) -> SocketAddr {
        match *self {}
    }
    pub async fn accept(
        self,
        _: &LinkConfig,
        _: &Pool,
        _: &[u8],
        _: Duration,
    ) -> Result<VerbsLink, ConnectError> {
        match self {}
    }
    pub fn reject(self, _: &[u8]) {
        match self {}
    }
}

/// A link.
#[derive(Debug)]
pub enum VerbsLink {}

impl Link for VerbsLink {
    fn caps(&self) -> &Caps {
        match *self {}
    }
    fn peer(&self) -> &PeerInfo {
        match *self {}
    }
    fn send_room(&self) -> usize {
        match *self {}
    }
    fn block_mut(&mut self) -> &mut [u8] {
        match *self {}
    }
    fn queue(&mut self, _: u64, _: Work, _: bool) -> Result<(), LinkError> {
        match *self {}
    }
    fn ring(&mut self) -> Result<(), LinkError> {
        match *self {}
    }
    fn poll(&mut self, _: &mut Context<'_>, _: &mut Vec<Completion>) -> Poll<Result<(), LinkError>> {
        match *self {}
    }
    fn recv_slot(&self, _: u32, _: u32) -> &[u8] {
        match *self {}
    }
    fn repost(&mut self, _: u32) -> Result<(), LinkError> {
        match *self {}
    }
    fn disconnect(&mut self) {
        match *self {}
    }
}

/// All devices.
pub fn devices() -> Result<Vec<DeviceInfo>, FabricError> {
    Err(FabricError::Platform)
}
/// All addresses.
pub fn local_addresses(_: Option<&str>) -> Result<Vec<(IpAddr, String)>, FabricError> {
    Err(FabricError::Platform)
}
