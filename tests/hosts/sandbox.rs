//! System calls that a seccomp(2) filter forbids at either end, as in sandboxes, and a client in
//! its own PID namespace, as in containers.

use tonic_rdma_tests::fabric::Fabric;

use crate::client::{Client, SIZES, own_path};
use crate::server::Server;

/// Checks that a client's calls succeed over `path`. Returns the path's text.
async fn calls(server: &Server, fabric: Fabric, wrapper: &str, option: &str, path: &str) -> String {
    let mut client = Client::start(server, fabric, wrapper, option).await;
    let text = client.path().await;
    assert!(text.starts_with(path), "{text}");
    client.echo(&SIZES).await;
    let [_, over_tcp, lost] = client.counts().await;
    assert_eq!((over_tcp > 0, lost), (path.starts_with("tcp"), 0), "{text}");
    text
}

/// Runs with the option at each end in turn.
async fn either_end(fabric: Fabric, option: &str, path: &str) -> [String; 2] {
    let server = Server::start(fabric, "", option).await;
    let of_server = calls(&server, fabric, "", "", path).await;
    let server = Server::start(fabric, "", "").await;
    [of_server, calls(&server, fabric, "", option, path).await]
}

pub async fn without_memory_files(fabric: Fabric) {
    let path = if fabric == Fabric::Shm { "tcp (" } else { own_path(fabric) };
    let [of_server, of_client] = either_end(fabric, "no-memfd", path).await;
    if fabric == Fabric::Shm {
        assert!(of_server.contains("peer: memory-files"), "{of_server}");
        assert!(of_client.contains("(memory-files"), "{of_client}");
    }
}

pub async fn without_unix_sockets(fabric: Fabric) {
    let path = if fabric == Fabric::Shm { "tcp (" } else { own_path(fabric) };
    let [of_server, of_client] = either_end(fabric, "no-unix-sockets", path).await;
    if fabric == Fabric::Shm {
        assert!(of_server.contains("peer: no-shared-memory"), "{of_server}");
        assert!(of_client.contains("(no-shared-memory"), "{of_client}");
    }
}

pub async fn without_fstatfs(fabric: Fabric) {
    either_end(fabric, "no-fstatfs", own_path(fabric)).await;
}

pub async fn in_another_namespace(fabric: Fabric) {
    // The owner of this process's directory is its effective user.
    let me = std::fs::metadata("/proc/self").unwrap();
    // Root needs no user namespace, and may not be allowed one.
    let user = match std::os::unix::fs::MetadataExt::uid(&me) {
        0 => "",
        _ => "--user --map-root-user",
    };
    let server = Server::start(fabric, "", "").await;
    let wrapper = format!("unshare {user} --pid --fork --kill-child");
    calls(&server, fabric, &wrapper, "", own_path(fabric)).await;
}
