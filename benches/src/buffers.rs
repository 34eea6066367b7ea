//! Reusable buffers for messages to land in. The buffers are memory files, which peers on this host
//! can map.

use std::sync::{Arc, Mutex, MutexGuard, PoisonError};

use anyhow::ensure;
use tonic_rdma::{LandIn, LandableBuf, Outcome};

use crate::contender::LandsIn;

/// Minimum length in bytes of a message that gets a buffer.
pub(crate) const MIN: usize = 16 << 10;

/// Buffers that wait for a message.
#[derive(Clone, Debug)]
pub(crate) struct Buffers {
    lands_in: LandsIn,
    state: Arc<Mutex<BufferState>>,
}

#[derive(Debug, Default)]
struct BufferState {
    /// The buffers that wait for a message, each with its length.
    idle: Vec<(usize, LandIn<LandableBuf>)>,
    /// The address of each buffer that was created.
    places: Vec<usize>,
}

impl Buffers {
    pub(crate) fn new(lands_in: LandsIn) -> Self {
        Self { lands_in, state: Arc::default() }
    }

    /// A buffer for a message of this many bytes. `None` if the message is too short, or the system
    /// has no memory.
    pub(crate) fn take(&self, len: usize) -> Option<LandIn<LandableBuf>> {
        if len < MIN {
            return None;
        }
        let mut state = self.state();
        if let Some(at) = state.idle.iter().position(|(length, _)| *length == len) {
            return Some(state.idle.swap_remove(at).1);
        }
        let buffer = LandableBuf::zeroed(len).ok()?;
        state.places.push(buffer.as_ptr().addr());
        Some(self.land_in(buffer))
    }

    fn state(&self) -> MutexGuard<'_, BufferState> {
        self.state.lock().unwrap_or_else(PoisonError::into_inner)
    }

    fn land_in(&self, buffer: LandableBuf) -> LandIn<LandableBuf> {
        match self.lands_in {
            LandsIn::Once => LandIn::new(buffer),
            LandsIn::Kept => LandIn::new(buffer).keep_registered(),
        }
    }

    /// Waits until the buffer is back, and keeps it for another message. The field that landed in
    /// the buffer had `len` bytes at the address `at`, and has been dropped.
    ///
    /// # Errors
    /// Nothing landed in the buffer, or the field did not lie at the beginning of a buffer.
    pub(crate) async fn put_back(
        &self,
        land_in: LandIn<LandableBuf>,
        len: usize,
        at: usize,
    ) -> anyhow::Result<()> {
        let (outcome, land_in) = match self.lands_in {
            LandsIn::Kept => (land_in.outcome().await, land_in),
            LandsIn::Once => {
                let finished = land_in.finish().await?;
                (finished.outcome, self.land_in(finished.buffer))
            }
        };
        ensure!(matches!(outcome, Outcome::Landed { .. }), "it did not land: {outcome:?}");
        let mut state = self.state();
        ensure!(state.places.contains(&at), "the landed data does not begin where a buffer begins");
        state.idle.push((len, land_in));
        Ok(())
    }
}
