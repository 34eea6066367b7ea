//! One type over all providers.

// A build without some of the providers does not use every item of this module.
#![cfg_attr(
    not(all(feature = "verbs", feature = "shm", feature = "test-util")),
    allow(dead_code, unused_variables, clippy::large_enum_variant)
)]

use std::io;
use std::net::{IpAddr, SocketAddr};
use std::sync::Arc;
use std::sync::atomic::AtomicBool;
use std::task::{Context, Poll, Waker};
use std::time::Duration;

use bytes::Bytes;
use tonic_rdma_memory::{LendableBytes, Pool, Registrar};

use crate::HostWatch;
use crate::access::{Lending, ShmAccess};
use crate::addr::Addr;
use crate::device::{DeviceInfo, LocalAddress};
use crate::error::{ConnectError, FabricError, LinkError};
use crate::link::{Caps, Completion, Lent, Link, PeerInfo, Posted, Shared, Work};
use crate::link_config::LinkConfig;
use crate::never::Never;
use crate::self_test::SelfTest;
#[cfg(all(target_os = "linux", feature = "shm"))]
use crate::shm::{ShmDevice, ShmIncoming, ShmLink, ShmListener};
#[cfg(feature = "test-util")]
use crate::sim::{InstantLink, SimDevice, SimIncoming, SimLink, SimListener};
use crate::timer::Timer;
#[cfg(all(target_os = "linux", feature = "verbs"))]
use crate::verbs::{VerbsDevice, VerbsIncoming, VerbsLink, VerbsListener};

/// Matches on an enum of this module, and evaluates `$body` with `$x` bound to the provider's
/// value.
macro_rules! dispatch {
    ($enum:ident $([$test:ident])?, $value:expr, $x:ident => $body:expr) => {
        match $value {
            #[cfg(all(target_os = "linux", feature = "verbs"))]
            $enum::Verbs($x) => $body,
            #[cfg(all(target_os = "linux", feature = "shm"))]
            $enum::Shm($x) => $body,
            #[cfg(feature = "test-util")]
            $enum::Sim($x) => $body,
            $(
                #[cfg(feature = "test-util")]
                $enum::$test($x) => $body,
            )?
            $enum::Never(never) => never.reached(),
        }
    };
}

/// One device that can carry connections. Cheap to clone. The device is closed once the last of its
/// clones, links, listeners and registrations is dropped.
#[derive(Clone, Debug)]
#[non_exhaustive]
pub enum Fabric {
    /// A device of rdma-core.
    #[cfg(all(target_os = "linux", feature = "verbs"))]
    Verbs(VerbsDevice),
    /// Shared memory with processes on this host.
    #[cfg(all(target_os = "linux", feature = "shm"))]
    Shm(ShmDevice),
    /// A device of an in-process network.
    #[cfg(feature = "test-util")]
    Sim(SimDevice),
    /// Cannot be constructed.
    #[doc(hidden)]
    Never(Never),
}

/// An established connection, with the private data of the accepting side.
#[derive(Debug)]
pub struct Connected {
    /// The link. The connecting side sends first (R3).
    pub link: AnyLink,
    /// The private data with which the peer accepted. InfiniBand and RoCE pad the data with zeros
    /// to a fixed length, and iWARP does not. So the format of the data must contain a length.
    pub private_data: Vec<u8>,
}

impl Fabric {
    /// Lists all RDMA devices of this host, usable or not, in the order of their names. On a host
    /// without devices the list is empty.
    ///
    /// # Errors
    /// [`FabricError::Platform`], [`FabricError::NoLibrary`], [`FabricError::NoFunction`],
    /// [`FabricError::NoConnectionManager`], [`FabricError::Forked`] or [`FabricError::Verb`].
    pub fn devices() -> Result<Vec<DeviceInfo>, FabricError> {
        #[cfg(all(target_os = "linux", feature = "verbs"))]
        return crate::verbs::devices();
        #[cfg(not(all(target_os = "linux", feature = "verbs")))]
        Err(FabricError::Platform)
    }

    /// Whether the kernel may have RDMA devices. False only if the kernel certainly has no devices.
    /// Reads one directory and does not block. [`devices`](Fabric::devices) may block, but its
    /// errors also say what is missing.
    pub fn may_have_devices() -> bool {
        #[cfg(all(target_os = "linux", feature = "verbs"))]
        return crate::verbs::may_have_devices();
        #[cfg(not(all(target_os = "linux", feature = "verbs")))]
        false
    }

