//! Files that this end has offered to a link's peer for mapping, and the kinds of memory that each
//! end accepts. The peer may decline an offered file.
//!
//! | the file is | on | next |
//! |---|---|---|
//! | unknown to the peer | bytes in it are to be used | open: offered, with the descriptor |
//! | open | TAKEN: the peer has mapped it | taken |
//! | open | DECLINED: the peer cannot map it | declined |
//! | any of these | the file is gone | unknown: the peer is told, and unmaps it |

use std::collections::HashMap;

use crate::link_config::Takes;
use crate::shm::socket::wire::Message;

/// Maximum number of files of one kind that are offered on a link.
pub(crate) const MAX_FILES: usize = 512;
/// The maximum total size of these files in bytes. The files take the peer's address space, and
/// memory of the end that offers them.
pub(crate) const MAX_BYTES: u64 = 1 << 36;

/// The state of a file that was offered to the peer.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(crate) enum Offer {
    Open,
    Taken,
    Declined,
}

/// The files that were offered on one link, keyed by memory key.
#[derive(Debug, Default)]
pub(crate) struct Offers {
    files: HashMap<u32, (Offer, u64)>,
    /// The total size of the files in bytes.
    bytes: u64,
}

impl Offers {
    /// Returns the state of a file's offer, or `None` if the file was not offered.
    pub(crate) fn get(&self, key: u32) -> Option<Offer> {
        self.files.get(&key).map(|(offer, _)| *offer)
    }

    /// Whether one more file of this length in bytes may be offered.
    pub(crate) fn has_room(&self, len: u64) -> bool {
        self.files.len() < MAX_FILES && self.bytes.saturating_add(len) <= MAX_BYTES
    }

    /// Records that a file of this length was offered.
    pub(crate) fn add(&mut self, key: u32, len: u64) {
        self.files.insert(key, (Offer::Open, len));
        self.bytes += len;
    }

    /// Records that the peer has mapped a file, or cannot map the file. This end may have taken the
    /// file back since the offer.
    pub(crate) fn answered(&mut self, key: u32, taken: bool) {
        if let Some((offer, _)) = self.files.get_mut(&key).filter(|(o, _)| *o == Offer::Open) {
            *offer = if taken { Offer::Taken } else { Offer::Declined };
        }
    }

    /// Records that the file with this key is gone.
    pub(crate) fn take_back(&mut self, key: u32) {
        if let Some((_, len)) = self.files.remove(&key) {
            self.bytes -= len;
        }
    }
}

/// The memory that each end of a link accepts from the other, as the greetings have stated.
#[derive(Debug, Clone, Copy)]
pub(crate) struct Taken {
    pub(crate) own: Takes,
    pub(crate) peer: Takes,
}

impl Taken {
    /// Refuses memory of a kind that this end does not accept, and answers from a peer to which
    /// this end can have offered nothing (R22).
    ///
    /// # Errors
    /// A description of the breach, with the name of the setting that would allow the message.
    pub(crate) fn check(self, message: Message) -> Result<Message, String> {
        let (what, cure) = match message {
            Message::Lend { .. } | Message::Unlend { .. } if !self.own.lent => {
                ("it lends memory, which this end does not borrow", "ContextBuilder::borrowing")
            }
            Message::Name { .. } | Message::Unname { .. } if !self.own.named => (
                "it offers a buffer to write to, which this end does not map",
                "ContextBuilder::map_peer_buffers",
            ),
            // DECLINED is always allowed, because the peer may decline a chunk of landing memory
            // regardless of the other memory that the peer accepts.
            Message::Taken { .. } if self.peer == Takes::default() => {
                ("it answers an offer, and takes none", "ContextBuilder::borrowing at its end")
            }
            message => return Ok(message),
        };
        Err(format!("{what} (a setting: {cure})"))
    }
}
