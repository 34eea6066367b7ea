//! Returns landing memory above the connection's share while another connection waits.
//!
//! Chunks that are chosen for return are not granted any more. If the peer is fast, data in flight
//! lands within [`DRAIN`] and the readers free its memory. Then the remaining grants are recalled.
//! The protocol ends the connection of a peer that keeps recalled grants while others wait
//! ([`Connection::recall_grants`](tonic_rdma_proto::Connection::recall_grants)).
//!
//! | the delay | on | next |
//! |---|---|---|
//! | Idle | chunks are chosen to go back | Running |
//! | Running | [`DRAIN`] has passed | Over: the chunks' grants are recalled |
//! | Over | more chunks are chosen | Running |
//! | any | none is chosen | Idle |

use std::time::Duration;

use tonic_rdma_memory::Reclaim;

use crate::connection::delay::Delay;

/// Time for data in flight to land before grants are recalled. At 3 Gb/s and more, 16 MiB land
/// within this time.
const DRAIN: Duration = Duration::from_millis(50);

/// The delay of the module's table. In the state Over, the grants have been recalled.
#[derive(Debug, Default)]
pub(crate) struct ReclaimDelay(pub(crate) Delay);

impl ReclaimDelay {
    /// Starts the delay if chunks were chosen for return, and resets the delay if no chunk was
    /// chosen.
    #[inline]
    pub(crate) fn chosen(&mut self, reclaim: Reclaim) {
        match reclaim {
            Reclaim::None => self.0.reset(),
            Reclaim::Pending if self.0.is_over() => {}
            Reclaim::Pending | Reclaim::New if self.0.deadline().is_some() => {}
            Reclaim::Pending | Reclaim::New => self.0.begin(DRAIN),
        }
    }
}

#[cfg(test)]
mod tests {
    use tokio::time::Instant;

    use super::*;

    /// Goes through the table.
    #[tokio::test(start_paused = true)]
    async fn it_drains_then_asks() {
        let mut state = ReclaimDelay::default();
        state.chosen(Reclaim::None);
        assert!(state.0.is_idle() && state.0.deadline().is_none() && !state.0.has_new_deadline());
        for reclaim in [Reclaim::New, Reclaim::Pending] {
            state.chosen(reclaim);
            let until = state.0.deadline().unwrap();
            assert_eq!(until, Instant::now() + DRAIN);
            assert!(state.0.has_new_deadline() && !state.0.has_new_deadline());
            tokio::time::advance(DRAIN / 2).await;
            for reclaim in [Reclaim::New, Reclaim::Pending] {
                state.chosen(reclaim);
                assert_eq!(state.0.deadline(), Some(until), "it is not put off");
            }
            assert!(!state.0.expire(Instant::now()));
            tokio::time::advance(DRAIN / 2).await;
            assert!(state.0.expire(Instant::now()) && !state.0.expire(Instant::now()), "once");
            state.chosen(Reclaim::Pending);
            assert!(!state.0.is_idle() && state.0.deadline().is_none());
            state.chosen(Reclaim::New);
            assert!(state.0.deadline().is_some());
            state.chosen(Reclaim::None);
            assert!(state.0.is_idle());
        }
    }
}
