//! Buffers that messages land in, used again and again. They are memory files, which peers of this
//! host can map.

use std::sync::{Arc, Mutex, PoisonError};

use anyhow::ensure;
use tonic_rdma::{LandIn, LandableBuf, Outcome};

use crate::contender::LandsIn;

/// Bytes from which on a message has a buffer.
pub(crate) const MIN: usize = 16 << 10;

/// With their lengths.
type Idle = Vec<(usize, LandIn<LandableBuf>)>;

/// Idle buffers.
#[derive(Clone, Debug)]
pub(crate) struct Buffers {
    lands_in: LandsIn,
    idle: Arc<Mutex<Idle>>,
}

impl Buffers {
    pub(crate) fn new(lands_in: LandsIn) -> Self {
        Self { lands_in, idle: Arc::default() }
    }

    /// A buffer for a message of this many bytes, if it is to have one, and the system has it.
    pub(crate) fn take(&self, len: usize) -> Option<LandIn<LandableBuf>> {
        if len < MIN {
            return None;
        }
        let mut idle = self.idle.lock().unwrap_or_else(PoisonError::into_inner);
        let fits = idle.iter().position(|(length, _)| *length == len);
        Some(match fits {
            Some(at) => idle.swap_remove(at).1,
            None => self.land_in(LandableBuf::zeroed(len).ok()?),
        })
    }

    fn land_in(&self, buffer: LandableBuf) -> LandIn<LandableBuf> {
        match self.lands_in {
            LandsIn::Once => LandIn::new(buffer),
            LandsIn::Kept => LandIn::new(buffer).keep_registered(),
        }
    }

    /// Waits until the buffer is back, for another message. Its field has been dropped.
    ///
    /// # Errors
    /// Nothing landed there.
    pub(crate) async fn put_back(
        &self,
        land_in: LandIn<LandableBuf>,
        len: usize,
    ) -> anyhow::Result<()> {
        let (outcome, land_in) = match self.lands_in {
            LandsIn::Kept => (land_in.outcome().await, land_in),
            LandsIn::Once => {
                let finished = land_in.finish().await?;
                (finished.outcome, self.land_in(finished.buffer))
            }
        };
        ensure!(matches!(outcome, Outcome::Landed { .. }), "it did not land: {outcome:?}");
        self.idle.lock().unwrap_or_else(PoisonError::into_inner).push((len, land_in));
        Ok(())
    }
}
