//! A child of fork(2) that does not execute another program. Objects that it creates work.
//! Inherited objects say that they belong to the parent, and the parent notices nothing. Calls of
//! the parent's other threads are in flight at each fork, so that any lock may be held.

#![cfg(target_os = "linux")]
#![allow(clippy::unwrap_used, reason = "a failed unwrap is a failed test")]

#[path = "../common/mod.rs"]
mod common;

use std::future::{Future as _, poll_fn};
use std::net::SocketAddr;
use std::sync::Arc;
use std::sync::atomic::AtomicBool;
use std::sync::atomic::Ordering::Relaxed;
use std::task::Poll;
use std::time::Duration;

use bytes::Bytes;
use common::{Blob, Client, Fabric, LIMIT, Which, World, calls, pattern, pooled};
use tokio::runtime::Runtime;
use tonic::Code;
use tonic_rdma::{Context, Endpoint, FabricKind, Path, Policy, ReasonCode};
use tonic_rdma_memory::test_util::process::{Child, fork, limit_file_size};

const MIB: usize = 1 << 20;
/// Time limit of a child's work.
const TIMEOUT: Duration = Duration::from_secs(60);

/// Runs a future in a new runtime on a new thread, because this thread may belong to a runtime.
fn run<T: Send>(future: impl Future<Output = T> + Send) -> T {
    std::thread::scope(|scope| {
        let run = || {
            let runtime = Runtime::new().unwrap();
            let done = runtime.block_on(async { tokio::time::timeout(TIMEOUT, future).await });
            runtime.shutdown_background();
            done.unwrap()
        };
        scope.spawn(run).join().unwrap()
    })
}

fn child(run: impl FnOnce()) -> Child {
    fork(run).unwrap()
}

/// An endpoint for shared memory, with time for a busy machine.
fn endpoint(addr: SocketAddr) -> Endpoint {
    let endpoint = Endpoint::from_shared(format!("http://{addr}")).unwrap();
    endpoint.fabrics([FabricKind::Shm]).fast_path_timeout(Duration::from_secs(20))
}

fn required(addr: SocketAddr) -> Endpoint {
    endpoint(addr).policy(Policy::Require)
}

/// A parent with a server, a channel, and continuous calls.
struct Parent {
    runtime: Runtime,
    world: Arc<World>,
    stop: Arc<AtomicBool>,
    tasks: Vec<tokio::task::JoinHandle<u64>>,
}

impl Parent {
    fn new() -> Parent {
        let runtime = Runtime::new().unwrap();
        let world = Arc::new(runtime.block_on(World::new(Fabric::Shm, Which::Ours)));
        let stop = Arc::new(AtomicBool::new(false));
        let tasks = (0..2).map(|_| {
            let (world, stop) = (world.clone(), stop.clone());
            runtime.spawn(async move {
                let mut n = 0;
                while !stop.load(Relaxed) {
                    calls(world.channel.clone()).await;
                    n += 1;
                }
                n
            })
        });
        let tasks = tasks.collect();
        Parent { runtime, world, stop, tasks }
    }

    /// Checks that all the parent's calls have succeeded, on the parent's first connection.
    fn ends_well(self) {
        let Parent { runtime, world, stop, tasks } = self;
        runtime.block_on(async {
            calls(world.channel.clone()).await;
            stop.store(true, Relaxed);
            for task in tasks {
                assert!(task.await.unwrap() > 0);
            }
        });
        let stats = world.channel.stats();
        assert_eq!((stats.connections, stats.calls_tcp), (1, 0), "the parent has lost its path");
        runtime.shutdown_background();
    }
}

#[test]
fn channels_and_servers_of_a_child_work_over_shared_memory() {
    let parent = Parent::new();
    // Fork several times, so that some fork happens while a lock is held.
    for _ in 0..5 {
        let addr = parent.world.addr;
        let child = child(|| {
            run(async {
                let channel = required(addr).connect().await.unwrap();
                assert_eq!(channel.path().path, Path::Shm);
                calls(channel).await;
                // Make a server, and a channel to it.
                let world = World::new(Fabric::Shm, Which::Ours).await;
                calls(world.channel.clone()).await;
            });
        });
        assert!(child.wait().unwrap());
    }
    parent.ends_well();
}

