//! A listening socket, and a running server of the scripted service.

use std::future::Future;
use std::net::SocketAddr;
use std::pin::Pin;

use tokio::sync::oneshot;
use tokio::task::JoinHandle;
use tonic::transport::server::TcpIncoming;

use crate::channel::BoxError;
use crate::harness::remote::Remote;

/// A bound socket, which is not served yet.
#[derive(Debug)]
pub struct Listening {
    /// The address to which clients connect.
    pub addr: SocketAddr,
    /// The socket from which the server accepts.
    pub incoming: TcpIncoming,
}

/// Ends when the sender of [`stop`] is used or dropped. All servers share this type, because for
/// each type of signal the compiler would compile tonic's and hyper's servers again.
pub type Stopped = Pin<Box<dyn Future<Output = ()> + Send>>;

/// The two ends of the signal that stops a server.
pub fn stop() -> (oneshot::Sender<()>, Stopped) {
    let (stop, stopped) = oneshot::channel();
    let stopped = async move {
        let _ = stopped.await;
    };
    (stop, Box::pin(stopped))
}

/// A running server. Dropping it aborts it.
#[derive(Debug)]
pub struct Server {
    addr: SocketAddr,
    running: Running,
}

#[derive(Debug)]
enum Running {
    InProcess { stop: Option<oneshot::Sender<()>>, task: JoinHandle<Result<(), BoxError>> },
    Remote(Remote),
}

impl Server {
    /// A server that runs in a separate process and listens at `addr`.
    pub(super) fn remote(addr: SocketAddr, remote: Remote) -> Self {
        Self { addr, running: Running::Remote(remote) }
    }

    /// Runs `serving`, which ends gracefully when the sender is used or dropped.
    pub fn spawn<F, E>(addr: SocketAddr, stop: oneshot::Sender<()>, serving: F) -> Self
    where
        F: Future<Output = Result<(), E>> + Send + 'static,
        E: Into<BoxError>,
    {
        let task = tokio::spawn(async move { serving.await.map_err(Into::into) });
        Self { addr, running: Running::InProcess { stop: Some(stop), task } }
    }

    /// The address to which clients connect.
    pub fn addr(&self) -> SocketAddr {
        self.addr
    }

    /// The server's address as a URI.
    pub fn uri(&self) -> String {
        format!("http://{}", self.addr)
    }

    /// Starts a graceful shutdown.
    pub fn stop(&mut self) {
        match &mut self.running {
            Running::InProcess { stop, .. } => drop(stop.take()),
            Running::Remote(remote) => remote.stop(),
        }
    }

    /// The server's process, if it is a separate one.
    pub fn process(&self) -> Option<Remote> {
        match &self.running {
            Running::InProcess { .. } => None,
            Running::Remote(remote) => Some(remote.clone()),
        }
    }

    /// Waits until the server has ended.
    pub async fn ended(mut self) {
        match &mut self.running {
            Running::InProcess { task, .. } => task.await.unwrap().unwrap(),
            Running::Remote(remote) => remote.ended().await,
        }
    }
}

impl Drop for Server {
    fn drop(&mut self) {
        match &self.running {
            Running::InProcess { task, .. } => task.abort(),
            Running::Remote(remote) => remote.abort(),
        }
    }
}
