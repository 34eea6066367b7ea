//! Waking the peer, and being woken.
//!
//! | module | what |
//! |---|---|
//! | `wait_flag` | the flag that tells the sender whether the receiver waits; checked with loom |
//! | `wake_page` | the page of two processes, which marks connections with messages; checked with loom |
//! | `event_fd` | the eventfds that two processes wait for and wake each other with |
//! | `channel` | eventfds and page, for all connections of two runtimes |
//! | `channel_name` | the name of a channel in a handshake |
//! | `poller` | the task that checks the page while the runtime is busy |
//! | `member` | a connection's place in a channel, and how its ends wake each other |
//! | `channels` | the channels of this process, and the choice of a channel for each connection |
//! | `wake_cost` | how long wake-ups take, learnt from the wake-ups of a link |

pub(super) mod channel;
pub(super) mod channel_name;
pub(super) mod channels;
pub(super) mod event_fd;
pub(super) mod member;
mod poller;
pub(super) mod wait_flag;
pub(super) mod wake_cost;
pub(super) mod wake_page;
