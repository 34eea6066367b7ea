//! A wake-up channel that waits for its next connection.
//!
//! A program that connects for each call connects again soon, and then finds the channel, the
//! confirmed peer of the channel (`same_user`), and the runtime's kernel timer. Without these, such
//! a call took a third longer (`compare --rows connect`).
//!
//! | a channel | event | next |
//! |---|---|---|
//! | has connections | the last one ends | waits, with a task of its runtime |
//! | waits | a connection joins | has connections |
//! | waits | no connection has ended for a whole [`IDLE_TIME`] | Ended |
//! | waits | the runtime ends | Ended |
//! | has connections | the last one ends while [`MAX_IDLE`] channels wait | Ended |

use std::sync::Arc;
use std::sync::atomic::{AtomicUsize, Ordering};
use std::time::Duration;

use crate::shm::wakeup::channel::WakeChannel;
use crate::timer::Timer;

/// A channel without connections ends after this time, or after up to twice this time if further
/// connections have come and gone.
const IDLE_TIME: Duration = Duration::from_secs(1);
/// Maximum number of channels that wait. Each has a page and at most four descriptors.
const MAX_IDLE: usize = 8;
/// Number of [`IdleChannel`]s.
static IDLE: AtomicUsize = AtomicUsize::new(0);

/// Keeps a channel without connections. The channel ends when this value is dropped, unless it has
/// connections then.
#[derive(Debug)]
pub(super) struct IdleChannel(Arc<WakeChannel>);

impl IdleChannel {
    /// Keeps a channel until no connection has used it for [`IDLE_TIME`]. If too many channels
    /// wait, the channel ends at once.
    pub(super) fn wait(channel: Arc<WakeChannel>) {
        let runtime = channel.runtime().cloned();
        let idle = IdleChannel(channel);
        let waiting = IDLE.fetch_add(1, Ordering::Relaxed);
        let Some(runtime) = runtime.filter(|_| waiting < MAX_IDLE) else { return };
        let _entered = runtime.enter();
        let mut timer = Timer::new();
        // A runtime that has ended drops the task.
        runtime.spawn(async move {
            while idle.0.was_used() {
                timer.wait(IDLE_TIME).await;
            }
        });
    }
}

impl Drop for IdleChannel {
    fn drop(&mut self) {
        IDLE.fetch_sub(1, Ordering::Relaxed);
        self.0.end_if_idle();
    }
}

#[cfg(test)]
pub(super) mod tests {
    use super::*;
    use crate::shm::wakeup::ChannelMember;

    /// Lets the tests that count waiting channels run one at a time.
    static ALONE: tokio::sync::Mutex<()> = tokio::sync::Mutex::const_new(());

    /// Waits until a channel has ended.
    pub(in crate::shm::wakeup) async fn has_ended(channel: &WakeChannel) {
        let ended = async {
            while !channel.has_ended() {
                tokio::time::sleep(Duration::from_millis(5)).await;
            }
        };
        tokio::time::timeout(Duration::from_secs(20), ended).await.expect("the channel ends");
    }

    fn used() -> Arc<WakeChannel> {
        let channel = WakeChannel::make().unwrap();
        drop(ChannelMember::join(&channel).unwrap());
        channel
    }

    #[tokio::test]
    async fn a_channel_waits_for_its_next_connection_and_then_ends() {
        let _alone = ALONE.lock().await;
        let channel = used();
        assert!(!channel.has_ended());
        let member = ChannelMember::join(&channel).expect("it has waited");
        tokio::time::sleep(IDLE_TIME + IDLE_TIME / 2).await;
        assert!(!channel.has_ended(), "it has a connection");
        drop(member);
        assert!(!channel.has_ended(), "it waits again");
        has_ended(&channel).await;
        assert!(ChannelMember::join(&channel).is_none());
    }

    #[tokio::test]
    async fn few_channels_wait() {
        let _alone = ALONE.lock().await;
        let channels: Vec<_> = (0..3 * MAX_IDLE).map(|_| used()).collect();
        let waiting = channels.iter().filter(|channel| !channel.has_ended()).count();
        assert!((1..=MAX_IDLE).contains(&waiting), "{waiting}");
        for channel in &channels {
            has_ended(channel).await;
        }
    }

    #[test]
    fn a_channel_ends_with_its_runtime() {
        let runtime = || tokio::runtime::Builder::new_current_thread().enable_all().build();
        let mut channel = None;
        runtime().unwrap().block_on(async {
            let _alone = ALONE.lock().await;
            channel = Some(used());
            assert!(!channel.as_ref().unwrap().has_ended());
        });
        assert!(channel.unwrap().has_ended());
        // The runtime ends before the last connection.
        let member = runtime().unwrap().block_on(async {
            let channel = WakeChannel::make().unwrap();
            ChannelMember::join(&channel).unwrap()
        });
        let channel = member.channel().clone();
        drop(member);
        assert!(channel.has_ended());
    }
}
