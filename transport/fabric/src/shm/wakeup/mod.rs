//! Waking the peer, and being woken.
//!
//! | module | what |
//! |---|---|
//! | `wait_flag` | the flag that tells the sender whether the receiver waits; checked with loom |
//! | `wake_page` | the page of two processes, which marks connections with messages; checked with loom |
//! | `event_fd` | the eventfds that two processes wait for and wake each other with |
//! | `channel` | eventfds and page, for all connections of two runtimes |
//! | `idle` | a channel that waits for its next connection |
//! | `channels` | the channels of this process, and the choice of a channel for each connection |
//! | `wake_cost` | how long wake-ups take, learnt from the wake-ups of a link |
//!
//! An end that waits states in its ring how the peer must wake it. The peer either sets the
//! connection's bit in the channel of the two processes, or sends a message on the socket, as
//! between strangers. An end without a channel can always wake its peer by a message, because a
//! waiting end also polls the socket.

pub(super) mod channel;
pub(super) mod channels;
pub(super) mod event_fd;
mod idle;
pub(super) mod wait_flag;
pub(super) mod wake_cost;
pub(super) mod wake_page;

use std::io;
use std::sync::Arc;
use std::task::{Context, Waker};

use tokio::runtime::Handle;

use crate::shm::socket::Socket;
use crate::shm::socket::wire::Message;
use crate::shm::wakeup::channel::{Poller, WakeChannel};
use crate::shm::wakeup::idle::IdleChannel;
use crate::shm::wakeup::wake_cost::monotonic;
use crate::shm::wakeup::wake_page::CAPACITY;

/// The value in the ring of an end that is to be woken by a message. The value n + 1 asks the peer
/// to set bit n of the wake-up page instead.
const BY_MESSAGE: u64 = u64::MAX;

/// A connection's place in a channel.
#[derive(Debug)]
pub(crate) struct ChannelMember {
    channel: Arc<WakeChannel>,
    connection: u16,
    /// The task to wake.
    task: Option<Waker>,
}

impl ChannelMember {
    /// Adds a connection to the channel. Returns `None` if the channel is full or has ended. Must
    /// be called within the channel's runtime.
    pub(crate) fn join(channel: &Arc<WakeChannel>) -> Option<ChannelMember> {
        let (connection, spawn) = channel.add()?;
        let member = ChannelMember { channel: channel.clone(), connection, task: None };
        if spawn {
            Handle::current().spawn(Poller::new(channel.clone()));
        }
        Some(member)
    }

    #[cfg(test)]
    fn channel(&self) -> &Arc<WakeChannel> {
        &self.channel
    }
}

impl Drop for ChannelMember {
    fn drop(&mut self) {
        if self.channel.remove(self.connection) {
            IdleChannel::wait(self.channel.clone());
        }
    }
}

/// The way in which an end of a connection is woken, and wakes its peer.
#[derive(Debug)]
pub(crate) enum Wakeup {
    Channel(ChannelMember),
    /// A message on the socket.
    Message,
}

impl Wakeup {
    /// Registers the task, so that the peer's wake-ups wake this task.
    ///
    /// # Errors
    /// The runtime has ended. `InvalidData` if the peer has broken the channel.
    #[inline]
    pub(crate) fn listen(&mut self, cx: &mut Context<'_>) -> io::Result<()> {
        let Wakeup::Channel(ChannelMember { channel, connection, task }) = self else {
            return Ok(());
        };
        if task.as_ref().is_none_or(|task| !task.will_wake(cx.waker())) {
            *task = Some(cx.waker().clone());
            channel.set_task(*connection, cx.waker());
        }
        match channel.has_ended() {
            true => Err(channel.why_ended()),
            false => Ok(()),
        }
    }

    /// The value that this end writes to its ring when it waits.
    #[inline]
    pub(crate) fn value(&self) -> u64 {
        match self {
            Wakeup::Channel(member) => u64::from(member.connection) + 1,
            Wakeup::Message => BY_MESSAGE,
        }
    }

    /// Wakes the channel's other connections that have received something, because their poller may
    /// have to wait while this connection runs. Call this function before this connection checks
    /// for messages, because the call also takes this connection's own wake-up.
    #[inline]
    pub(crate) fn wake_others(&self) {
        if let Wakeup::Channel(member) = self {
            member.channel.wake_others(member.connection);
        }
    }

    /// Wakes the peer, which has announced its wait with `value`. Returns whether the wake-up took
    /// a system call. `stamp` gets the time before the call. A failure is ignored, because the peer
    /// caused it: the peer leaves a full socket unread, or has emptied the counter of its eventfd.
    #[inline]
    pub(crate) fn wake(&self, value: u64, socket: &Socket, stamp: impl FnOnce(u64)) -> bool {
        if let Wakeup::Channel(member) = self
            && (1..=u64::from(CAPACITY)).contains(&value)
        {
            return member.channel.wake_peer((value - 1) as u16, stamp);
        }
        stamp(monotonic());
        let _ = socket.send(&Message::Wake.encode(), &[]);
        true
    }

    /// Closes the descriptor of the channel's page if the peer has used the page, because this end
    /// then no longer needs to send it.
    pub(crate) fn settle(&self) {
        if let Wakeup::Channel(member) = self {
            let _ = member.channel.settle();
        }
    }
}