#[test]
fn what_a_child_inherited_fails_by_name_and_is_left_alone() {
    let parent = Parent::new();
    let world = &parent.world;
    let channel = runtime_of(&parent, world.connect());
    let mut client = Client::new(channel.clone(), Which::Ours, LIMIT);
    let data = Blob::of(Bytes::from(pattern(MIB, 1)));
    let (received, stream, pooled) = runtime_of(&parent, async {
        let received = client.echo(data.clone()).await.unwrap();
        let stream = client.down(Blob { number: 64, ..data.clone() }).await.unwrap();
        (received, stream, pooled(&channel, MIB, 5).await)
    });
    // Begin a call that ends with its request.
    let (end, ended) = tokio::sync::oneshot::channel();
    let request = futures_util::stream::once(async { ended.await.unwrap() });
    let mut caller = Client::new(channel.clone(), Which::Ours, LIMIT);
    let mut call = Box::pin(async move { caller.up(request).await });
    runtime_of(&parent, async {
        let began = poll_fn(|cx| Poll::Ready(call.as_mut().poll(cx)));
        assert!(began.await.is_pending());
    });
    let (watch, of_server) = (channel.observer(), world.observer.clone());
    assert_eq!(watch.connections().unwrap().len(), 1);
    assert!(of_server.connections(0, 10).unwrap().len() > 2);
    let mut inherited = Some((channel.clone(), received.clone(), stream, call, pooled.clone()));
    for _ in 0..5 {
        let child = child(|| {
            let (channel, received, mut stream, call, pooled) = inherited.take().unwrap();
            run(async {
                let path = channel.path();
                assert_eq!(
                    (path.path, path.reason.unwrap().code()),
                    (Path::Tcp, ReasonCode::Forked)
                );
                assert!(channel.connections().is_empty() && channel.observer().path().is_none());
                assert_eq!((watch.path(), watch.stats(), watch.connections()), (None, None, None));
                assert_eq!((of_server.connections(0, 10), of_server.stats()), (None, None));
                let mut client = Client::new(channel.clone(), Which::Ours, LIMIT);
                for len in [10, MIB] {
                    let blob = Blob::of(Bytes::from(pattern(len, 1)));
                    let status = client.echo(blob).await.unwrap_err();
                    assert_eq!(status.code(), Code::Unavailable);
                    assert!(status.message().contains("fork"), "{status}");
                }
                let status = stream.message().await.unwrap_err();
                assert!(status.message().contains("fork"), "{status}");
                let status = call.await.unwrap_err();
                assert_eq!(status.code(), Code::Unavailable);
                assert!(status.message().contains("fork"), "{status}");
                let error = channel.pool().alloc(100).await.unwrap_err();
                assert!(error.to_string().contains("fork"), "{error}");
                // Drop all that the child has inherited. The parent still has its own copies.
                drop((client, channel, received, stream, pooled));
            });
        });
        assert!(child.wait().unwrap());
    }
    // The parent's own data is intact.
    assert!(received.data == data.data && pooled == pattern(MIB, 5));
    runtime_of(&parent, calls(channel.clone()));
    let (_, _, mut stream, call, _) = inherited.unwrap();
    runtime_of(&parent, async {
        for _ in 0..64 {
            assert!(stream.message().await.unwrap().unwrap().data == data.data);
        }
        assert!(stream.message().await.unwrap().is_none());
        end.send(Blob::of(Bytes::from_static(b"last"))).unwrap();
        call.await.unwrap();
    });
    assert_eq!((channel.stats().connections, channel.stats().calls_tcp), (1, 0));
    parent.ends_well();
}

fn runtime_of<T>(parent: &Parent, future: impl Future<Output = T>) -> T {
    parent.runtime.block_on(future)
}

/// A context has settings and a state. A child keeps the settings, and endpoints with this context
/// work.
#[test]
fn a_context_and_an_endpoint_of_the_parent_serve_a_child() {
    let parent = Parent::new();
    let context =
        Context::builder().pool(tonic_rdma::PoolConfig::default().total(16 * MIB)).build();
    let endpoint = endpoint(parent.world.addr).context(context.clone()).policy(Policy::Require);
    runtime_of(&parent, async { calls(endpoint.connect().await.unwrap()).await });
    let child = child(|| {
        run(async {
            assert!(context.pool_stats().await.is_empty(), "the parent's pools");
            calls(endpoint.connect().await.unwrap()).await;
            assert_eq!(context.pool_stats().await.len(), 1);
        });
    });
    assert!(child.wait().unwrap());
    assert_eq!(runtime_of(&parent, context.pool_stats()).len(), 1);
    parent.ends_well();
}

