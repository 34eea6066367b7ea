//! The type of service of packets, read between the two ends of a veth pair. Soft-RoCE only,
//! because Soft-iWARP sets none.

use std::collections::BTreeSet;
use std::net::Ipv4Addr;
use std::num::NonZeroU32;
use std::sync::Arc;
use std::sync::atomic::{AtomicBool, Ordering::SeqCst};
use std::thread::JoinHandle;
use std::time::Duration;

use rustix::net::sockopt::{Timeout, set_socket_timeout};
use rustix::net::{AddressFamily, Protocol, SocketType, socket};
use tonic::transport::server::TcpIncoming;
use tonic_rdma::{Context, Endpoint, FabricKind, Path, Policy, Server};
use tonic_rdma_tests::channel::AnyChannel;
use tonic_rdma_tests::harness::client_of;
use tonic_rdma_tests::probe::Probe;
use tonic_rdma_tests::service::Scripted;
use tonic_rdma_tests::service::script::payload;

use crate::fault_test::{Topology, variable};
use crate::log::Log;

/// The protocol IPv4, in network byte order.
const ETH_P_IP: u32 = 0x0008;
const UDP: u8 = 17;
/// The port of RoCE v2.
const ROCE_V2: [u8; 2] = 4791_u16.to_be_bytes();

/// The senders of RoCE packets, each with its type of service.
type Seen = BTreeSet<(Ipv4Addr, u8)>;

/// Reads all packets of the guest until it is stopped.
struct Reader {
    stop: Arc<AtomicBool>,
    thread: JoinHandle<Seen>,
}

impl Reader {
    fn start() -> Reader {
        let protocol = Protocol::from_raw(NonZeroU32::new(ETH_P_IP).unwrap());
        let packets = socket(AddressFamily::PACKET, SocketType::DGRAM, Some(protocol)).unwrap();
        set_socket_timeout(&packets, Timeout::Recv, Some(Duration::from_millis(20))).unwrap();
        let stop = Arc::new(AtomicBool::new(false));
        let stopped = stop.clone();
        let thread = std::thread::spawn(move || {
            let (mut seen, mut packet) = (Seen::new(), [0; 128]);
            while !stopped.load(SeqCst) {
                let Ok(len) = rustix::io::read(&packets, &mut packet) else { continue };
                // An IPv4 header without options has 20 bytes.
                let header = &packet[..len.min(20)];
                if len >= 24 && header[0] == 0x45 && header[9] == UDP && packet[22..24] == ROCE_V2 {
                    let from = Ipv4Addr::new(header[12], header[13], header[14], header[15]);
                    seen.insert((from, header[1]));
                }
            }
            seen
        });
        Reader { stop, thread }
    }

    fn stop(self) -> Seen {
        self.stop.store(true, SeqCst);
        self.thread.join().unwrap()
    }
}

/// Connects two ends that are configured with these types of service, if any. Returns the type of
/// service with which each end sends.
async fn of_both(client: Option<u8>, server: Option<u8>) -> Seen {
    let Topology { server_device, client_device, .. } = Topology::veth();
    let incoming = TcpIncoming::bind(([127, 0, 0, 1], 0).into()).unwrap();
    let at = incoming.local_addr().unwrap();
    let context = |device: String, tos: Option<u8>| {
        let builder = Context::builder().device(device);
        match tos {
            Some(tos) => builder.type_of_service(tos).build(),
            None => builder.build(),
        }
    };
    let mut builder =
        Server::builder().fabrics([FabricKind::Verbs]).context(context(server_device, server));
    let routes = builder.add_service(Scripted::server(&Probe::default()));
    let serving = tokio::spawn(routes.serve_with_incoming(incoming));
    let endpoint = Endpoint::from_shared(format!("http://{at}"))
        .unwrap()
        .policy(Policy::Require)
        .fabrics([FabricKind::Verbs])
        .context(context(client_device, client));
    let channel = endpoint.connect().await.unwrap();
    assert_eq!(channel.path().path, Path::Verbs);
    let reader = Reader::start();
    let mut calls = client_of(AnyChannel::Rdma(channel));
    for n in 0..20 {
        calls.unary(payload(n, 10_000)).await.unwrap();
    }
    let seen = reader.stop();
    serving.abort();
    seen
}

pub async fn packets_have_what_was_set(_: Log) {
    let addr = |name| -> Ipv4Addr { variable(name).parse().unwrap() };
    let (a, b) = (addr("VETH_A"), addr("VETH_B"));
    let all = |tos| Seen::from([(a, tos), (b, tos)]);
    assert_eq!(of_both(None, None).await, all(0));
    assert_eq!(of_both(Some(0x68), None).await, all(0x68));
    // On RoCE the connect request carries the client's value, and the server's is not used.
    assert_eq!(of_both(None, Some(0x88)).await, all(0));
    assert_eq!(of_both(Some(0x68), Some(0x88)).await, all(0x68));
}
