//! Charges work to the turn of the task that does it (R20).
//!
//! tokio gives each turn of a task a budget of operations ([`tokio::task::coop`]). Each loop whose
//! length a peer or a device determines takes its operations from the budget of its task. When the
//! budget is spent, the task yields, and continues after the other tasks have run. An operation is
//! a work request, a completion, a message, or [`COPY_UNIT`] bytes that are copied or populated.

use std::future::poll_fn;
use std::task::{Context, Poll, ready};

use tokio::task::coop;

/// The number of bytes that are copied or populated as one operation.
pub const COPY_UNIT: usize = 64 << 10;

/// The number of operations that copying `len` bytes costs in addition to its request.
#[inline]
pub fn copies(len: usize) -> usize {
    len / COPY_UNIT
}

/// Takes `operations` from the turn's budget. `Pending` means that the budget is spent. The task is
/// then woken for its next turn, and `operations` holds the operations that are left.
#[inline]
pub fn charge(cx: &mut Context<'_>, operations: &mut usize) -> Poll<()> {
    while *operations > 0 {
        ready!(coop::poll_proceed(cx)).made_progress();
        *operations -= 1;
    }
    Poll::Ready(())
}

/// Takes operations from the budget of this turn and, if this budget is too small, of later turns.
pub async fn spend(mut operations: usize) {
    poll_fn(|cx| charge(cx, &mut operations)).await;
}

/// Whether the next [`spend`] of one operation ends the turn.
pub fn is_over() -> bool {
    !coop::has_budget_remaining()
}

#[cfg(test)]
mod tests {
    use super::*;

    #[tokio::test]
    async fn operations_end_a_turn_and_the_rest_is_kept() {
        // Begins a new turn with a full budget.
        tokio::task::yield_now().await;
        let (mut turns, mut left) = (Vec::new(), 1000);
        poll_fn(|cx| {
            let before = left;
            let result = charge(cx, &mut left);
            turns.push(before - left);
            result
        })
        .await;
        assert_eq!(turns.iter().sum::<usize>(), 1000);
        assert!(turns.len() > 5 && turns.iter().all(|turn| *turn <= 128), "{turns:?}");
    }

    #[test]
    fn copies_are_counted_by_whole_units() {
        assert_eq!([0, 1, COPY_UNIT - 1].map(copies), [0; 3]);
        assert_eq!([COPY_UNIT, 1 << 20].map(copies), [1, 16]);
    }
}
