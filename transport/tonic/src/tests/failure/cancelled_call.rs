//! A client cancels a call at the moment when its response is produced.

use std::pin::Pin;
use std::sync::atomic::{AtomicBool, Ordering};
use std::sync::mpsc::Receiver;
use std::sync::{Arc, Mutex};
use std::task::{Context, Poll};

use bytes::Bytes;
use http::Response;
use http_body::Frame;
use tokio::sync::mpsc::{UnboundedSender, unbounded_channel};
use tonic::Status;
use tonic::body::Body;
use tower::util::MapResponseLayer;

use crate::tests::support::echo::{Client, Echo};
use crate::tests::support::logs::Logs;
use crate::tests::support::world::{Serving, World};

/// A response body that reports when it is polled, then waits and ends. When dropped, the body
/// reports the log lines since that poll.
struct LateBody {
    polled: UnboundedSender<()>,
    go: Arc<Mutex<Receiver<()>>>,
    logs: Option<Logs>,
    logged: UnboundedSender<Vec<String>>,
}

impl http_body::Body for LateBody {
    type Data = Bytes;
    type Error = Status;

    fn poll_frame(
        mut self: Pin<&mut Self>,
        _: &mut Context<'_>,
    ) -> Poll<Option<Result<Frame<Bytes>, Status>>> {
        if self.logs.is_none() {
            self.polled.send(()).unwrap();
            tokio::task::block_in_place(|| self.go.lock().unwrap().recv().unwrap());
            self.logs = Some(Logs::capture());
        }
        Poll::Ready(None)
    }
}

impl Drop for LateBody {
    fn drop(&mut self) {
        let lines = self.logs.as_ref().map(|logs| logs.lines_with("")).unwrap_or_default();
        let _ = self.logged.send(lines);
    }
}

#[tokio::test(flavor = "multi_thread", worker_threads = 3)]
async fn a_call_given_up_as_its_response_is_made_is_no_fault() {
    let world = World::new();
    let (polled, mut is_polled) = unbounded_channel();
    let (logged, mut what_is_logged) = unbounded_channel();
    let (go, gone) = std::sync::mpsc::channel();
    let (armed, gone) = (Arc::new(AtomicBool::new(false)), Arc::new(Mutex::new(gone)));
    let late = {
        let armed = armed.clone();
        move |response: Response<Body>| {
            if !armed.swap(false, Ordering::SeqCst) {
                return response;
            }
            let (polled, go, logged) = (polled.clone(), gone.clone(), logged.clone());
            response.map(|_| Body::new(LateBody { polled, go, logs: None, logged }))
        }
    };
    let router = world.builder().layer(MapResponseLayer::new(late)).add_service(Echo);
    let serving = Serving::start(router).await;
    let channel = world.connect(&serving).await;
    armed.store(true, Ordering::SeqCst);
    let mut client = Client::new(channel.clone());
    let call = tokio::spawn(async move { client.say("hello").await });
    is_polled.recv().await.unwrap();
    call.abort();
    assert!(call.await.unwrap_err().is_cancelled());
    // This request follows the RESET on the same connection.
    assert_eq!(Client::new(channel.clone()).say("again").await.unwrap(), "again");
    go.send(()).unwrap();
    assert_eq!(what_is_logged.recv().await.unwrap(), Vec::<String>::new());
    assert_eq!(Client::new(channel).say("more").await.unwrap(), "more");
}