/// A handler may fork. Its thread belongs to the parent's runtime.
#[test]
fn a_task_may_fork() {
    let parent = Parent::new();
    let addr = parent.world.addr;
    let forked = parent.runtime.spawn(async move {
        let child = child(|| {
            run(async {
                calls(required(addr).connect().await.unwrap()).await;
            });
        });
        tokio::task::spawn_blocking(|| child.wait().unwrap()).await.unwrap()
    });
    assert!(runtime_of(&parent, forked).unwrap());
    parent.ends_well();
}

/// The child continues to serve after its parent has ended.
#[test]
fn a_child_that_outlives_its_parent_works() {
    let server = Parent::new();
    let addr = server.world.addr;
    let (mut read, write) = std::io::pipe().unwrap();
    let middle = child(|| {
        run(async {
            let world = World::new(Fabric::Shm, Which::Ours).await;
            calls(world.channel.clone()).await;
            let (inherited, middle) = (world.channel.clone(), std::process::id());
            let orphan = child(|| {
                drop(inherited);
                // Wait until the parent has ended.
                while std::os::unix::process::parent_id() == middle {
                    std::thread::sleep(Duration::from_millis(5));
                }
                run(async {
                    calls(required(addr).connect().await.unwrap()).await;
                });
                std::io::Write::write_all(&mut &write, b"well").unwrap();
            });
            assert!(orphan.id() > 0);
        });
    });
    assert!(middle.wait().unwrap());
    drop(write);
    let mut said = String::new();
    std::io::Read::read_to_string(&mut read, &mut said).unwrap();
    assert_eq!(said, "well");
    server.ends_well();
}

/// If rdma-core is installed, RDMA belongs to the parent, which has asked for RDMA first.
#[test]
fn a_child_uses_tcp_in_place_of_its_parents_rdma() {
    let parent = Parent::new();
    let endpoint = endpoint(parent.world.addr).fabrics([FabricKind::Verbs]);
    let channel = runtime_of(&parent, endpoint.connect()).unwrap();
    let of_parent = channel.path().reason.unwrap().code();
    let child = child(|| {
        run(async {
            let channel = endpoint.connect().await.unwrap();
            let expected = match of_parent {
                // Without rdma-core, the parent owns nothing.
                ReasonCode::NoRdmaCore => ReasonCode::NoRdmaCore,
                _ => ReasonCode::Forked,
            };
            assert_eq!(channel.path().reason.unwrap().code(), expected);
            calls(channel).await;
        });
    });
    assert!(child.wait().unwrap());
    parent.ends_well();
}

/// If RLIMIT_FSIZE is too low at either end, calls go over TCP with the reason `memory-files`, and
/// no process ends.
#[test]
fn a_limit_on_files_is_a_reason_for_tcp_at_either_end() {
    let parent = Parent::new();
    let addr = parent.world.addr;
    for limit in [MIB as u64, 4096, 0] {
        let client = child(|| {
            limit_file_size(limit).unwrap();
            run(async {
                let channel = endpoint(addr).connect().await.unwrap();
                let reason = channel.path().reason.unwrap();
                assert_eq!(reason.code(), ReasonCode::MemoryFiles, "{reason}");
                assert!(reason.to_string().contains("RLIMIT_FSIZE"), "{reason}");
                calls(channel).await;
            });
        });
        assert!(client.wait().unwrap(), "client with {limit} bytes");
        let both = child(|| {
            limit_file_size(limit).unwrap();
            run(async {
                let world = World::optional(Which::Ours).await;
                let path = world.channel.path();
                match path.reason {
                    // The pool's chunks are no longer than the limit, and longer messages land in
                    // parts.
                    None => assert_eq!((path.path, limit), (Path::Shm, MIB as u64)),
                    Some(reason) => assert_eq!(reason.code(), ReasonCode::MemoryFiles, "{reason}"),
                }
                calls(world.channel.clone()).await;
                assert!(limit < MIB as u64 || world.channel.stats().calls_tcp == 0);
            });
        });
        assert!(both.wait().unwrap(), "both ends with {limit} bytes");
    }
    parent.ends_well();
}