    /// Lists this host's IP addresses on RDMA devices, each with its device's name. `only`
    /// restricts the list to one device.
    ///
    /// # Errors
    /// The errors of [`devices`](Fabric::devices).
    pub fn local_addresses(only: Option<&str>) -> Result<Vec<LocalAddress>, FabricError> {
        #[cfg(all(target_os = "linux", feature = "verbs"))]
        return crate::verbs::local_addresses(only);
        #[cfg(not(all(target_os = "linux", feature = "verbs")))]
        {
            let _ = only;
            Err(FabricError::Platform)
        }
    }

    /// Returns the pairs of source and destination for which the kernel has a route that leaves
    /// through the interface of the source. Blocks for some microseconds for each pair.
    ///
    /// # Errors
    /// The kernel does not answer, for instance because a filter of system calls forbids netlink.
    pub fn routed(
        sources: &[LocalAddress],
        destinations: &[IpAddr],
    ) -> io::Result<Vec<(IpAddr, IpAddr)>> {
        #[cfg(all(target_os = "linux", feature = "verbs"))]
        return crate::verbs::routed(sources, destinations);
        #[cfg(not(all(target_os = "linux", feature = "verbs")))]
        {
            let _ = (sources, destinations);
            Err(io::ErrorKind::Unsupported.into())
        }
    }

    /// Creates on an RDMA device, one by one, the objects that a connection needs (context,
    /// protection domain, memory region, completion channel and queue, queue pair), frees them
    /// again, and reports the result of each step. The device needs neither an address nor an
    /// active port. Blocks for as long as the device takes, usually milliseconds.
    ///
    /// # Errors
    /// [`FabricError::Platform`], [`FabricError::NoLibrary`] or [`FabricError::NoFunction`]. An
    /// error if a parent of this process has used RDMA, or if rdma-core lists no such device.
    pub fn self_test(name: &str) -> Result<SelfTest, FabricError> {
        #[cfg(all(target_os = "linux", feature = "verbs"))]
        return crate::verbs::self_test(name);
        #[cfg(not(all(target_os = "linux", feature = "verbs")))]
        {
            let _ = name;
            Err(FabricError::Platform)
        }
    }

    /// Opens the RDMA device with this name, or the first usable device if `name` is `None`. The
    /// device must have an active port and an IP address, and this process must be able to create a
    /// queue pair on the device. To check this, a queue pair is created and destroyed again.
    /// Opening a device that is already open returns the open device.
    ///
    /// # Errors
    /// Each requirement that is not met has its own error.
    pub fn open(name: Option<&str>) -> Result<Fabric, FabricError> {
        #[cfg(all(target_os = "linux", feature = "verbs"))]
        return VerbsDevice::open(name).map(Fabric::Verbs);
        #[cfg(not(all(target_os = "linux", feature = "verbs")))]
        {
            let _ = name;
            Err(FabricError::Platform)
        }
    }

    /// Like [`open`](Fabric::open), but opens only a device that [`devices`](Fabric::devices) has
    /// listed.
    ///
    /// # Errors
    /// The errors of [`open`](Fabric::open).
    pub fn open_listed(listed: &[DeviceInfo], name: Option<&str>) -> Result<Fabric, FabricError> {
        #[cfg(all(target_os = "linux", feature = "verbs"))]
        return VerbsDevice::open_among(listed, name).map(Fabric::Verbs);
        #[cfg(not(all(target_os = "linux", feature = "verbs")))]
        {
            let _ = (listed, name);
            Err(FabricError::Platform)
        }
    }

    /// Opens the RDMA device that has a local IP address, with the checks of
    /// [`open`](Fabric::open).
    ///
    /// # Errors
    /// [`FabricError::NotOnRdma`], and the errors of [`open`](Fabric::open).
    pub fn at(local: IpAddr) -> Result<Fabric, FabricError> {
        #[cfg(all(target_os = "linux", feature = "verbs"))]
        return VerbsDevice::at(local).map(Fabric::Verbs);
        #[cfg(not(all(target_os = "linux", feature = "verbs")))]
        {
            let _ = local;
            Err(FabricError::Platform)
        }
    }

