//! The server's buffers for requests to land in.

use std::collections::HashMap;
use std::fmt;
use std::panic::{AssertUnwindSafe, catch_unwind};
use std::sync::Arc;

use http::request::Parts;
use http::{Extensions, HeaderMap};
use tonic_rdma_memory::throttled;

use super::{Claimed, IntoLandIn, WhyCopied};

/// The facts about a request that are known when [`Server::land_in`](crate::Server::land_in) asks
/// for a buffer for the request.
#[derive(Debug)]
#[non_exhaustive]
pub struct LandRequest<'a> {
    /// The call's metadata.
    pub headers: &'a HeaderMap,
    /// The length in bytes of the longest `bytes` field of the request's first large message, if
    /// the client states it. The client does not state the length over TCP. On the fast path, a
    /// client with [`ProstCodec`](crate::codec::ProstCodec) states it for messages that do not fit
    /// a control slot.
    pub field: Option<u32>,
}

/// Creates a buffer for a request, claims it for the call, and adds it to the request's extensions.
type Allocate =
    dyn Fn(&LandRequest<'_>, &mut Extensions, WhyCopied) -> Option<Arc<Claimed>> + Send + Sync;

/// Allocators by the path of their method.
#[derive(Clone, Default)]
pub(crate) struct Allocators(HashMap<Box<str>, Arc<Allocate>>);

impl Allocators {
    pub(crate) fn add<T, F>(&mut self, path: &str, allocate: F)
    where
        T: IntoLandIn,
        F: Fn(&LandRequest<'_>) -> Option<T> + Send + Sync + 'static,
    {
        let allocate = move |request: &LandRequest<'_>, extensions: &mut Extensions, why| {
            let land_in = allocate(request)?.into_land_in();
            // If another call still has this buffer, this call does not use it.
            let claimed = land_in.target.claim_for(why)?;
            extensions.insert(land_in);
            Some(claimed)
        };
        self.0.insert(path.into(), Arc::new(allocate));
    }

    pub(crate) fn is_empty(&self) -> bool {
        self.0.is_empty()
    }

    /// Asks the method's allocator for a buffer for a request, if the method has one, and claims
    /// the buffer for the call. If the allocator panics, the panic is logged, and the request is
    /// served without a buffer.
    pub(crate) fn claim(
        &self,
        parts: &mut Parts,
        field: impl FnOnce() -> Option<u32>,
        why: WhyCopied,
    ) -> Option<Arc<Claimed>> {
        let allocate = self.0.get(parts.uri.path())?;
        let Parts { headers, extensions, .. } = parts;
        let request = LandRequest { headers, field: field() };
        let asked = catch_unwind(AssertUnwindSafe(|| allocate(&request, extensions, why)));
        match asked {
            Ok(claimed) => claimed,
            Err(_) => {
                throttled!(
                    error,
                    path = parts.uri.path(),
                    "the allocator of Server::land_in panicked"
                );
                None
            }
        }
    }
}

impl fmt::Debug for Allocators {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.debug_set().entries(self.0.keys()).finish()
    }
}
