//! SENDs and WRITEs over a link, without the protocol and without calls. The speed of such a
//! connection is the upper bound for any transport over the link. `rpc-demo doctor --peer` and the
//! benchmarks measure this speed.
//!
//! Both ends make their link with [`config`]. The accepting end [serves](serve). The connecting end
//! [opens](Bare::open) the connection and measures.

mod end;
mod message;
#[cfg(test)]
mod tests;

pub use self::end::{BareLimits, MAX_ECHOES, config};
pub use self::message::BareError;

use tonic_rdma_memory::Pool;

use crate::bare::end::BareEnd;
use crate::bare::message::{BareMessage, Writes};
#[cfg(doc)]
use crate::error::LinkError;
use crate::provider::AnyLink;

/// Serves the connecting end until that end closes the connection. Echoes its SENDs, grants memory
/// for its WRITEs, and WRITEs to memory that the connecting end has granted. Memory that is granted
/// to the connecting end is never read.
///
/// # Errors
/// The function always returns an error, the reason why the connection ended. The error is
/// [`LinkError::Disconnected`] if the peer has closed the connection.
///
/// # Cancel safety
/// Dropping the future ends the connection.
pub async fn serve(link: AnyLink, pool: Pool, limits: BareLimits) -> Result<(), BareError> {
    let mut end = BareEnd::new(link, pool, limits);
    loop {
        match end.receive().await? {
            BareMessage::Echo => end.send_back().await?,
            places @ BareMessage::Places(_) if end.has_granted() => {
                return Err(places.instead_of("echo or write, because places were granted before"));
            }
            BareMessage::Places(places) => {
                end.set_places(places);
                // The places are as long as the peer's places, so both ends can do the same WRITEs.
                end.send_places(end.longest_place()).await?;
            }
            BareMessage::Write(writes) => {
                let wanted = u64::from(writes.len) * u64::from(writes.count);
                if wanted > limits.requested {
                    return Err(BareError::TooMuch { wanted, limit: limits.requested });
                }
                if writes.len as usize > limits.place_len {
                    let (len, limit) = (writes.len, limits.place_len);
                    return Err(BareError::LongWrites { len, limit });
                }
                if u64::from(writes.count) > limits.requested_writes {
                    let (wanted, limit) = (writes.count, limits.requested_writes);
                    return Err(BareError::TooMany { wanted, limit });
                }
                end.write(writes).await?;
                end.send_written().await?;
            }
            message => return Err(message.instead_of("echo, places or write")),
        }
    }
}

/// The connecting end.
///
/// The futures of its methods are not cancel safe. Dropping such a future leaves work in flight,
/// and the connection must then be dropped.
#[derive(Debug)]
pub struct Bare {
    end: BareEnd,
    granted: usize,
    limits: BareLimits,
}

impl Bare {
    /// Exchanges places for WRITEs with the other end.
    ///
    /// # Errors
    /// The link fails, memory cannot be registered, or the other end does not serve.
    pub async fn open(link: AnyLink, pool: Pool, limits: BareLimits) -> Result<Self, BareError> {
        let mut end = BareEnd::new(link, pool, limits);
        end.send_places(limits.place_len).await?;
        match end.receive().await? {
            BareMessage::Places(places) => end.set_places(places),
            message => return Err(message.instead_of("places")),
        }
        let granted = end.granted();
        Ok(Self { end, granted, limits })
    }

    /// The length in bytes of the longest WRITE for which both ends have room.
    pub fn longest(&self) -> usize {
        self.end.longest_place().min(self.granted)
    }

    /// SENDs `count` messages of `len` bytes, which the other end echoes. Up to `in_flight`
    /// messages are in flight at a time, but never more than [`MAX_ECHOES`]. Returns when all
    /// echoes have arrived.
    ///
    /// # Errors
    /// The link fails.
    pub async fn echo(
        &mut self,
        len: usize,
        count: usize,
        in_flight: usize,
    ) -> Result<(), BareError> {
        let in_flight = in_flight.clamp(1, MAX_ECHOES);
        let (mut sent, mut back) = (0, 0);
        while back < count {
            while sent < count && sent - back < in_flight {
                self.end.send_echo(len).await?;
                sent += 1;
            }
            match self.end.receive().await? {
                BareMessage::Echo => back += 1,
                message => return Err(message.instead_of("echo")),
            }
        }
        Ok(())
    }

    /// WRITEs `len` bytes `count` times to the other end, with up to `in_flight` WRITEs at a time,
    /// and returns when all WRITEs have arrived.
    ///
    /// # Errors
    /// [`BareError::TooLong`] if `len` is more than [`longest`](Self::longest). Otherwise, the link
    /// fails.
    pub async fn write(
        &mut self,
        len: usize,
        count: usize,
        in_flight: usize,
    ) -> Result<(), BareError> {
        self.end.write(writes(len, count, in_flight)).await?;
        // WRITEs arrive before a SEND that was queued after them (R4).
        self.echo(1, 1, 1).await
    }

    /// Makes the other end WRITE to this end in the same way as [`write`](Self::write), by requests
    /// of at most [`BareLimits::requested`] bytes and [`BareLimits::requested_writes`] WRITEs.
    ///
    /// # Errors
    /// The errors of [`write`](Self::write).
    pub async fn written(
        &mut self,
        len: usize,
        count: usize,
        in_flight: usize,
    ) -> Result<(), BareError> {
        if len > self.granted {
            return Err(BareError::TooLong { len, longest: self.granted });
        }
        let BareLimits { requested, requested_writes, .. } = self.limits;
        let at_a_time = requested.checked_div(len as u64).unwrap_or(u64::MAX).min(requested_writes);
        let at_a_time = at_a_time.clamp(1, u32::MAX.into()) as usize;
        let mut left = count;
        while left > 0 {
            let part = left.min(at_a_time);
            self.end.send_writes(writes(len, part, in_flight)).await?;
            match self.end.receive().await? {
                BareMessage::Written => left -= part,
                message => return Err(message.instead_of("written")),
            }
        }
        Ok(())
    }

    /// Closes the connection, so that the other end learns of it at once.
    pub fn close(mut self) {
        self.end.disconnect();
    }
}

fn writes(len: usize, count: usize, in_flight: usize) -> Writes {
    let word = |n: usize| u32::try_from(n).unwrap_or(u32::MAX);
    Writes { len: word(len), count: word(count), in_flight: word(in_flight) }
}
