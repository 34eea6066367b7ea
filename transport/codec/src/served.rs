//! Finds out which codec reads a request, before any part of the request is read.
//!
//! A tonic service makes its decoder when it is first polled, before it polls the request's body.
//! So a decoder of this crate that is made during this first poll belongs to the method. A client
//! that the service calls also makes a decoder, but makes an encoder first, so decoders after an
//! encoder are ignored. A layer or handler that calls another service in the process before it
//! awaits anything may have made the decoder instead. Then no decoder of this crate takes the first
//! messages, which reveals the mistake. The method's codec is then learnt from the first response.

use std::cell::RefCell;
use std::sync::Arc;

use crate::methods::{Call, Method, Used};

thread_local! {
    /// The method whose service is first polled, until it makes a decoder or an encoder.
    static SERVED: RefCell<Option<Arc<Method>>> = const { RefCell::new(None) };
}

/// Clears [`SERVED`], even if the service panics. If a service polls another service for the first
/// time within its own poll, the outer service's method is lost, so decoders that the outer service
/// makes later reveal nothing.
struct Ends;

impl Drop for Ends {
    fn drop(&mut self) {
        SERVED.take();
    }
}

/// Polls the service of a call for the first time. If its method is not known, [`Method::used`]
/// returns [`Used::Ours`] as soon as the service makes a decoder of this crate.
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

/// Ends the search. The encoder belongs to a client, or to a service that has read its request.
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
    use crate::methods::Methods;

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
        // A decoder of another crate, and one of a client that is called first.
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
