//! Waking the peer, and being woken.
//!
//! | module | what |
//! |---|---|
//! | `wait_flag` | the flag that tells the sender whether the receiver waits; checked with loom |
//! | `event_fd` | the eventfd that both ends wait for and wake each other with |
//! | `wake_cost` | how long wake-ups take, learnt from those of a link |

pub(super) mod event_fd;
pub(super) mod wait_flag;
pub(super) mod wake_cost;