    /// Opens the RDMA device through which the route to a peer leaves, with the checks of
    /// [`open`](Fabric::open). The peer receives no packets except those of address resolution.
    /// `source` is an address of this host. If `source` is given, the route must leave through the
    /// device of that address.
    ///
    /// # Errors
    /// [`ConnectError::NotOnRdma`], [`ConnectError::NoRoute`], [`ConnectError::OtherDevice`] if the
    /// device is not `only`, [`ConnectError::Timeout`], and the errors of [`open`](Fabric::open).
    ///
    /// # Cancel safety
    /// Cancel safe.
    pub async fn toward(
        peer: SocketAddr,
        source: Option<IpAddr>,
        only: Option<&str>,
        timeout: Duration,
    ) -> Result<Fabric, ConnectError> {
        #[cfg(all(target_os = "linux", feature = "verbs"))]
        return VerbsDevice::toward(peer, source, only, timeout).await.map(Fabric::Verbs);
        #[cfg(not(all(target_os = "linux", feature = "verbs")))]
        {
            let _ = (peer, source, only, timeout);
            Err(FabricError::Platform.into())
        }
    }

    /// Makes this process an end of shared-memory connections with other processes on the host.
    ///
    /// # Errors
    /// [`FabricError::Platform`] on systems other than Linux, and in builds without the feature
    /// `shm`.
    pub fn shm(access: ShmAccess, lending: Lending) -> Result<Fabric, FabricError> {
        #[cfg(all(target_os = "linux", feature = "shm"))]
        return Ok(Fabric::Shm(ShmDevice::new(access, lending)));
        #[cfg(not(all(target_os = "linux", feature = "shm")))]
        {
            let _ = (access, lending);
            Err(FabricError::Platform)
        }
    }

    /// Returns the id that the kernel of this host drew at its last boot. Two processes with the
    /// same boot id can share memory if they can reach each other's sockets.
    ///
    /// # Errors
    /// The errors of [`shm`](Fabric::shm), and [`FabricError::Shm`] if /proc cannot be read.
    pub fn boot_id() -> Result<String, FabricError> {
        #[cfg(all(target_os = "linux", feature = "shm"))]
        return crate::shm::boot_id();
        #[cfg(not(all(target_os = "linux", feature = "shm")))]
        Err(FabricError::Platform)
    }

