//! The fabrics that a case can run over, and the selection for this process.

use std::fmt;
use std::net::{IpAddr, TcpListener};
use std::sync::LazyLock;
use std::sync::atomic::{AtomicU16, Ordering};

use tonic_rdma::{FabricKind, Path};

use crate::channel::AnyChannel;
use crate::codec::CodecKind;

/// The network or memory that carries a case's calls.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash)]
pub enum Fabric {
    /// tonic's own client and server over TCP: the reference.
    Stock,
    /// tonic-rdma at both ends with the fast path off.
    Tcp,
    /// A stock client of a tonic-rdma server, which offers its fast path.
    StockClient,
    /// A tonic-rdma client, which requests the fast path, of a stock server.
    StockServer,
    /// The fast path over the simulated network, with a device and a pool for each end.
    Sim,
    /// Like `Sim`, with work and completions delayed, so that they are reported late and in parts.
    SimDelayed,
    /// The simulated network with the plain codec at both ends. The other fabrics with a fast path
    /// use tonic-rdma's codec at one end or both.
    SimPlain,
    /// The simulated network with one device and one pool for both ends. The pool fits the usual
    /// memlock limit of 8 MiB.
    SimSmall,
    /// Memory shared between the two ends, with a pool for each.
    Shm,
    /// Like `Shm`, with one pool for both ends, which fits the usual memlock limit of 8 MiB.
    ShmSmall,
    /// Memory shared between two processes, which lend each other what they send. Only a server
    /// with nothing but the scripted service runs in the second process. Cases that build another
    /// server keep it in this process.
    ShmTwo,
    /// Like `Shm`, with a client of tonic's type, which calls through a tonic-rdma channel.
    ShmTonic,
    /// The fast path over RDMA devices.
    Verbs,
}

impl Fabric {
    /// The fabrics that run without an RDMA device.
    pub const NATIVE: &[Fabric] = &[
        Fabric::Stock,
        Fabric::Tcp,
        Fabric::StockClient,
        Fabric::StockServer,
        Fabric::Sim,
        Fabric::SimDelayed,
        Fabric::SimPlain,
        Fabric::SimSmall,
        Fabric::Shm,
        Fabric::ShmSmall,
        Fabric::ShmTwo,
        Fabric::ShmTonic,
    ];

    /// The fabrics with tonic-rdma at both ends.
    pub const OURS: &[Fabric] = &[
        Fabric::Tcp,
        Fabric::Sim,
        Fabric::SimDelayed,
        Fabric::SimPlain,
        Fabric::SimSmall,
        Fabric::Shm,
        Fabric::ShmSmall,
        Fabric::ShmTwo,
        Fabric::Verbs,
    ];

    /// The fabrics with a fast path.
    pub const FAST: &[Fabric] = &[
        Fabric::Sim,
        Fabric::SimDelayed,
        Fabric::SimPlain,
        Fabric::SimSmall,
        Fabric::Shm,
        Fabric::ShmSmall,
        Fabric::ShmTwo,
        Fabric::Verbs,
    ];

    /// The fast path that calls must take, or `None` for TCP.
    pub fn fast(self) -> Option<Path> {
        match self {
            Fabric::Stock | Fabric::Tcp | Fabric::StockClient | Fabric::StockServer => None,
            Fabric::Sim | Fabric::SimDelayed | Fabric::SimPlain | Fabric::SimSmall => {
                Some(Path::Sim)
            }
            Fabric::Shm | Fabric::ShmSmall | Fabric::ShmTwo | Fabric::ShmTonic => Some(Path::Shm),
            Fabric::Verbs => Some(Path::Verbs),
        }
    }

    /// The codecs of the client and the server.
    pub fn codecs(self) -> (CodecKind, CodecKind) {
        match self {
            // The reference, and programs that keep tonic's codec.
            Fabric::Stock | Fabric::SimPlain | Fabric::ShmSmall => {
                (CodecKind::Plain, CodecKind::Plain)
            }
            Fabric::SimDelayed | Fabric::ShmTonic => (CodecKind::Plain, CodecKind::ZeroCopy),
            Fabric::StockClient => (CodecKind::ZeroCopy, CodecKind::Plain),
            Fabric::StockServer => (CodecKind::Plain, CodecKind::ZeroCopy),
            Fabric::Tcp
            | Fabric::Sim
            | Fabric::SimSmall
            | Fabric::Shm
            | Fabric::ShmTwo
            | Fabric::Verbs => (CodecKind::ZeroCopy, CodecKind::ZeroCopy),
        }
    }

