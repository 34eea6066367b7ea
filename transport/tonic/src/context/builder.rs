//! The settings of a context.

use std::time::Duration;

#[cfg(feature = "test-util")]
use tonic_rdma_fabric::sim::SimDevice;
use tonic_rdma_fabric::{Lending, ShmAccess, Takes};
use tonic_rdma_memory::{Pool, PoolConfig};
use tonic_rdma_proto::{Config, Side};

use crate::connection::ConnectionConfig;
use crate::error::InvalidAlignment;

/// Builds a [`Context`](super::Context).
#[derive(Debug, Clone, Default)]
#[must_use]
pub struct ContextBuilder(pub(super) ContextSettings);

#[derive(Debug, Clone, Default)]
pub(super) struct ContextSettings {
    pub(super) pool: PoolConfig,
    pub(super) device: Option<String>,
    pub(super) ack_timeout: Option<Duration>,
    pub(super) ack_retries: Option<u8>,
    pub(super) type_of_service: Option<u8>,
    #[cfg(feature = "test-util")]
    pub(super) sim: Vec<SimDevice>,
    pub(super) shm_access: ShmAccess,
    pub(super) lending: Lending,
    pub(super) takes: Takes,
    pub(super) pinned_per_peer: Option<usize>,
    pub(super) busy_poll_limit: Option<Duration>,
    pub(super) landing_alignment: Option<u16>,
}

impl ContextBuilder {
    /// Set the size and kind of the pool of each device, and of shared memory. A total that is not
    /// set follows from the machine. If RLIMIT_MEMLOCK limits this process, a device's total is 64
    /// MiB, or less if the limit requires it. Otherwise a device's total is a sixteenth of memory,
    /// from 64 MiB to 1 GiB. The total for shared memory, which is not pinned, is an eighth of
    /// memory, from 512 MiB to 2 GiB, and at most a quarter of memory. Memory is allocated only
    /// when it is used.
    ///
    /// `TONIC_RDMA_POOL`, if set, overrides the total: one size for all pools (`512MiB`), or one
    /// for each kind (`verbs=64MiB,shm=2GiB`). The parts that are set keep their proportions.
    pub fn pool(mut self, config: PoolConfig) -> Self {
        self.0.pool = config;
        self
    }

    /// Use only this RDMA device, named as in `rdma link`. `TONIC_RDMA_DEVICE`, if set, overrides
    /// this setting.
    pub fn device(mut self, name: impl Into<String>) -> Self {
        self.0.device = Some(name.into());
        self
    }

    /// How long the devices of this context's connections wait for an acknowledgement before they
    /// send a packet again. Default is 268 ms. The value is rounded up to 4.096 us times a power of
    /// two, and clamped to the range from 1 ms to 17 s.
    ///
    /// Together with [`ack_retries`](Self::ack_retries), this time decides how long the network may
    /// fail before a connection is lost. The limit is this time multiplied by one more than the
    /// number of retries: 1.9 s by default. Some networks need longer to replace a broken route,
    /// for example with a bond, a switch that restarts, or a subnet manager that computes routes.
    /// For such a network, set a longer time. Each side of a connection uses the time of its own
    /// context.
    ///
    /// The setting applies only to InfiniBand and RoCE. On iWARP, TCP decides when to send again,
    /// and shared memory loses no packets.
    pub fn ack_timeout(mut self, time: Duration) -> Self {
        self.0.ack_timeout = Some(time);
        self
    }

    /// How often a device sends a packet again before the connection is lost. Default is 6. The
    /// value is clamped to the range from 1 to 6. See [`ack_timeout`](Self::ack_timeout). The value
    /// of the client's context applies to both sides of a connection.
    pub fn ack_retries(mut self, retries: u8) -> Self {
        self.0.ack_retries = Some(retries);
        self
    }

    /// Type of service of the packets of this context's connections: the byte of the IP header
    /// whose upper six bits are the differentiated services code point (RFC 2474). Networks use
    /// this byte to select a class of packets that is never dropped or has a share of the
    /// bandwidth. `TONIC_RDMA_TOS`, if set, overrides this setting. Default is the system's value
    /// for the device.
    ///
    /// On RoCE v2 and InfiniBand, where the byte is the traffic class, the value of the client's
    /// context applies to both sides of a connection. Soft-iWARP does not set the byte. On other
    /// iWARP devices, if the device supports it, each side uses the value of its own context. The
    /// TCP side is not changed.
    pub fn type_of_service(mut self, tos: u8) -> Self {
        self.0.type_of_service = Some(tos);
        self
    }