    /// `"verbs"`, `"shm"` or `"sim"`.
    pub fn provider(&self) -> &'static str {
        match self {
            #[cfg(all(target_os = "linux", feature = "verbs"))]
            Fabric::Verbs(_) => "verbs",
            #[cfg(all(target_os = "linux", feature = "shm"))]
            Fabric::Shm(_) => "shm",
            #[cfg(feature = "test-util")]
            Fabric::Sim(_) => "sim",
            Fabric::Never(never) => never.reached(),
        }
    }

    /// Whether the network may lose a connect request or its answer, so that seconds pass before a
    /// retransmission. False over shared memory, and over iWARP, whose TCP connection retransmits
    /// sooner.
    pub fn loses_requests(&self) -> bool {
        match self {
            #[cfg(all(target_os = "linux", feature = "verbs"))]
            Fabric::Verbs(device) => device.transport() != crate::device::Transport::IWarp,
            #[cfg(all(target_os = "linux", feature = "shm"))]
            Fabric::Shm(_) => false,
            #[cfg(feature = "test-util")]
            Fabric::Sim(_) => true,
            Fabric::Never(never) => never.reached(),
        }
    }

    /// Whether links post [extra RECVs](LinkConfig::recv_extra) only when needed. False over shared
    /// memory, where a RECV is a slot of a ring and pins nothing, so all RECVs are posted from the
    /// start.
    pub fn grows(&self) -> bool {
        match self {
            #[cfg(all(target_os = "linux", feature = "shm"))]
            Fabric::Shm(_) => false,
            _ => true,
        }
    }

    /// The device's name.
    pub fn name(&self) -> &str {
        dispatch!(Fabric, self, d => d.name())
    }

    /// Whether an RDMA device was removed from the host. The kernel frees the device once its
    /// links, listeners, pools and the clones of this value are dropped. False for other fabrics.
    pub fn is_removed(&self) -> bool {
        match self {
            #[cfg(all(target_os = "linux", feature = "verbs"))]
            Fabric::Verbs(d) => d.is_removed(),
            _ => false,
        }
    }

    /// Makes `watch` also report events of this RDMA device: changes of its ports, its failure, and
    /// its removal. The kernel completes a removal only after this process has dropped the device.
    /// Does nothing for other fabrics.
    ///
    /// # Errors
    /// The system refuses to watch the device.
    pub fn tell_removal(&self, watch: &HostWatch) -> io::Result<()> {
        match self {
            #[cfg(all(target_os = "linux", feature = "verbs"))]
            Fabric::Verbs(d) => d.tell_removal(watch),
            _ => {
                let _ = watch;
                Ok(())
            }
        }
    }

    /// The current state of the device.
    ///
    /// # Errors
    /// The device does not answer, or was removed.
    pub fn info(&self) -> Result<DeviceInfo, FabricError> {
        dispatch!(Fabric, self, d => d.info())
    }

    /// This host's addresses on the device. A server offers these addresses, and a listener may be
    /// bound to them.
    ///
    /// # Errors
    /// The addresses cannot be listed, or the device was removed.
    pub fn addresses(&self) -> Result<Vec<IpAddr>, FabricError> {
        match self {
            #[cfg(all(target_os = "linux", feature = "verbs"))]
            Fabric::Verbs(d) => d.addresses(),
            #[cfg(all(target_os = "linux", feature = "shm"))]
            Fabric::Shm(_) => Ok(Vec::new()),
            #[cfg(feature = "test-util")]
            Fabric::Sim(d) => d.addresses(),
            Fabric::Never(never) => never.reached(),
        }
    }

    /// Returns a registrar for this device. A pool that is built on the registrar works only with
    /// links of this device.
    pub fn registrar(&self) -> Arc<dyn Registrar> {
        dispatch!(Fabric, self, d => d.registrar())
    }

    /// Listens on an address of this device, or on all its addresses (`0.0.0.0`, `[::]`). Port 0
    /// selects a free port, which [`Listener::local_addr`] returns. On iWARP the port is a TCP
    /// port, and no TCP listener may use the same port.
    ///
    /// # Errors
    /// The address is in use, does not lie on the device or is of [another
    /// kind](FabricError::WrongAddress), or the device failed.
    pub fn listen(&self, addr: &Addr) -> Result<Listener, FabricError> {
        match self {
            #[cfg(all(target_os = "linux", feature = "verbs"))]
            Fabric::Verbs(d) => d.listen(self.ip(addr)?).map(Listener::Verbs),
            #[cfg(all(target_os = "linux", feature = "shm"))]
            Fabric::Shm(d) => {
                d.listen(addr.shm().ok_or_else(|| self.wrong_address(addr))?).map(Listener::Shm)
            }
            #[cfg(feature = "test-util")]
            Fabric::Sim(d) => d.listen(self.ip(addr)?).map(Listener::Sim),
            Fabric::Never(never) => never.reached(),
        }
    }

    fn ip(&self, addr: &Addr) -> Result<SocketAddr, FabricError> {
        addr.ip().ok_or_else(|| self.wrong_address(addr))
    }

    fn wrong_address(&self, addr: &Addr) -> FabricError {
        FabricError::WrongAddress { provider: self.provider(), addr: addr.clone() }
    }

    /// Connects to a listener. `pool` must be built on this device's
    /// [registrar](Fabric::registrar), and its control budget provides the control block.
    /// `private_data` has at most [`MAX_PRIVATE_DATA`](crate::MAX_PRIVATE_DATA) bytes.
    ///
    /// The attempt ends after `timeout` at the latest.
    ///
    /// # Errors
    /// Each way to fail has its own variant of [`ConnectError`].
    ///
    /// # Cancel safety
    /// Dropping the future ends the attempt and frees everything that was created for it.
    pub async fn connect(
        &self,
        addr: &Addr,
        config: &LinkConfig,
        pool: &Pool,
        private_data: &[u8],
        timeout: Duration,
    ) -> Result<Connected, ConnectError> {
        let answered = AtomicBool::new(false);
        self.connect_telling(addr, config, pool, private_data, timeout, &answered).await
    }

    /// Connects as [`connect`](Fabric::connect) does. Over verbs, also sets `answered` once the
    /// peer has answered the request. After the answer, the two ends send each other long packets
    /// to test the path, which takes seconds if such packets are lost.
    ///
    /// # Errors
    /// The errors of [`connect`](Fabric::connect).
    ///
    /// # Cancel safety
    /// Like [`connect`](Fabric::connect).
    pub async fn connect_telling(
        &self,
        addr: &Addr,
        config: &LinkConfig,
        pool: &Pool,
        private_data: &[u8],
        timeout: Duration,
        answered: &AtomicBool,
    ) -> Result<Connected, ConnectError> {
        // On other fabrics the connection is complete with the answer.
        #[cfg(not(all(target_os = "linux", feature = "verbs")))]
        let _ = answered;
        match self {
            #[cfg(all(target_os = "linux", feature = "verbs"))]
            Fabric::Verbs(d) => {
                let addr = self.ip(addr)?;
                let connecting = d.connect(addr, config, pool, private_data, timeout, answered);
                // The future lies on the heap. Otherwise the futures of connections over other
                // providers would also have its size of several KiB.
                let (link, private_data) = Box::pin(connecting).await?;
                Ok(Connected { link: AnyLink::Verbs(link), private_data })
            }
            #[cfg(all(target_os = "linux", feature = "shm"))]
            Fabric::Shm(d) => {
                let addr = addr.shm().ok_or_else(|| self.wrong_address(addr))?;
                let (link, private_data) =
                    d.connect(addr, config, pool, private_data, timeout).await?;
                Ok(Connected { link: AnyLink::Shm(link), private_data })
            }
            #[cfg(feature = "test-util")]
            Fabric::Sim(d) => {
                let (link, private_data) =
                    d.connect(self.ip(addr)?, config, pool, private_data, timeout).await?;
                Ok(Connected { link: AnyLink::Sim(link), private_data })
            }
            Fabric::Never(never) => never.reached(),
        }
    }
}

