//! An Offer costs the server little, whatever it asks for and whether or not its answer is read.

use bytes::{BufMut, Bytes, BytesMut};
use http::{HeaderMap, Request};
use prost::Message;
use tokio::net::TcpStream;
use tonic::Code;

use crate::bootstrap::OFFER_PATH;
use crate::bootstrap::connection::OFFERS_AT_ONCE;
use crate::bootstrap::limited::MAX_REQUEST;
use crate::bootstrap::pb::offer_response::Outcome;
use crate::bootstrap::service::{MAX_ANSWER, MAX_FABRICS};
use crate::tests::admission::tickets::Hand;
use crate::tests::support::world::{Serving, World};

#[tokio::test]
async fn a_long_request_is_refused_by_its_length() {
    let world = World::new();
    let serving = world.serve().await;
    let mut hand = Hand::new(&world, &serving).await;
    for fabrics in [vec!["shm"; 800_000], vec!["sim"; MAX_REQUEST / 5 + 1], vec![""; MAX_REQUEST]] {
        let request = hand.request(&fabrics);
        assert!(request.encoded_len() > MAX_REQUEST);
        let status = hand.offer(request).await.unwrap_err();
        assert_eq!(status.code(), Code::OutOfRange);
        assert!(status.message().contains(&MAX_REQUEST.to_string()), "{status}");
    }
    hand.ticket().await;
}

#[tokio::test]
async fn a_name_that_comes_again_and_again_is_answered_once() {
    let world = World::new();
    let serving = world.serve().await;
    let mut hand = Hand::new(&world, &serving).await;
    let request = hand.request(&vec!["sim"; MAX_REQUEST / 5 - 20]);
    assert!(request.encoded_len() <= MAX_REQUEST);
    let response = hand.offer(request).await.unwrap();
    assert!(response.encoded_len() <= MAX_ANSWER, "{} bytes", response.encoded_len());
    let Some(Outcome::Grant(grant)) = response.outcome else { panic!("refused") };
    assert_eq!((grant.fabrics.len(), grant.refusals.len()), (1, 0));
}

#[tokio::test]
async fn more_names_than_there_are_fabrics_are_refused() {
    let world = World::new();
    let serving = world.serve().await;
    let mut hand = Hand::new(&world, &serving).await;
    let mut names = vec!["a", "b", "c", "d", "e", "f", "g", "sim", "sim", "a"];
    let Ok(response) = hand.offer(hand.request(&names)).await else {
        panic!("{MAX_FABRICS} names")
    };
    assert!(matches!(response.outcome, Some(Outcome::Grant(_))));
    names.push("h");
    let status = hand.offer(hand.request(&names)).await.unwrap_err();
    assert_eq!(status.code(), Code::InvalidArgument);
    assert_eq!(status.message(), "an Offer names at most 8 fabrics");
}

/// A client that makes Offers, gives each answer a window of `window` bytes, and reads no answer.
struct Hoarder {
    h2: h2::client::SendRequest<Bytes>,
    message: Bytes,
    to: Serving,
    held: Vec<h2::RecvStream>,
}

impl Hoarder {
    async fn new(world: &World, to: Serving, window: u32) -> Self {
        let tcp = TcpStream::connect(to.addr).await.unwrap();
        let mut hand = Hand::new(world, &to).await;
        hand.states = Some(tcp.local_addr().unwrap());
        let request = hand.request(&["sim"]);
        let mut message = BytesMut::new();
        message.put_u8(0);
        message.put_u32(request.encoded_len() as u32);
        request.encode(&mut message).unwrap();
        let mut builder = h2::client::Builder::new();
        let handshake = builder.initial_window_size(window).handshake(tcp);
        let (h2, connection) = handshake.await.unwrap();
        tokio::spawn(connection);
        Self { h2, message: message.freeze(), to, held: Vec::new() }
    }

    /// Makes an Offer, and returns the status if the answer consists only of a status.
    async fn ask(&mut self) -> Option<Code> {
        let request = Request::post(format!("http://{}{OFFER_PATH}", self.to.addr))
            .header("content-type", "application/grpc")
            .header("te", "trailers")
            .body(())
            .unwrap();
        self.h2 = self.h2.clone().ready().await.unwrap();
        let (response, mut body) = self.h2.send_request(request, false).unwrap();
        body.send_data(self.message.clone(), true).unwrap();
        let (head, body) = response.await.unwrap().into_parts();
        let status = code(&head.headers);
        if status.is_none() {
            self.held.push(body);
        }
        status
    }
}

fn code(headers: &HeaderMap) -> Option<Code> {
    Some(Code::from_bytes(headers.get("grpc-status")?.as_bytes()))
}

#[tokio::test]
async fn answers_that_are_not_read_are_few() {
    let world = World::new();
    // With one byte of window, the whole answer is produced and kept by HTTP/2.
    for window in [0, 1] {
        let mut hoarder = Hoarder::new(&world, world.serve().await, window).await;
        for _ in 0..OFFERS_AT_ONCE {
            assert_eq!(hoarder.ask().await, None);
        }
        for _ in 0..40 {
            assert_eq!(hoarder.ask().await, Some(Code::ResourceExhausted));
        }
        // The limit applies to this connection.
        world.connect(&hoarder.to).await;
        // Answers that are given up make room.
        hoarder.held.clear();
        while hoarder.ask().await == Some(Code::ResourceExhausted) {
            tokio::task::yield_now().await;
        }
    }
}
