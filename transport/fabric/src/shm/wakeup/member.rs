//! How the ends of a connection wake each other.
//!
//! An end that waits says in its ring how it is to be woken: by the bit of its connection in the
//! channel of the two processes, or by a message on the socket, as strangers are. An end without a
//! channel wakes its peer by any message, because a waiting end also polls the socket.

use std::io;
use std::sync::Arc;
use std::task::{Context, Waker};

use tokio::runtime::Handle;

use crate::shm::socket::seqpacket::Socket;
use crate::shm::socket::wire::Message;
use crate::shm::wakeup::channel::WakeChannel;
use crate::shm::wakeup::poller::Poller;
use crate::shm::wakeup::wake_cost::monotonic;
use crate::shm::wakeup::wake_page::CAPACITY;

/// In the ring of an end that waits: it is to be woken by a message. Numbers from 1 stand for the
/// bits from 0.
const BY_MESSAGE: u64 = u64::MAX;

/// A connection's place in a channel.
#[derive(Debug)]
pub(crate) struct Member {
    channel: Arc<WakeChannel>,
    connection: u16,
    /// The task that is woken.
    task: Option<Waker>,
}

impl Member {
    /// Adds a connection to the channel. `None` when it is full, or has ended. Must be called
    /// within the channel's runtime.
    pub(crate) fn join(channel: &Arc<WakeChannel>) -> Option<Member> {
        let (connection, spawn) = channel.add()?;
        let member = Member { channel: channel.clone(), connection, task: None };
        if spawn {
            Handle::current().spawn(Poller::new(channel.clone()));
        }
        Some(member)
    }
}

impl Drop for Member {
    fn drop(&mut self) {
        self.channel.remove(self.connection);
    }
}

/// How an end of a connection is woken, and wakes its peer.
#[derive(Debug)]
pub(crate) enum Wakeup {
    Channel(Member),
    /// A message on the socket.
    Message,
}

impl Wakeup {
    /// Registers the task, so that the peer's wake-ups wake it.
    ///
    /// # Errors
    /// The runtime has ended. `InvalidData`: the peer has broken the channel.
    #[inline]
    pub(crate) fn listen(&mut self, cx: &mut Context<'_>) -> io::Result<()> {
        let Wakeup::Channel(Member { channel, connection, task }) = self else { return Ok(()) };
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

    /// Wakes the other connections that have been sent something: this one runs, and their poller
    /// may have to wait. To be called before this one checks for messages, as its own wake-up is
    /// taken too.
    #[inline]
    pub(crate) fn wake_others(&self) {
        if let Wakeup::Channel(member) = self {
            member.channel.wake_others(member.connection);
        }
    }

    /// Wakes the peer, which waits and says `value`. True if that took a system call; `stamp` comes
    /// before it, and gets the time. Whether it fails does not matter: the peer has then left a
    /// full socket unread, or has emptied the counter of its eventfd.
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

    /// Gives back what is not needed once the peer has all that it was sent.
    pub(crate) fn settle(&self) {
        if let Wakeup::Channel(member) = self {
            let _ = member.channel.settle();
        }
    }
}
