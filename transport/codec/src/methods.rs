//! Facts learnt about each method: the codec of its stub, and the message lengths that tonic's
//! limits accept. Before any part of a request is read, [`serve_first`] finds out which codec reads
//! it.

use std::cell::RefCell;
use std::collections::HashMap;
use std::sync::atomic::Ordering::Relaxed;
use std::sync::atomic::{AtomicBool, AtomicU8, AtomicUsize};
use std::sync::{Arc, Mutex, PoisonError, RwLock, Weak};

use foldhash::fast::RandomState;
use http::Uri;

/// If a message, or a part of a message, has this many bytes or more, its method counts as
/// transferring bulk.
const BULK: usize = 64 * 1024;

/// Maximum number of methods remembered. Only methods that are served count.
const MAX_METHODS: usize = 4096;

/// The codec of a stub or a service, if known.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Default)]
pub enum Used {
    /// No message has been encoded yet, and no decoder of this crate is known to read the requests.
    #[default]
    Unknown,
    /// A codec of another crate.
    Plain,
    /// This crate's codec.
    Ours,
}

/// Whether the codec is known from the decoder that the service has made:
///
/// | from | on | to |
/// |---|---|---|
/// | `Open` | the service makes a decoder of this crate | `Holds`: [`Used::Ours`] |
/// | `Holds` | a request is dropped with a message that no such decoder has taken | `Over`: [`Used::Unknown`] |
/// | any | a message is encoded | `Over`: the codec of the message |
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
enum ByDecoder {
    Open,
    Holds,
    Over,
}

/// State learnt about one method.
#[derive(Debug, Default)]
pub struct Method {
    used: AtomicU8,
    /// The [`ByDecoder`] state as a number.
    by_decoder: AtomicU8,
    /// Length in bytes of the longest outgoing message that tonic is known to accept.
    encodes: AtomicUsize,
    /// Like `encodes`, for incoming messages.
    decodes: AtomicUsize,
    bulk: AtomicBool,
}

impl Method {
    /// The codec of the stub or the service.
    pub fn used(&self) -> Used {
        match self.used.load(Relaxed) {
            0 => Used::Unknown,
            1 => Used::Plain,
            _ => Used::Ours,
        }
    }

    /// Records that a message was encoded with this codec.
    fn set_used(&self, used: Used) {
        if self.used() != used {
            self.used.store(used as u8, Relaxed);
        }
        if self.by_decoder() != ByDecoder::Over {
            self.by_decoder.store(ByDecoder::Over as u8, Relaxed);
        }
    }

    fn by_decoder(&self) -> ByDecoder {
        match self.by_decoder.load(Relaxed) {
            0 => ByDecoder::Open,
            1 => ByDecoder::Holds,
            _ => ByDecoder::Over,
        }
    }

    fn change(&self, from: ByDecoder, to: ByDecoder, used: Used) {
        let (from, to) = (from as u8, to as u8);
        if self.by_decoder.compare_exchange(from, to, Relaxed, Relaxed).is_ok() {
            self.used.store(used as u8, Relaxed);
        }
    }

    /// Whether a decoder that is made now reveals the codec.
    pub(super) fn asks_for_decoder(&self) -> bool {
        self.by_decoder() == ByDecoder::Open
    }

    /// Records that the service has made a decoder of this crate.
    pub(super) fn has_decoder(&self) {
        self.change(ByDecoder::Open, ByDecoder::Holds, Used::Ours);
    }

    /// Records that a request is dropped with a message that no decoder of this crate has taken.
    pub(super) fn has_left_a_message(&self) {
        self.change(ByDecoder::Holds, ByDecoder::Over, Used::Unknown);
    }

    /// Whether a call to the method has sent or received 64 KiB or more in one piece, with any
    /// codec.
    pub fn transfers_bulk(&self) -> bool {
        self.bulk.load(Relaxed)
    }

    /// Records that a call to the method has sent or received `len` bytes in one piece.
    #[inline]
    pub fn has_transferred(&self, len: usize) {
        if len >= BULK && !self.transfers_bulk() {
            self.bulk.store(true, Relaxed);
        }
    }

    pub(super) fn encodes(&self) -> usize {
        self.encodes.load(Relaxed)
    }

    pub(super) fn has_encoded(&self, len: usize) {
        if len > self.encodes() {
            self.encodes.fetch_max(len, Relaxed);
        }
    }

    pub(super) fn decodes(&self) -> usize {
        self.decodes.load(Relaxed)
    }

    pub(super) fn has_decoded(&self, len: usize) {
        if len > self.decodes() {
            self.decodes.fetch_max(len, Relaxed);
        }
    }
}

/// The methods of one channel or one server, by path.
#[derive(Debug, Default)]
pub struct Methods {
    known: RwLock<Table>,
    /// The most recently called method that is not in the table. Concurrent calls share the method,
    /// so that each length is learnt only once.
    latest: Mutex<(Box<str>, Weak<Method>)>,
}

