//! The task that takes a channel's bits while its runtime is busy with the connections of that
//! channel, so that the peer need not signal the eventfd.
//!
//! | the poller | event | next |
//! |---|---|---|
//! | Sleeps | the eventfd is signalled | Runs |
//! | Runs | a connection is woken, by the poller or by a connection's task | Runs, after the other tasks |
//! | Runs | no connection is woken for the [`LINGER`]th time | Sleeps, with the flag raised and no bits set |
//! | any | the channel has ended | Ended |
//! | any | the runtime ends | Ended, together with the channel |

use std::future::Future;
use std::pin::Pin;
use std::sync::Arc;
use std::task::{Context, Poll};

use crate::shm::wakeup::channel::WakeChannel;

/// The number of unsuccessful turns before the poller sleeps. Each turn comes after all other tasks
/// that can run.
pub(super) const LINGER: u32 = 2;

#[derive(Debug)]
pub(super) struct Poller {
    channel: Arc<WakeChannel>,
    /// The number of unsuccessful turns since a connection was last woken.
    in_vain: u32,
}

impl Poller {
    pub(super) fn new(channel: Arc<WakeChannel>) -> Poller {
        Poller { channel, in_vain: 0 }
    }
}

impl Future for Poller {
    type Output = ();

    fn poll(mut self: Pin<&mut Self>, cx: &mut Context<'_>) -> Poll<()> {
        let Poller { channel, in_vain } = &mut *self;
        channel.set_poller(cx.waker());
        if channel.has_ended() {
            return Poll::Ready(());
        }
        *in_vain = if channel.poll() { 0 } else { *in_vain + 1 };
        if *in_vain >= LINGER {
            *in_vain = 0;
            channel.inbound().raise();
            if channel.wake_tasks() == 0 {
                return Poll::Pending;
            }
            channel.inbound().lower();
        }
        cx.waker().wake_by_ref();
        Poll::Pending
    }
}

impl Drop for Poller {
    /// Ends the channel. A runtime that ends drops the poller, so the channel also ends with its
    /// runtime.
    fn drop(&mut self) {
        self.channel.end();
    }
}
