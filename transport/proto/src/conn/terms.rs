//! What both sides have stated in their hellos.

use bytes::Bytes;

use super::types::SendError;
use crate::config::Config;
use crate::frame::{FRAME_HEADER, LENT_MESSAGE, MESSAGE_HEADER};
use crate::hello::PeerSettings;
use crate::payload::Payload;

/// The settings of both sides.
#[derive(Debug)]
pub(super) struct Terms {
    pub(super) own: Config,
    pub(super) peer: PeerSettings,
}

impl Terms {
    /// Maximum length in bytes of a piece that is sent eagerly.
    pub(super) fn eager_limit(&self) -> usize {
        self.peer.slot_size as usize - MESSAGE_HEADER - FRAME_HEADER
    }

    /// Whether a segment of the piece may be lent: it is aligned as the peer wants it where it
    /// lands, and the rest of the piece fits a message of a connection at rest, as the frame is not
    /// cut.
    pub(super) fn is_lendable(&self, payload: &Payload) -> bool {
        payload.lendable().is_some_and(|lendable| {
            let around = payload.len() - lendable.len();
            around + LENT_MESSAGE <= self.peer.rest_slot_size as usize
                && (lendable.as_ptr() as usize).is_multiple_of(self.peer.align.into())
                && u32::try_from(lendable.len()).is_ok()
        })
    }

    /// Checks the length of a header block against the peer's limit.
    ///
    /// # Errors
    /// [`SendError::HeadersTooLong`].
    pub(super) fn check_block(&self, block: &Bytes) -> Result<(), SendError> {
        let (len, limit) = (block.len(), self.peer.max_headers);
        if len > limit as usize { Err(SendError::HeadersTooLong { len, limit }) } else { Ok(()) }
    }
}
