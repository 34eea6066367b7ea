//! Brings a link up. Firmware needs a long time for some of the calls, so these calls run on
//! threads that may block.
//!
//! | side | step of the queue pair | runs on |
//! |---|---|---|
//! | both | made, takes RECVs | a thread that may block |
//! | connecting | request sent | the task; over Soft-iWARP, a thread that may block |
//! | accepting | receives, sends; answer sent | a thread that may block |
//! | connecting, with the answer | receives, sends; the peer is told | a thread that may block |
//!
//! On InfiniBand and RoCE this process changes the states of the queue pair. If librdmacm changed
//! the states, it would do so on the thread that reads events. librdmacm before version 23 always
//! changes them. Over iWARP the kernel changes the states when it establishes the connection.
//!
//! A [`PendingLink`] is a link whose connection attempt has not succeeded yet. If the attempt fails
//! or is given up, the queue pair is destroyed on a separate thread. Firmware takes milliseconds to
//! destroy a queue pair, and Soft-iWARP waits up to 10 s for the answer to a connect request.

use std::io;
use std::mem::ManuallyDrop;
use std::net::SocketAddr;
use std::sync::Arc;

use rdma_sys::rdma_cm_event_type as kind;
use tonic_rdma_memory::Pool;

use crate::link_config::LinkConfig;
use crate::off_worker::{off_worker, run_on_thread};
use crate::verbs::cm::CmId;
use crate::verbs::context::DeviceContext;
use crate::verbs::link::{LinkNotMade, VerbsLink};
use crate::verbs::queue_pair::path_mtu::{self, MtuLimit, PathMtu, UnknownMtu};

impl VerbsLink {
    /// Calls [`new`](VerbsLink::new) on a thread that may block. An adapter takes milliseconds to
    /// make a queue pair, and a worker of the runtime would serve no other connection in that time.
    /// If the caller gives up, that thread drops the link.
    ///
    /// # Errors
    /// The errors of [`new`](VerbsLink::new), and of [`off_worker`].
    pub(super) async fn new_off_worker(
        device: &Arc<DeviceContext>,
        id: CmId,
        config: &LinkConfig,
        pool: &Pool,
        remote: SocketAddr,
    ) -> Result<VerbsLink, LinkNotMade> {
        let (owned, config, pool) = (device.clone(), config.clone(), pool.clone());
        let make = move || VerbsLink::new(&owned, id, &config, &pool, remote);
        match off_worker(make).await {
            Ok(made) => made,
            Err(error) => {
                let error = device.verb_error("rdma_create_qp", error).into();
                Err(LinkNotMade { id: None, error })
            }
        }
    }

    /// Sends the connect request. On Soft-iWARP the call blocks while TCP connects.
    pub(super) fn request(&self, private_data: &[u8], retries: u8) -> io::Result<()> {
        self.qp.id.connect(private_data, retries, self.qp.number())
    }

    /// The event that answers the request.
    pub(super) fn answer(&self) -> kind::Type {
        match self.qp.is_own {
            true => kind::RDMA_CM_EVENT_CONNECT_RESPONSE,
            false => kind::RDMA_CM_EVENT_ESTABLISHED,
        }
    }

    /// The path MTU that the answer names. Returns `None` if the answer names no path MTU, or if
    /// librdmacm or the kernel brings this queue pair up.
    ///
    /// # Errors
    /// No device has such a path MTU.
    pub(super) fn named_mtu(&self, answer: &[u8]) -> Result<Option<PathMtu>, UnknownMtu> {
        match self.qp.is_own {
            true => path_mtu::named(answer),
            false => Ok(None),
        }
    }

    /// Completes the connection after an answer that names this path MTU. Firmware changes the
    /// state of the queue pair, so the work runs on a thread that may block.
    ///
    /// # Errors
    /// The device refuses, or the connection is gone.
    pub(super) async fn complete_off_worker(
        mut self,
        named: Option<PathMtu>,
    ) -> io::Result<VerbsLink> {
        if !self.qp.is_own {
            return Ok(self);
        }
        let complete = move || {
            self.peer.path_mtu = self.qp.bring_up(MtuLimit::Named(named))?.map(PathMtu::bytes);
            self.qp.id.establish()?;
            Ok(self)
        };
        off_worker(complete).await?
    }

    /// Accepts the peer's request. Runs on a thread that may block, because firmware changes the
    /// state of the queue pair.
    ///
    /// # Errors
    /// The device refuses, or the connection is gone.
    pub(super) async fn accept_off_worker(
        mut self,
        private_data: Vec<u8>,
        retries: u8,
    ) -> io::Result<VerbsLink> {
        let accept = move || {
            let used = self.qp.bring_up(MtuLimit::OfPort)?;
            self.peer.path_mtu = used.map(PathMtu::bytes);
            let answer = match used {
                Some(mtu) => path_mtu::answer(&private_data, mtu),
                None => private_data,
            };
            self.qp.id.accept(&answer, retries, self.qp.number())?;
            Ok(self)
        };
        off_worker(accept).await?
    }
}

/// Owns a link until its connection attempt has succeeded.
pub(super) struct PendingLink {
    /// The link, until `into_link` or `drop` takes it.
    link: ManuallyDrop<VerbsLink>,
    /// The pool with the link's memory. `drop` trims the pool, because the attempt may have been
    /// its only user. The pool is taken together with the link.
    pool: Option<Pool>,
}

impl PendingLink {
    pub(super) fn new(link: VerbsLink, pool: &Pool) -> PendingLink {
        PendingLink { link: ManuallyDrop::new(link), pool: Some(pool.clone()) }
    }

    pub(super) fn link(&self) -> &VerbsLink {
        &self.link
    }

    pub(super) fn link_mut(&mut self) -> &mut VerbsLink {
        &mut self.link
    }

    /// Takes the link out.
    pub(super) fn into_link(self) -> VerbsLink {
        let mut this = ManuallyDrop::new(self);
        this.pool = None;
        // SAFETY: taken once: `this` is not dropped, and nothing else takes it.
        unsafe { ManuallyDrop::take(&mut this.link) }
    }
}

impl Drop for PendingLink {
    fn drop(&mut self) {
        // SAFETY: taken once: `into_link` keeps this from running.
        let link = unsafe { ManuallyDrop::take(&mut self.link) };
        let pool = self.pool.take();
        let end = move || {
            drop(link);
            // The pool is trimmed here, because perhaps no other connection trims the pool later.
            pool.inspect(Pool::trim_now);
        };
        // If no thread can be started, the closure is dropped here, together with the link.
        if let Err(error) = run_on_thread("rdma-destroy", end) {
            tracing::debug!(%error, "no thread to end a connection attempt");
        }
    }
}
