//! Answers to offered memory: TAKEN or DECLINED. A chunk that is mapped gets no answer.

use std::io;

use tonic_rdma_memory::throttled;

use super::ShmLink;
use crate::error::LinkError;
use crate::link::Shared;
use crate::shm::lend::borrower::TakenFile;
use crate::shm::memory::peer_map::OfferedMemory;
use crate::shm::socket::is_end;
use crate::shm::socket::wire::Message;

impl ShmLink {
    /// Records that the peer has mapped offered memory, or cannot map it.
    pub(super) fn answered(&mut self, key: u32, taken: bool) {
        if let Some(shared) = self.shared.get_mut(&key).filter(|_| !taken) {
            throttled!(warn, peer = %self.peer, "the peer cannot map landing memory of this end");
            *shared = Shared::No;
        }
        self.named.answered(key, taken);
        if let Some(lender) = &mut self.lender {
            lender.answered(key, taken);
        }
    }

    /// Answers an offer of lent memory. `taken` says whether the memory could be mapped.
    pub(super) fn answer_lent(
        &mut self,
        offered: OfferedMemory,
        taken: io::Result<TakenFile>,
    ) -> Result<(), LinkError> {
        let taken = match taken {
            Ok(taken) => {
                let borrower = self.borrower.get_or_insert_default();
                borrower.insert(offered, taken, &self.table).map_err(|what| self.breach(what))?;
                Ok(())
            }
            Err(error) => Err(error),
        };
        self.answer(offered.key, taken)
    }

    /// Tells the peer whether offered memory is mapped.
    pub(super) fn answer(&mut self, key: u32, taken: io::Result<()>) -> Result<(), LinkError> {
        let answer = match taken {
            Ok(()) => Message::Taken { key },
            Err(error) if error.kind() == io::ErrorKind::InvalidData => {
                return Err(self.breach(format!("memory that cannot be used: {error}")));
            }
            Err(error) => {
                tracing::debug!(%error, peer = %self.peer, "memory that a peer offers is not mapped");
                Message::Declined { key }
            }
        };
        match self.socket.send(&answer.encode(), &[]) {
            // Without an answer the peer continues to copy. If the peer has ended, a later poll
            // reports its end.
            Err(error) if error.kind() == io::ErrorKind::WouldBlock || is_end(&error) => Ok(()),
            sent => sent.map_err(|error| self.device_error("sendmsg", error)),
        }
    }
}