    /// The fabrics that tonic-rdma may use.
    pub fn kinds(self) -> &'static [FabricKind] {
        match self {
            Fabric::Shm | Fabric::ShmSmall | Fabric::ShmTwo | Fabric::ShmTonic => {
                &[FabricKind::Shm]
            }
            Fabric::Verbs => &[FabricKind::Verbs],
            _ => &FabricKind::DEFAULT,
        }
    }

    /// The channel for the clients of a case.
    pub fn wrap(self, channel: tonic_rdma::Channel) -> AnyChannel {
        match self {
            Fabric::ShmTonic => AnyChannel::Stock(channel.into_tonic()),
            _ => AnyChannel::Rdma(channel),
        }
    }

    /// True if the server is stock tonic.
    pub fn stock_server(self) -> bool {
        matches!(self, Fabric::Stock | Fabric::StockServer)
    }

    /// True if the client is a channel of tonic's type.
    pub fn tonic_channel(self) -> bool {
        self.stock_client() || self == Fabric::ShmTonic
    }

    /// True if the client is stock tonic.
    pub fn stock_client(self) -> bool {
        matches!(self, Fabric::Stock | Fabric::StockClient)
    }

    /// Returns the fabric with this name, or `None` if the name is unknown.
    pub fn from_name(name: &str) -> Option<Fabric> {
        match name {
            "stock" => Some(Fabric::Stock),
            "tcp" => Some(Fabric::Tcp),
            "stock-client" => Some(Fabric::StockClient),
            "stock-server" => Some(Fabric::StockServer),
            "sim" => Some(Fabric::Sim),
            "sim-delayed" => Some(Fabric::SimDelayed),
            "sim-plain" => Some(Fabric::SimPlain),
            "sim-small" => Some(Fabric::SimSmall),
            "shm" => Some(Fabric::Shm),
            "shm-small" => Some(Fabric::ShmSmall),
            "shm-two" => Some(Fabric::ShmTwo),
            "shm-tonic" => Some(Fabric::ShmTonic),
            "verbs" => Some(Fabric::Verbs),
            _ => None,
        }
    }

    /// The fabrics named in `TONIC_RDMA_TEST_FABRIC`, separated by commas, or [`Fabric::NATIVE`] if
    /// it is not set.
    ///
    /// # Errors
    /// A name is not a fabric's.
    pub fn chosen() -> Result<Vec<Fabric>, String> {
        let Some(names) = std::env::var_os("TONIC_RDMA_TEST_FABRIC") else {
            return Ok(Self::NATIVE.to_vec());
        };
        let names = names.to_string_lossy();
        names
            .split(',')
            .map(|name| {
                Fabric::from_name(name.trim()).ok_or_else(|| {
                    format!("TONIC_RDMA_TEST_FABRIC={names}: {name:?} is not one of stock, tcp, stock-client, stock-server, sim, sim-delayed, sim-plain, sim-small, shm, shm-small, shm-two, shm-tonic, verbs")
                })
            })
            .collect()
    }
}

impl fmt::Display for Fabric {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.write_str(match self {
            Fabric::Stock => "stock",
            Fabric::Tcp => "tcp",
            Fabric::StockClient => "stock-client",
            Fabric::StockServer => "stock-server",
            Fabric::Sim => "sim",
            Fabric::SimDelayed => "sim-delayed",
            Fabric::SimPlain => "sim-plain",
            Fabric::SimSmall => "sim-small",
            Fabric::Shm => "shm",
            Fabric::ShmSmall => "shm-small",
            Fabric::ShmTwo => "shm-two",
            Fabric::ShmTonic => "shm-tonic",
            Fabric::Verbs => "verbs",
        })
    }
}

/// A free port that nothing else of this process gets, even while no server listens on it. The port
/// is outside the ephemeral range, and ports are given in turn, starting at a random port. A
/// connection to an ephemeral port could even connect to itself.
#[allow(clippy::panic)]
pub fn fixed_port(ip: IpAddr) -> u16 {
    static NEXT: LazyLock<AtomicU16> = LazyLock::new(|| AtomicU16::new(rand::random()));
    let range = std::fs::read_to_string("/proc/sys/net/ipv4/ip_local_port_range").unwrap();
    let lowest: u16 = range.split_whitespace().next().unwrap().parse().unwrap();
    for _ in 0..1000 {
        let port = 1024 + NEXT.fetch_add(1, Ordering::Relaxed) % (lowest - 1024);
        if TcpListener::bind((ip, port)).is_ok() {
            return port;
        }
    }
    panic!("no free port below {lowest}")
}

/// The address that servers bind: `GUEST_ADDR`, an address on the RDMA device, or else loopback.
///
/// # Errors
/// `GUEST_ADDR` is not an IP address.
pub fn bind_ip() -> Result<IpAddr, String> {
    match std::env::var("GUEST_ADDR") {
        Ok(text) => text.parse().map_err(|e| format!("GUEST_ADDR={text}: {e}")),
        Err(_) => Ok(IpAddr::from([127, 0, 0, 1])),
    }
}