/// Takes connect requests. Dropping the listener stops listening and rejects requests that have not
/// been taken.
#[derive(Debug)]
#[non_exhaustive]
pub enum Listener {
    /// A listener of rdma-core.
    #[cfg(all(target_os = "linux", feature = "verbs"))]
    Verbs(VerbsListener),
    /// A listener for processes on this host.
    #[cfg(all(target_os = "linux", feature = "shm"))]
    Shm(ShmListener),
    /// A listener of the in-process network.
    #[cfg(feature = "test-util")]
    Sim(SimListener),
    /// Cannot be constructed.
    #[doc(hidden)]
    Never(Never),
}

impl Listener {
    /// The address, with the port that is in use.
    pub fn local_addr(&self) -> Addr {
        dispatch!(Listener, self, l => l.local_addr().into())
    }

    /// Waits for the next connect request.
    ///
    /// # Errors
    /// The listener is dead, for example because its device was removed. A peer cannot cause this
    /// error.
    ///
    /// # Cancel safety
    /// Cancel safe: no request is lost.
    pub async fn accept(&mut self) -> Result<Incoming, FabricError> {
        match self {
            #[cfg(all(target_os = "linux", feature = "verbs"))]
            Listener::Verbs(l) => l.accept().await.map(Incoming::Verbs),
            #[cfg(all(target_os = "linux", feature = "shm"))]
            Listener::Shm(l) => l.accept().await.map(Incoming::Shm),
            #[cfg(feature = "test-util")]
            Listener::Sim(l) => l.accept().await.map(Incoming::Sim),
            Listener::Never(never) => never.reached(),
        }
    }
}

/// A connect request, to be accepted or rejected. Dropping this value rejects the request without
/// private data.
#[derive(Debug)]
#[non_exhaustive]
pub enum Incoming {
    /// A request over rdma-core.
    #[cfg(all(target_os = "linux", feature = "verbs"))]
    Verbs(VerbsIncoming),
    /// A request from a process on this host.
    #[cfg(all(target_os = "linux", feature = "shm"))]
    Shm(ShmIncoming),
    /// A request over the in-process network.
    #[cfg(feature = "test-util")]
    Sim(SimIncoming),
    /// Cannot be constructed.
    #[doc(hidden)]
    Never(Never),
}

impl Incoming {
    /// Whether the accepted link posts extra RECVs only when needed: see [`Fabric::grows`].
    pub fn grows(&self) -> bool {
        match self {
            #[cfg(all(target_os = "linux", feature = "shm"))]
            Incoming::Shm(_) => false,
            _ => true,
        }
    }

