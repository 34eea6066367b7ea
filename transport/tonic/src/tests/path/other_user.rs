//! Memory is not shared with every user. A refused user learns the cause and its cure.

use std::thread::{self, JoinHandle};

use tokio::sync::oneshot;

use crate::diagnose::diagnose;
use crate::tests::support::echo::{Client, Echo};
use crate::tests::support::logs::Logs;
use crate::tests::support::world::{Serving, endpoint};
use crate::{Context, Diagnosis, FabricKind, Path, Reason, ReasonCode, Server, ShmAccess, Side};

/// A user other than the one that runs the tests.
const OTHER: u32 = 4711;

fn own() -> u32 {
    rustix::process::geteuid().as_raw()
}

/// The end that refuses the other.
#[derive(Clone, Copy, PartialEq)]
enum Refuses {
    Server,
    Client,
}

/// Every end admits root. So if the tests run as root, the end to be refused runs as another user.
fn user(is_refused: bool) -> Option<u32> {
    (is_refused && own() == 0).then_some(OTHER)
}

/// Without root there is no second user, so the refusing end does not share memory with its own
/// user.
fn access(refuses: bool) -> ShmAccess {
    match refuses && own() != 0 {
        true => ShmAccess::Users(vec![own() + 1]),
        false => ShmAccess::SameUser,
    }
}

/// Runs on a thread with its own runtime, as this user.
fn on_thread<T: Send + 'static>(
    user: Option<u32>,
    work: impl AsyncFnOnce() -> T + Send + 'static,
) -> JoinHandle<T> {
    thread::spawn(move || {
        if let Some(user) = user {
            let user = rustix::process::Uid::from_raw(user);
            rustix::thread::set_thread_res_uid(user, user, user).unwrap();
        }
        tokio::runtime::Builder::new_current_thread().enable_all().build().unwrap().block_on(work())
    })
}

/// The reports about a refusal: its reason, the lines that each end logged, and a diagnosis.
struct Said {
    reason: Reason,
    client: Vec<String>,
    server: Vec<String>,
    diagnosis: Diagnosis,
}

fn said(refuses: Refuses) -> Said {
    let context = |end: Refuses| {
        Context::builder().shm_access(access(end == refuses)).device("no-such-device")
    };
    let (servers, clients) = (context(Refuses::Server).build(), context(Refuses::Client).build());
    let (tell, told) = std::sync::mpsc::channel();
    let (stop, stopped) = oneshot::channel::<()>();
    let server = on_thread(user(refuses == Refuses::Client), async move || {
        let logs = Logs::capture();
        let serving = Serving::start(Server::builder().context(servers).add_service(Echo)).await;
        tell.send(serving.addr).unwrap();
        let _ = stopped.await;
        logs.lines_with("shared memory refused")
    });
    let addr = told.recv().unwrap();
    let client = on_thread(user(refuses == Refuses::Server), async move || {
        let logs = Logs::capture();
        // Without a device, as on most hosts, RDMA has its own reason.
        let endpoint =
            endpoint(addr).context(clients).fabrics([FabricKind::Shm, FabricKind::Verbs]);
        let channel = endpoint.connect().await.unwrap();
        let info = channel.path();
        assert_eq!(info.path, Path::Tcp, "{info}");
        assert_eq!(Client::new(channel).say("hello").await.unwrap(), "hello");
        let lines = logs.lines_with("calls go over TCP");
        (info.reason.unwrap(), lines, diagnose().peer(endpoint).await.unwrap())
    });
    let (reason, client, diagnosis) = client.join().unwrap();
    drop(stop);
    Said { reason, client, server: server.join().unwrap(), diagnosis }
}

fn is_named(said: &Said, side: Side) {
    let Said { reason, client, diagnosis, .. } = said;
    assert_eq!((reason.code(), reason.side()), (ReasonCode::OtherUser, side), "{reason}");
    let refused = if own() == 0 { OTHER } else { own() };
    assert!(reason.detail().contains(&format!("user {refused}")), "{reason}");
    assert!(
        reason.detail().contains("verbs: no-"),
        "what is the matter with RDMA comes behind it: {reason}"
    );
    assert_eq!(client.len(), 1, "{client:?}");
    let (why, cure) = client[0].split_once("cure=").unwrap();
    assert!(why.contains("code=\"other-user\"") && cure.contains("the same user"), "{client:?}");
    let finding = &diagnosis.findings[0];
    assert_eq!((finding.code, finding.blocks), (ReasonCode::OtherUser, true), "{finding:?}");
    assert!(finding.what.contains("another user"), "{finding:?}");
    assert!(finding.cures.iter().any(|cure| cure.what.contains("ShmAccess")), "{finding:?}");
}

#[test]
fn a_server_refuses_a_client() {
    let said = said(Refuses::Server);
    is_named(&said, Side::Peer);
    let refused = if own() == 0 { OTHER } else { own() };
    let named =
        |line: &String| line.contains(&format!("uid={refused}")) && line.contains("ShmAccess");
    assert!(said.server.iter().any(named), "{:?}", said.server);
}

#[test]
fn a_client_refuses_a_server() {
    is_named(&said(Refuses::Client), Side::Local);
}