/// The table is bounded and holds only paths that are served, so a fast hash suffices.
type Table = HashMap<Box<str>, Arc<Method>, RandomState>;

impl Methods {
    /// Starts a call to the method at `uri`.
    pub fn call(self: &Arc<Self>, uri: &Uri) -> Call {
        let known =
            self.known.read().unwrap_or_else(PoisonError::into_inner).get(uri.path()).cloned();
        match known {
            Some(method) => Call { method, new: None },
            None => {
                let method = self.latest(uri.path());
                Call { method, new: Some(Box::new((self.clone(), uri.clone()))) }
            }
        }
    }

    /// Returns the method of a path that is not in the table. Calls to the path share the method
    /// while one of them is in progress, and until a call to another such path begins.
    fn latest(&self, path: &str) -> Arc<Method> {
        let mut latest = self.latest.lock().unwrap_or_else(PoisonError::into_inner);
        let same = if *latest.0 == *path { latest.1.upgrade() } else { None };
        same.unwrap_or_else(|| {
            let method = Arc::default();
            *latest = (path.into(), Arc::downgrade(&method));
            method
        })
    }

    /// Whether the method at `uri` is known to transfer bulk.
    pub fn transfers_bulk(&self, uri: &Uri) -> bool {
        let methods = self.known.read().unwrap_or_else(PoisonError::into_inner);
        methods.get(uri.path()).is_some_and(|method| method.transfers_bulk())
    }

    fn remember(&self, path: &str, method: &Arc<Method>) {
        let mut methods = self.known.write().unwrap_or_else(PoisonError::into_inner);
        if methods.len() < MAX_METHODS && !methods.contains_key(path) {
            methods.insert(path.into(), method.clone());
        }
    }
}

/// A call to a method. The method enters the table when one of its messages is encoded, or its
/// service has made a decoder of this crate. So a peer cannot fill the table with paths that are
/// not served.
#[derive(Clone, Debug)]
pub struct Call {
    method: Arc<Method>,
    new: Option<Box<(Arc<Methods>, Uri)>>,
}

impl Call {
    /// The method that is called.
    pub fn method(&self) -> &Arc<Method> {
        &self.method
    }

    /// Whether the method is in the table.
    pub fn is_known(&self) -> bool {
        self.new.is_none()
    }

    /// Records that a message of the method has been encoded with codec `used`.
    pub fn learn(&mut self, used: Used) {
        self.method.set_used(used);
        self.is_served();
    }

    /// Enters the method in the table.
    pub(super) fn is_served(&mut self) {
        if let Some(new) = self.new.take() {
            let (methods, uri) = *new;
            methods.remember(uri.path(), &self.method);
        }
    }
}

thread_local! {
    /// The method whose service is being polled for the first time, until the service makes a
    /// decoder or an encoder.
    static SERVED: RefCell<Option<Arc<Method>>> = const { RefCell::new(None) };
}

/// Clears [`SERVED`], even if the service panics. If a service polls another service for the first
/// time within its own poll, the outer service's method is lost. Decoders that the outer service
/// makes later then reveal nothing.
struct Ends;

impl Drop for Ends {
    fn drop(&mut self) {
        SERVED.take();
    }
}

// A tonic service makes its decoder when it is first polled, before it polls the request's body. So
// a decoder of this crate that is made during this first poll belongs to the method. A client that
// the service calls also makes a decoder, but makes an encoder first, so decoders after an encoder
// are ignored. A layer or handler that calls another service in the process before it awaits
// anything may have made the decoder instead. Then no decoder of this crate takes the first
// messages, which reveals the mistake. The method's codec is then learnt from the first response.

/// Polls the service of a call for the first time. If the method's codec is not known yet,
/// [`Method::used`] returns [`Used::Ours`] as soon as the service makes a decoder of this crate.
pub fn serve_first<T>(call: &mut Call, poll: impl FnOnce() -> T) -> T {
    if !call.method().asks_for_decoder() {
        return poll();
    }
    SERVED.set(Some(call.method().clone()));
    let ends = Ends;
    let polled = poll();
    drop(ends);
    if call.method().used() == Used::Ours {
        call.is_served();
    }
    polled
}

/// Ends the search for the service's codec. The encoder belongs to a client, or to a service that
/// has read its request.
pub(crate) fn encoder_is_made() {
    SERVED.take();
}

pub(crate) fn decoder_is_made() {
    if let Some(method) = SERVED.take() {
        method.has_decoder();
    }
}

#[cfg(test)]
mod tests {
    use std::panic::{AssertUnwindSafe, catch_unwind};

    use http::Uri;
    use tonic::codec::Codec;

    use super::*;
    use crate::ProstCodec;