    /// Bytes of control memory that [`accept`](Self::accept) takes from the pool.
    pub fn control_bytes(&self, config: &LinkConfig) -> usize {
        match self {
            #[cfg(all(target_os = "linux", feature = "shm"))]
            Incoming::Shm(_) => config.block_bytes(),
            _ => config.control_bytes(),
        }
    }

    /// The peer's private data, which is untrusted. InfiniBand and RoCE pad this data with zeros to
    /// 56 bytes, and iWARP does not pad it.
    pub fn private_data(&self) -> &[u8] {
        dispatch!(Incoming, self, i => i.private_data())
    }

    /// The peer's address. On InfiniBand and RoCE, the port of this address means nothing.
    pub fn peer_addr(&self) -> Addr {
        match self {
            #[cfg(all(target_os = "linux", feature = "verbs"))]
            Incoming::Verbs(i) => i.peer_addr().into(),
            #[cfg(all(target_os = "linux", feature = "shm"))]
            Incoming::Shm(i) => i.peer_addr(),
            #[cfg(feature = "test-util")]
            Incoming::Sim(i) => i.peer_addr().into(),
            Incoming::Never(never) => never.reached(),
        }
    }

    /// This end's address.
    pub fn local_addr(&self) -> Addr {
        dispatch!(Incoming, self, i => i.local_addr().into())
    }

    /// Sets the private data that the peer gets if [`accept`](Incoming::accept) cannot allocate
    /// memory or a queue pair. Does nothing over shared memory and the simulated network, where
    /// [`accept`](Incoming::accept) needs only memory, which the caller can check beforehand.
    pub fn refuse_with(&mut self, private_data: &[u8]) {
        match self {
            #[cfg(all(target_os = "linux", feature = "verbs"))]
            Incoming::Verbs(i) => i.refuse_with(private_data),
            _ => {
                let _ = private_data;
            }
        }
    }

    /// Posts RECVs, accepts, and waits at most `timeout` until the connection is established.
    ///
    /// # Errors
    /// Memory or a queue pair cannot be allocated, the peer is gone, or the peer does not answer.
    ///
    /// # Cancel safety
    /// Dropping the future ends the connection.
    pub async fn accept(
        self,
        config: &LinkConfig,
        pool: &Pool,
        private_data: &[u8],
        timeout: Duration,
    ) -> Result<AnyLink, ConnectError> {
        match self {
            #[cfg(all(target_os = "linux", feature = "verbs"))]
            Incoming::Verbs(i) => {
                let accepting = i.accept(config, pool, private_data, timeout);
                // The future lies on the heap, as in `Fabric::connect`.
                Box::pin(accepting).await.map(AnyLink::Verbs)
            }
            #[cfg(all(target_os = "linux", feature = "shm"))]
            Incoming::Shm(i) => {
                i.accept(config, pool, private_data, timeout).await.map(AnyLink::Shm)
            }
            #[cfg(feature = "test-util")]
            Incoming::Sim(i) => {
                i.accept(config, pool, private_data, timeout).await.map(AnyLink::Sim)
            }
            Incoming::Never(never) => never.reached(),
        }
    }

    /// Rejects the request. Private data is truncated to
    /// [`MAX_PRIVATE_DATA`](crate::MAX_PRIVATE_DATA) bytes.
    pub fn reject(self, private_data: &[u8]) {
        dispatch!(Incoming, self, i => i.reject(private_data))
    }
}

/// A [`Link`] of any provider.
#[derive(Debug)]
#[non_exhaustive]
pub enum AnyLink {
    /// A link of rdma-core.
    #[cfg(all(target_os = "linux", feature = "verbs"))]
    Verbs(VerbsLink),
    /// A link with a process on this host.
    #[cfg(all(target_os = "linux", feature = "shm"))]
    Shm(ShmLink),
    /// A link of the in-process network.
    #[cfg(feature = "test-util")]
    Sim(SimLink),
    /// A link without another end, where all work completes at once.
    #[cfg(feature = "test-util")]
    Instant(InstantLink),
    /// Cannot be constructed.
    #[doc(hidden)]
    Never(Never),
}