    /// Set which processes on this host may share memory with this process, by the user that each
    /// process runs as. Default is this process's own user, and root. A client checks its server,
    /// and a server its clients. Connections that fail the check stay on RDMA or TCP.
    pub fn shm_access(mut self, access: ShmAccess) -> Self {
        self.0.shm_access = access;
        self
    }

    /// Set which messages are lent instead of copied, and to which processes on this host. Default
    /// is [`Lending::Off`]. Messages in pool memory can be lent, and messages in memory registered
    /// with [`Context::register_lendable`](crate::Context::register_lendable). The setting concerns
    /// messages that this process sends over shared memory to peers whose program has turned
    /// [`borrowing`](Self::borrowing) on.
    ///
    /// The peer reads the long field of a lent message in place, so this field is not copied. A
    /// message can be lent if a field of type `bytes` of at least 32 KiB lies in such memory, and
    /// the rest of the message has at most 4 KiB. A buffer of the pool returns to the pool when the
    /// reader has dropped the last slice of the buffer. At most three quarters of the pool's memory
    /// for sending are lent at a time. Further messages are copied, so a reader that keeps received
    /// messages does not delay other readers.
    ///
    /// **Each peer that borrows maps, read-only, the send memory of the pool of its connection**:
    /// at a client the memory of [`Channel::pool`](crate::Channel::pool), at a server the memory of
    /// the request's [`pool`](crate::pool()). The peer sees only the content of buffers from that
    /// pool. A message in another connection's buffer is copied. With
    /// [`Lending::SameUserRegistered`], peers see none of the pool's send memory. For a peer that
    /// runs as another user, use [`Lending::OneProcess`], which names the process. As over RDMA,
    /// the sending process could change a message while the peer reads it, so a peer that does not
    /// trust the sender must not borrow.
    pub fn lending(mut self, lending: Lending) -> Self {
        self.0.lending = lending;
        self
    }

    /// Set whether peers on this host may lend to this process the messages that they send over
    /// shared memory. Off by default: a peer then copies its messages, and a peer that lends anyway
    /// violates the protocol.
    ///
    /// With `true` this process maps its peers' memory, read-only, and a field of type `Bytes` may
    /// lie in memory that the peer can change. The peer has to turn [`lending`](Self::lending) on.
    /// A server or channel that [copies on delivery](crate::Server::copy_on_delivery) borrows
    /// nothing.
    pub fn borrowing(mut self, borrowing: bool) -> Self {
        self.0.takes.lent = borrowing;
        self
    }

    /// Set whether this process maps buffers of programs on this host, to write messages into these
    /// buffers. Off by default: a peer that offers a buffer anyway violates the protocol.
    ///
    /// A peer offers a buffer if the peer receives into a [`LandIn`](crate::LandIn) of a
    /// [`LandableBuf`](crate::LandableBuf) that stays registered. With `true`, this process writes
    /// the message directly into the buffer. Otherwise the message lands elsewhere, and the peer
    /// copies the message into the buffer. The setting concerns messages that this process sends
    /// over shared memory.
    pub fn map_peer_buffers(mut self, map: bool) -> Self {
        self.0.takes.named = map;
        self
    }

    /// Limit the number of bytes that one connection may have pinned. The bytes consist of control
    /// memory, 82 to 408 KiB, and of landing memory that the peer may write to or that holds data
    /// not yet released. Default is the size of the pool. At least 256 KiB remain for landing.
    ///
    /// While other connections wait for memory, a connection returns the memory that exceeds its
    /// share of the pool. Otherwise the connection may use memory up to the limit. Messages that do
    /// not fit into the rest of the limit land in parts, or wait until the reader has released
    /// earlier messages. The longest message that lands in one piece takes half of the limit, or
    /// less: control memory is subtracted first, and a message of more than 32 MiB takes at most a
    /// quarter.
    pub fn pinned_per_peer(mut self, bytes: usize) -> Self {
        self.0.pinned_per_peer = Some(bytes);
        self
    }

    /// Limit how long an end of a connection polls for a message before it sleeps. Default is 2 ms.
    ///
    /// Within the limit, an end polls for as long as a sleep costs on this machine, and only while
    /// it expects messages within that time. The cost of a sleep is four times the duration of a
    /// wake-up, which the transport measures, or five times if the peer has to be woken. In the
    /// long run, the unsuccessful polls of all connections of the process take at most one eighth
    /// of one processor, and an idle connection does not poll. With zero, an end does not poll, and
    /// each message that arrives alone costs a wake-up.
    pub fn busy_poll_limit(mut self, limit: Duration) -> Self {
        self.0.busy_poll_limit = Some(limit);
        self
    }

