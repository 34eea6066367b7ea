//! iceoryx2: request and response in shared memory, without gRPC, to measure the hand-over of a
//! message. Each end polls, as in iceoryx2's own benchmarks. Messages lie in memory that iceoryx2
//! provides, and nothing is written to them, which is the best case.

use anyhow::Context as _;
use benches::{
    measure::Calls,
    session::{self, CallRunner},
    work::{WorkKind, Row},
};
use bytes::Bytes;
use iceoryx2::{
    port::client::Client,
    prelude::{AllocationStrategy, NodeBuilder, ServiceName, ipc_threadsafe},
    service::port_factory::request_response::PortFactory,
};
use std::{hint::spin_loop, mem::MaybeUninit, sync::Arc};

/// A message whose bytes may be uninitialised.
type Message = [MaybeUninit<u8>];
type Service = PortFactory<ipc_threadsafe::Service, Message, u64, Message, ()>;

/// Maximum length of a message in bytes.
const MAX: usize = 256 << 20;

/// The service. A request's header contains the length of the reply.
fn service(name: &str) -> anyhow::Result<Service> {
    let node = NodeBuilder::new().create::<ipc_threadsafe::Service>()?;
    Ok(node
        .service_builder(&ServiceName::new(name)?)
        .request_response::<Message, Message>()
        .request_user_header::<u64>()
        .max_active_requests_per_client(1)
        .max_loaned_requests(1)
        .open_or_create()?)
}

pub(crate) fn serve() -> anyhow::Result<()> {
    let name = format!("tonic-rdma-benches/{}", std::process::id());
    let service = service(&name)?;
    let server = service
        .server_builder()
        .initial_max_slice_len(1 << 20)
        .allocation_strategy(AllocationStrategy::PowerOfTwo)
        .create()?;
    println!("{name}");
    loop {
        let Some(request) = server.receive()? else {
            spin_loop();
            continue;
        };
        let len = usize::try_from(*request.user_header())?;
        let reply = request.loan_slice_uninit(len.max(1))?;
        reply.write_from_fn(|_| MaybeUninit::uninit()).send()?;
    }
}

#[derive(Clone)]
struct Connection(Arc<Client<ipc_threadsafe::Service, Message, u64, Message, ()>>);

impl Calls for Connection {
    fn payload(&self, length: usize) -> Bytes {
        Bytes::from(vec![0; length])
    }

    async fn unary(&mut self, payload: Bytes, reply: usize) -> anyhow::Result<usize> {
        let mut request = self.0.loan_slice_uninit(payload.len().max(1))?;
        *request.user_header_mut() = reply as u64;
        let pending = request.write_from_fn(|_| MaybeUninit::uninit()).send()?;
        loop {
            if let Some(response) = pending.receive()? {
                return Ok(response.payload().len().min(reply));
            }
            spin_loop();
        }
    }

    async fn stream(&mut self, _: usize, _: usize) -> anyhow::Result<()> {
        anyhow::bail!("it has no streams")
    }

    async fn open(&mut self) -> anyhow::Result<Box<dyn Send>> {
        anyhow::bail!("it has no streams")
    }

    /// Only one message is in flight at a time. While the process polls for a message, it does
    /// nothing else.
    fn supports(&self, row: &Row) -> bool {
        matches!(row.kind, WorkKind::Bulk { size, in_flight: 1, .. } if size <= MAX)
    }

    fn path(&self) -> String {
        "iceoryx2".to_owned()
    }
}

pub(crate) async fn client(name: String) -> anyhow::Result<()> {
    let service = service(&name)?;
    let connect = async move |_| {
        let client = service
            .client_builder()
            .initial_max_slice_len(MAX)
            .create()
            .context("it makes no client of this service")?;
        Ok(Connection(Arc::new(client)))
    };
    match CallRunner::new(connect).await {
        Ok(calling) => session::run(calling).await,
        Err(error) => session::report_failure(&error),
    }
}
