//! Messages whose longest field lands in an application buffer (`LandIn`).
//!
//! The deframer of a body whose first message is [gathered](message::Gather) passes a placeholder
//! for that message to the decoder. [`message`] holds the message while it is received, and decodes
//! it.

pub(super) mod message;

use std::sync::Arc;
use std::sync::atomic::Ordering::Relaxed;

use bytes::{BufMut, Bytes};
use tonic_rdma_memory::Landed;

use crate::deframer::{At, Deframer, Part};
use crate::land_in::{Claimed, WhyEmpty};
use crate::methods::{Method, Used};
use crate::named::message::{Gather, Gathered, NamedMessage};
use crate::placeholder::{self, HEADER};

impl Deframer {
    /// Creates a deframer for a body whose first message has a buffer to land in.
    pub fn gathering(method: Arc<Method>, messages: bool, claimed: Arc<Claimed>) -> Self {
        let mut deframer = Deframer::new(method, messages);
        deframer.gather = Some(Box::new(Gather { claimed, parts: Vec::new(), begun: false }));
        deframer
    }

    /// Bytes copied to the buffer since the function was last called.
    pub fn take_named(&self) -> u64 {
        self.gathered.copied.as_ref().map_or(0, |copied| copied.swap(0, Relaxed))
    }

    /// Returns true once, when the rest of the body can no longer land in the buffer.
    pub fn lets_go(&mut self) -> bool {
        std::mem::take(&mut self.gathered.lets_go)
    }

    /// Like [`pop`](Self::pop), but for a message that is being gathered. Returns the outer `None`
    /// if no message is being gathered.
    pub fn pop_gathered(&mut self) -> Option<Option<Bytes>> {
        if self.used != Used::Ours {
            if self.part.len() > 0
                && let Some(gather) = self.gather.take()
            {
                gather.claimed.stays_empty(WhyEmpty::Codec);
                self.gathered.lets_go = true;
            }
            return None;
        }
        loop {
            let gather = self.gather.as_mut()?;
            match self.at {
                At::Through | At::InPlace | At::Whole(_) | At::Message { .. } => return None,
                // Do not gather a message whose header was begun before the codec was known.
                At::Header(_, 1..) if !gather.begun => return None,
                At::Header(mut header, got) => {
                    let len = (HEADER - got).min(self.part.len());
                    if len == 0 {
                        return Some(None);
                    }
                    split(&mut self.part, len).copy_to(&mut header[got..got + len]);
                    self.at = At::Header(header, got + len);
                    gather.begun = got + len < HEADER;
                    if gather.begun {
                        continue;
                    }
                    let Some((0, len)) = placeholder::read_header(&header) else {
                        // Do not gather a compressed message: tonic joins its parts, or reports
                        // that it cannot decompress it.
                        self.at.pass(0);
                        self.delivered.plain += HEADER as u64;
                        return Some(Some(Bytes::copy_from_slice(&header)));
                    };
                    // Pad the placeholder, because tonic checks the length as soon as it has the
                    // header.
                    let fill = self.padding(len);
                    self.at = At::Gather { left: len, fill };
                    self.share.put_slice(&placeholder::header((placeholder::LEN + fill) as u32));
                    return Some(Some(self.share.split().freeze()));
                }
                At::Gather { left, fill } => {
                    let len = left.min(self.part.len());
                    if len < left && len == 0 {
                        return Some(None);
                    }
                    let part = split(&mut self.part, len);
                    gather.push(part);
                    self.at = At::Gather { left: left - len, fill };
                    if len == left {
                        self.at = At::NEXT;
                        let Gather { claimed, parts, .. } = *self.gather.take()?;
                        self.gathered = Gathered { copied: Some(claimed.copied()), lets_go: true };
                        let message = NamedMessage { parts, claimed };
                        return Some(Some(self.keep(message.into(), fill)));
                    }
                }
            }
        }
    }
}

/// Takes the first bytes of a part.
fn split(part: &mut Part, len: usize) -> Landed {
    match part {
        Part::Eager(bytes) => bytes.split_to(len).into(),
        Part::Landed(landed) => landed.split_to(len),
        // Lent pieces of a gathered message have been split into parts of the other kinds.
        Part::Lent(_) => Landed::default(),
    }
}