    /// Align received payload to this many bytes: the longest field of type `bytes` of a message
    /// begins at a multiple of the value in landing memory. Default is 64, a cache line. Most
    /// buffers that are sent also begin at a multiple of 64. On shared memory, source and
    /// destination of the copy are then equal modulo 64, which is the fastest case on any
    /// processor. With 1, the field keeps its source's alignment modulo 64.
    ///
    /// The setting applies to messages that the peer sends with
    /// [`codec::ProstCodec`](crate::codec::ProstCodec), and to fields of at least
    /// [`codec::SEGMENT`](crate::codec::SEGMENT) bytes. The setting does not apply to data that is
    /// [copied before delivery](crate::Copied). Memory is allocated in units of 4 KiB, so a message
    /// takes up to 4 KiB more.
    ///
    /// # Errors
    ///
    /// `bytes` is not a power of two, or is above 4096.
    pub fn landing_alignment(mut self, bytes: usize) -> Result<Self, InvalidAlignment> {
        let align = u16::try_from(bytes).map_err(|_| InvalidAlignment(bytes))?;
        let config = Config { align, ..Config::default() };
        config.check().map_err(|_| InvalidAlignment(bytes))?;
        self.0.landing_alignment = Some(align);
        Ok(self)
    }

    /// Use a device of a simulated network instead of RDMA devices, for tests. Each call adds a
    /// device. Client and server each need a device of the same network, in the same process.
    #[cfg(feature = "test-util")]
    pub fn sim(mut self, device: SimDevice) -> Self {
        self.0.sim.push(device);
        self
    }
}

impl ContextSettings {
    /// The configuration of a connection that this process requests or accepts. `env_tos` is the
    /// type of service that the environment sets.
    pub(super) fn configure(
        &self,
        side: Side,
        pool: &Pool,
        grows: bool,
        env_tos: Option<u8>,
    ) -> ConnectionConfig {
        let mut options = ConnectionConfig::for_pool(pool, grows, self.pinned_per_peer);
        let link = &mut options.link;
        link.busy_poll_limit = self.busy_poll_limit.unwrap_or(link.busy_poll_limit);
        link.ack_timeout = self.ack_timeout.unwrap_or(link.ack_timeout);
        link.type_of_service = self.type_of_service(env_tos);
        // The connecting side's retries apply to both sides. An accepting side does not learn them,
        // so it keeps the default, which is the maximum.
        if side == Side::Client {
            link.ack_retries = self.ack_retries.unwrap_or(link.ack_retries);
        }
        options.proto.align = self.landing_alignment.unwrap_or(options.proto.align);
        options.takes(self.takes);
        options
    }

    /// The type of service of a device's packets, as the environment or else the builder sets it.
    pub(super) fn type_of_service(&self, env: Option<u8>) -> Option<u8> {
        env.or(self.type_of_service)
    }
}

#[cfg(test)]
mod tests {
    use std::sync::Arc;

    use tonic_rdma_fabric::LinkConfig;
    use tonic_rdma_memory::HeapRegistrar;

    use super::*;

    #[test]
    fn a_server_expects_the_most_retries_that_a_client_may_set() {
        let pool = Pool::new(PoolConfig::default(), Arc::new(HeapRegistrar::default())).unwrap();
        let time = Duration::from_secs(1);
        let ContextBuilder(settings) =
            ContextBuilder::default().ack_timeout(time).ack_retries(2).busy_poll_limit(time);
        let link = |side| settings.configure(side, &pool, true, None).link;
        let [client, server] = [Side::Client, Side::Server].map(link);
        for side in [&client, &server] {
            assert_eq!((side.ack_timeout, side.busy_poll_limit), (time, time));
        }
        assert_eq!((client.ack_retries, server.ack_retries), (2, 6));
        let most = LinkConfig { ack_retries: u8::MAX, ack_timeout: time, ..LinkConfig::default() };
        assert_eq!(server.ack_limit(), most.ack_limit());
    }

    #[test]
    fn the_environment_replaces_the_type_of_service() {
        let pool = Pool::new(PoolConfig::default(), Arc::new(HeapRegistrar::default())).unwrap();
        for (built, env, used) in [
            (None, None, None),
            (Some(0x68), None, Some(0x68)),
            (None, Some(8), Some(8)),
            (Some(0x68), Some(8), Some(8)),
        ] {
            let settings = ContextSettings { type_of_service: built, ..Default::default() };
            for side in [Side::Client, Side::Server] {
                let link = settings.configure(side, &pool, true, env).link;
                assert_eq!(link.type_of_service, used, "{built:?}, {env:?}, {side:?}");
            }
        }
    }
}
