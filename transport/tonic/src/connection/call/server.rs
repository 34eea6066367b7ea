//! The server's end of a connection: the calls that the peer makes.

use std::future::Future;
use std::pin::Pin;
use std::sync::Arc;

use http::request::Parts;
use http::{Extensions, Request, Response};
use tonic::body::Body;
use tonic_rdma_fabric::AnyLink;
use tonic_rdma_memory::Pool;
use tonic_rdma_proto::{CloseCode, PeerSettings, Side};
use tower::Service;
use tracing::Instrument;

use crate::codec::{Call, Deframer, Methods, Used};
use crate::connection::ConnectionConfig;
use crate::connection::call::header_cache::{Head, HeaderCache};
use crate::connection::call::recv_body::RecvBody;
use crate::connection::call::task_pool::TaskPool;
use crate::connection::call::{Opened, StreamRef};
use crate::connection::driver::{Turn, drive};
use crate::connection::lifecycle::Life;
use crate::connection::shared::SharedConnection;
use crate::connection::state::ConnectionState;
use crate::connection::usage::ConnectionInfo;
use crate::land_in::allocators::Allocators;
use crate::land_in::{Claimed, WhyCopied};
use crate::path::reason::{Reason, ReasonCode};
use crate::tcp;
use crate::telemetry::spans;
use crate::telemetry::stats::Counters;

type BoxError = Box<dyn std::error::Error + Send + Sync>;

/// A connection that was accepted.
pub(crate) struct Accepted {
    shared: Arc<SharedConnection>,
    /// Allocators of buffers for requests to land in, by method.
    allocators: Option<Arc<Allocators>>,
    /// Extensions that every request gets.
    pub(crate) extensions: Extensions,
    /// When this future completes, the client is told to make new calls on another path. Calls in
    /// flight continue, and the link closes after the last call.
    pub(crate) drain: Pin<Box<dyn Future<Output = ()> + Send>>,
}

impl Accepted {
    /// Creates a connection over `link`, without extensions, and with a `drain` that never
    /// completes. `peer` contains the settings of the peer's hello.
    pub(crate) fn new(
        link: AnyLink,
        pool: Pool,
        peer: PeerSettings,
        options: ConnectionConfig,
        counters: Arc<Counters>,
        methods: Arc<Methods>,
    ) -> Self {
        let side = Side::Server;
        Accepted {
            shared: SharedConnection::new(side, link, pool, peer, &options, counters, methods),
            allocators: options.allocators,
            extensions: Extensions::new(),
            drain: Box::pin(std::future::pending()),
        }
    }

    /// A view of the connection for operators.
    pub(crate) fn view(&self) -> View {
        View(self.shared.clone())
    }
}

/// A view of a connection for operators.
#[derive(Clone, Debug)]
pub(crate) struct View(Arc<SharedConnection>);

impl View {
    /// Distinguishes the connection from all others of this process.
    pub(crate) fn id(&self) -> u64 {
        self.0.id
    }

    /// A snapshot of the connection. `None` if the connection belongs to a parent process.
    pub(crate) fn info(&self) -> Option<ConnectionInfo> {
        self.0.info()
    }
}

/// Serves a link until it ends, and returns the reason. Every call has its own task and a clone of
/// `service`: see [`task_pool`](crate::connection::call::task_pool).
pub(crate) async fn serve_connection<S>(accepted: Accepted, service: S) -> Reason
where
    S: Service<Request<Body>, Response = Response<Body>> + Clone + Send + 'static,
    S::Error: Into<BoxError>,
    S::Future: Send,
{
    let Accepted { shared, allocators, extensions, drain } = accepted;
    let span = spans::connection(Side::Server, &shared.peer);
    let mut header_cache = HeaderCache::new(shared.methods.clone(), extensions);
    let task_pool = TaskPool::new(service);
    let serve = move |turn| {
        let Opened { stream, reader, empty, block } = match turn {
            Turn::Serve(opened) => opened,
            Turn::Rest => return task_pool.end_idle(),
        };
        let Head { mut parts, call, plain } = match header_cache.read(block) {
            Ok(head) => head,
            Err(breach) => {
                let mut state = stream.shared.lock();
                state.conn.close(CloseCode::Breach, &breach.to_string());
                let detail = format!("protocol breach: {breach} ({})", stream.shared.peer);
                state.end(Life::Closing(Reason::from_peer(ReasonCode::LinkLost, detail)));
                state.flush_soon();
                return;
            }
        };
        stream.shared.calls.calls_fast.add(1);
        let named = allocators.as_deref().and_then(|all| name(all, &stream, &mut parts, &call));
        let deframer = match named {
            None => Deframer::new(call.method().clone(), plain),
            Some(named) => Deframer::gathering(call.method().clone(), plain, named),
        };
        let body = tcp::boxed(RecvBody::new(reader, deframer, call.method().used(), empty));
        let request = Request::from_parts(parts, body);
        task_pool.run(stream, call, request);
    };
    drive(shared.clone(), serve, drain).instrument(span).await
}

/// Claims a buffer for the request to land in, and tells the protocol whether the request has a
/// buffer. Only a method that is known to use this crate's codec can have a buffer.
fn name(
    allocators: &Allocators,
    stream: &StreamRef,
    parts: &mut Parts,
    call: &Call,
) -> Option<Arc<Claimed>> {
    let field = || stream.shared.lock().conn.next_field(stream.id);
    let claimed = match call.method().used() {
        Used::Ours => allocators.claim(parts, field, WhyCopied::NotApart),
        Used::Unknown | Used::Plain => None,
    };
    let mut state = stream.shared.lock();
    let ConnectionState { landing, streams, conn, .. } = &mut *state;
    match &claimed {
        Some(claimed) => landing.name_memory(stream.id, claimed, streams, conn),
        None => conn.decide_naming(stream.id, false),
    }
    state.flush_soon();
    claimed
}