impl Link for AnyLink {
    fn caps(&self) -> &Caps {
        dispatch!(AnyLink[Instant], self, l => l.caps())
    }
    fn peer(&self) -> &PeerInfo {
        dispatch!(AnyLink[Instant], self, l => l.peer())
    }
    fn send_room(&self) -> usize {
        dispatch!(AnyLink[Instant], self, l => l.send_room())
    }
    fn block_mut(&mut self) -> &mut [u8] {
        dispatch!(AnyLink[Instant], self, l => l.block_mut())
    }
    fn queue(&mut self, id: u64, work: Work, signal: bool) -> Result<Posted, LinkError> {
        dispatch!(AnyLink[Instant], self, l => l.queue(id, work, signal))
    }
    fn share(&mut self, rkey: u32) -> Result<Shared, LinkError> {
        dispatch!(AnyLink[Instant], self, l => l.share(rkey))
    }
    fn share_named(&mut self, rkey: u32) -> Result<Shared, LinkError> {
        dispatch!(AnyLink[Instant], self, l => l.share_named(rkey))
    }
    fn may_lend(&self) -> bool {
        dispatch!(AnyLink[Instant], self, l => l.may_lend())
    }
    fn lend(&mut self, bytes: LendableBytes) -> Result<Option<Lent>, LinkError> {
        dispatch!(AnyLink[Instant], self, l => l.lend(bytes))
    }
    fn is_mapping(&self, key: u32) -> bool {
        dispatch!(AnyLink[Instant], self, l => l.is_mapping(key))
    }
    fn end_lease(&mut self, lease: u32) {
        dispatch!(AnyLink[Instant], self, l => l.end_lease(lease))
    }
    fn borrow(&mut self, lent: Lent, len: u32) -> Result<Bytes, LinkError> {
        dispatch!(AnyLink[Instant], self, l => l.borrow(lent, len))
    }
    fn take_returned(&mut self, waker: &Waker, out: &mut Vec<u32>) {
        dispatch!(AnyLink[Instant], self, l => l.take_returned(waker, out))
    }
    fn ring_doorbell(&mut self) -> Result<(), LinkError> {
        dispatch!(AnyLink[Instant], self, l => l.ring_doorbell())
    }
    fn probe(&mut self) -> Result<bool, LinkError> {
        dispatch!(AnyLink[Instant], self, l => l.probe())
    }
    fn is_eager(&self) -> bool {
        dispatch!(AnyLink[Instant], self, l => l.is_eager())
    }
    fn wait_goes_on(&mut self) {
        dispatch!(AnyLink[Instant], self, l => l.wait_goes_on());
    }
    fn blocks_on_drop(&self) -> bool {
        dispatch!(AnyLink[Instant], self, l => l.blocks_on_drop())
    }
    fn shares_processor(&self) -> bool {
        dispatch!(AnyLink[Instant], self, l => l.shares_processor())
    }
    fn has_pending_recv(&self) -> bool {
        dispatch!(AnyLink[Instant], self, l => l.has_pending_recv())
    }
    fn timer(&self) -> Timer {
        dispatch!(AnyLink[Instant], self, l => l.timer())
    }
    fn poll(
        &mut self,
        cx: &mut Context<'_>,
        out: &mut Vec<Completion>,
    ) -> Poll<Result<(), LinkError>> {
        dispatch!(AnyLink[Instant], self, l => l.poll(cx, out))
    }
    fn recv_slot(&self, slot: u32, len: u32) -> &[u8] {
        dispatch!(AnyLink[Instant], self, l => l.recv_slot(slot, len))
    }
    fn repost(&mut self, slot: u32) -> Result<bool, LinkError> {
        dispatch!(AnyLink[Instant], self, l => l.repost(slot))
    }
    fn grow(&mut self, pool: &Pool) -> Result<u32, LinkError> {
        dispatch!(AnyLink[Instant], self, l => l.grow(pool))
    }
    fn shrink(&mut self) -> Result<u32, LinkError> {
        dispatch!(AnyLink[Instant], self, l => l.shrink())
    }
    fn grow_sends(&mut self, pool: &Pool) -> Option<u32> {
        dispatch!(AnyLink[Instant], self, l => l.grow_sends(pool))
    }
    fn shrink_sends(&mut self) -> Option<u32> {
        dispatch!(AnyLink[Instant], self, l => l.shrink_sends())
    }
    fn disconnect(&mut self) {
        dispatch!(AnyLink[Instant], self, l => l.disconnect())
    }
}