    #[test]
    fn a_method_is_remembered_once_it_has_encoded() {
        let methods = Arc::new(Methods::default());
        let uri = Uri::from_static("http://h/a.B/C");
        methods.call(&uri).method().has_decoded(9);
        let mut call = methods.call(&uri);
        assert_eq!((call.method().used(), call.method().decodes()), (Used::Unknown, 0));
        let other = methods.call(&Uri::from_static("http://h/a.B/D"));
        assert!(!Arc::ptr_eq(call.method(), other.method()));
        call.learn(Used::Ours);
        call.method().has_decoded(7);
        let again = methods.call(&uri);
        assert_eq!(
            (again.method().used(), again.method().decodes(), again.method().encodes()),
            (Used::Ours, 7, 0)
        );
    }

    #[test]
    fn a_method_that_has_moved_much_at_once_transfers_bulk() {
        let methods = Arc::new(Methods::default());
        let uri = Uri::from_static("http://h/a.B/C");
        let mut call = methods.call(&uri);
        call.learn(Used::Plain);
        call.method().has_transferred(BULK - 1);
        assert!(!methods.transfers_bulk(&uri));
        call.method().has_transferred(BULK);
        call.method().has_transferred(1);
        assert!(methods.transfers_bulk(&uri));
        assert!(!methods.transfers_bulk(&Uri::from_static("http://h/a.B/D")));
    }

    #[test]
    fn calls_that_begin_at_once_learn_together() {
        let methods = Arc::new(Methods::default());
        let uri = Uri::from_static("http://h/a.B/C");
        let mut calls = [methods.call(&uri), methods.call(&uri)];
        calls[0].method().has_encoded(7);
        assert_eq!(calls[1].method().encodes(), 7);
        calls.iter_mut().for_each(|call| call.learn(Used::Ours));
        assert!(Arc::ptr_eq(calls[1].method(), methods.call(&uri).method()));
    }

    #[test]
    fn the_table_is_bounded() {
        let methods = Arc::new(Methods::default());
        for n in 0..MAX_METHODS + 10 {
            methods.call(&format!("/s/{n}").parse().unwrap()).learn(Used::Plain);
        }
        assert_eq!(methods.known.read().unwrap().len(), MAX_METHODS);
    }

    fn decoder() {
        ProstCodec::<(), ()>::new().decoder();
    }

    fn encoder() {
        ProstCodec::<(), ()>::new().encoder();
    }

    /// Returns the codec known for a method at its first call and at its second.
    fn learnt(poll: impl FnOnce()) -> (Used, Used) {
        let (methods, uri) = (Arc::new(Methods::default()), Uri::from_static("http://h/a.B/C"));
        let mut call = methods.call(&uri);
        serve_first(&mut call, poll);
        decoder();
        let first = call.method().used();
        drop(call);
        (first, methods.call(&uri).method().used())
    }

    #[test]
    fn a_service_that_makes_a_decoder_reads_with_it() {
        assert_eq!(learnt(|| (decoder(), encoder()).0), (Used::Ours, Used::Ours));
    }

    #[test]
    fn other_codecs_teach_nothing() {
        // The service has a decoder of another crate, or calls a client before it makes its
        // decoder.
        assert_eq!(learnt(|| ()), (Used::Unknown, Used::Unknown));
        assert_eq!(learnt(|| (encoder(), decoder()).0), (Used::Unknown, Used::Unknown));
    }

    #[test]
    fn a_service_within_a_service_is_none_of_the_outer_ones() {
        let inner = || assert_eq!(learnt(decoder), (Used::Ours, Used::Ours));
        assert_eq!(learnt(|| (inner(), decoder()).0), (Used::Unknown, Used::Unknown));
    }

    #[test]
    fn a_panic_of_the_service_ends_it() {
        let methods = Arc::new(Methods::default());
        let mut call = methods.call(&Uri::from_static("http://h/a.B/C"));
        let polled = catch_unwind(AssertUnwindSafe(|| {
            serve_first(&mut call, || -> () { panic!("as told") });
        }));
        assert!(polled.is_err());
        decoder();
        assert_eq!(call.method().used(), Used::Unknown);
    }

    #[test]
    fn a_message_that_nobody_takes_shows_another_decoder() {
        let (methods, uri) = (Arc::new(Methods::default()), Uri::from_static("http://h/a.B/C"));
        let mut call = methods.call(&uri);
        serve_first(&mut call, decoder);
        call.method().has_left_a_message();
        let mut next = methods.call(&uri);
        serve_first(&mut next, decoder);
        assert_eq!(next.method().used(), Used::Unknown, "it is asked no more");
        next.learn(Used::Ours);
        // Once messages have been encoded, a dropped call reveals nothing.
        next.method().has_left_a_message();
        assert_eq!(next.method().used(), Used::Ours);
    }

    #[test]
    fn what_is_known_stays() {
        let methods = Arc::new(Methods::default());
        let mut call = methods.call(&Uri::from_static("http://h/a.B/C"));
        call.learn(Used::Plain);
        serve_first(&mut call, decoder);
        assert_eq!(call.method().used(), Used::Plain);
    }
}
