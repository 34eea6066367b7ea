//! Completion queues, which the queue pairs of a device share (R6).
//!
//! | module | what |
//! |---|---|
//! | `dispatch` | the state of one queue under its lock: inboxes, sleepers, armed completions |
//! | `channel` | the descriptor that announces completions |
//! | `async_events` | the descriptor that announces a queue that has failed |
//! | `cq` | a queue of the device |
//! | `shard` | the queues of a device in one runtime, their channel, and the reactor |
//! | `member` | the share of one queue pair in a queue |
//!
//! # Who polls
//!
//! The holder of a queue's lock polls the queue for all queue pairs on it. The holder keeps its own
//! completions and puts the completions of other queue pairs into their inboxes. There are two
//! kinds of pollers: links, whose drivers poll when they run, and the reactor, a task that waits
//! for the channel. So a driver that polls gets its messages directly. A message for a driver that
//! sleeps takes one more wake-up, of a task on the same thread.
//!
//! **A sleeping member misses no completion as long as the queue is armed for the completions that
//! wake the member, or the reactor is looking.** No step relies on the polls of another member,
//! because that member may be slow or never run again. All steps happen under the lock, and wakers
//! run after the lock is released:
//!
//! | step | who | queue before | queue afterwards |
//! |---|---|---|---|
//! | a member polls: its inbox, or else the queue until it is empty | its driver | any | the same; members with completions are awake |
//! | a member is to sleep | its driver | armed for its completions, or looking | the same; the member sleeps |
//! | a member is to sleep | its driver | armed for fewer completions, or not armed | armed, then drained; the member sleeps if no completion came for it |
//! | a sleeping member posts work that it waits for | any | armed for messages | armed for all completions |
//! | an event comes | reactor | armed | not armed, drained, and then as the next three lines |
//! | nobody sleeps any more | reactor | not armed | not armed: the next member that goes to sleep arms the queue |
//! | somebody sleeps | reactor | not armed | armed, then drained |
//! | somebody sleeps, and a member polls without sleeping | reactor | not armed | looking: that member takes the completions, so the reactor needs no event for them |
//! | the reactor looks again | reactor | looking | drained; armed when nobody has polled since, and somebody sleeps |
//! | a queue pair is made | its maker | any | drained first: completions with its number belong to an earlier queue pair |
//! | a queue pair is destroyed | its owner | any | drained: its own completions are dropped |
//! | a completion whose number is unknown | any poller | any | dropped |
//! | the runtime ends | reactor | any | orphaned: members wake, and poll without sleeping |
//! | the queue fails, or the device reports its failure | any poller, reactor | any | failed: members wake, and end with the error |
//!
//! A shared queue with one member costs the same as a private queue: an event and one poll, and the
//! queue is armed when the member goes to sleep.
//!
//! # A queue is never overrun
//!
//! A queue pair reserves an entry for each request that it may have posted, because all its
//! requests complete when it fails. If no queue has room for these entries, another queue is
//! created with twice the size, up to the limits of the device and of
//! [`LinkConfig::max_cq_entries`](crate::LinkConfig::max_cq_entries). A destroyed queue pair gives
//! its entries back once its completions have left the queue. If a queue nevertheless overruns, the
//! device reports the overrun (IBV_EVENT_CQ_ERR), and the connections on the queue end with that
//! error.

mod async_events;
mod channel;
mod cq;
pub(super) mod dispatch;
pub(super) mod member;
mod shard;
#[cfg(test)]
mod tests;
