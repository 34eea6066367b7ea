//! The data of a transfer, piece by piece, from any source. The last piece has the digest.

use std::io;

use bytes::Bytes;
use tokio::sync::mpsc;
use tonic::Streaming;

use crate::digest::Digest;
use crate::failure::Failure;
use crate::net::Connection;
use crate::pb::{GetHeader, GetRequest, GetResponse};
use crate::sink::Body;
use crate::source::Piece;

/// The pieces of the data that is transferred.
pub(crate) struct Pieces {
    from: From,
    /// Bytes returned so far.
    seen: u64,
}

enum From {
    /// All bytes in memory, and their digest.
    Memory(Bytes, Digest),
    /// The bytes of `pattern` repeatedly, until no byte is `left`.
    Pattern {
        pattern: Bytes,
        left: u64,
        digest: Digest,
    },
    File(Reading),
    Object(Box<Fetching>),
}

/// A file being read.
pub(super) struct Reading {
    /// The file name for messages.
    pub(super) shown: String,
    /// The description of the transfer in error messages.
    pub(super) what: String,
    pub(super) pieces: mpsc::Receiver<io::Result<Piece>>,
    /// Offset in the file at which the read begins.
    pub(super) offset: u64,
    /// The length that the file had, if known.
    pub(super) size: Option<u64>,
    /// The offset at which the read must end, if known.
    pub(super) end: Option<u64>,
}

/// An object being fetched.
struct Fetching {
    what: String,
    stream: Streaming<GetResponse>,
    body: Body,
    /// Data of the last message.
    data: Bytes,
    digest: Option<Digest>,
}

impl Pieces {
    /// `size` bytes that repeat `pattern`.
    pub(crate) fn pattern(pattern: Bytes, size: u64) -> Pieces {
        Pieces { from: From::Pattern { pattern, left: size, digest: Digest::default() }, seen: 0 }
    }

    /// All bytes at once, with their digest.
    pub(super) fn memory(bytes: Bytes, digest: Digest) -> Pieces {
        Pieces { from: From::Memory(bytes, digest), seen: 0 }
    }

    pub(super) fn file(reading: Reading) -> Pieces {
        Pieces { from: From::File(reading), seen: 0 }
    }

    /// Asks for an object. Returns the header of the response, and the content.
    pub(crate) async fn get(
        connection: &Connection,
        request: GetRequest,
        what: String,
    ) -> Result<(GetHeader, Pieces), Failure> {
        let status = |status| Failure::status(what.clone(), &status);
        let before = connection.body();
        let mut stream = connection.store().get(request).await.map_err(status)?.into_inner();
        let first = stream.message().await.map_err(status)?.unwrap_or_default();
        let GetResponse { header: Some(header), data, digest } = first else {
            return Err(breach(what, "its answer does not begin with a header"));
        };
        let digest = digest.map(Digest::from);
        // The channel may have left the path of this call since the call began, and may now report
        // another path.
        let body = if before == Body::MayChange { before } else { connection.body() };
        let fetching = Fetching { what, stream, body, data, digest };
        Ok((header, Pieces { from: From::Object(Box::new(fetching)), seen: 0 }))
    }

    /// Whether the sender of the pieces can still change them.
    pub(crate) fn body(&self) -> Body {
        match &self.from {
            From::Object(fetching) => fetching.body,
            From::Memory(..) | From::Pattern { .. } | From::File(_) => Body::Settled,
        }
    }

    /// The next piece. Must not be called again after the last piece.
    pub(crate) async fn next(&mut self) -> Result<Piece, Failure> {
        let piece = match &mut self.from {
            From::Memory(bytes, digest) => {
                Piece { data: std::mem::take(bytes), end: Some(*digest) }
            }
            From::Pattern { pattern, left, digest } => {
                let length =
                    usize::try_from(*left).map_or(pattern.len(), |left| left.min(pattern.len()));
                let data = pattern.slice(..length);
                digest.add(&data);
                *left -= length as u64;
                Piece { data, end: (*left == 0).then_some(*digest) }
            }
            From::File(reading) => reading.next(self.seen).await?,
            From::Object(fetching) => fetching.next().await?,
        };
        self.seen += piece.data.len() as u64;
        Ok(piece)
    }
}

impl Reading {
    async fn next(&mut self, seen: u64) -> Result<Piece, Failure> {
        let cannot = |error: &io::Error| {
            Failure::io(format!("cannot read {}", self.shown), error).not_resumable()
        };
        let piece = match self.pieces.recv().await {
            Some(piece) => piece.map_err(|error| cannot(&error))?,
            None => return Err(cannot(&io::Error::other("the reader stopped"))),
        };
        let at = self.offset + seen + piece.data.len() as u64;
        match self.end {
            Some(end) if at > end => {
                Err(self.changed(format!("it grew past the {end} bytes it had")))
            }
            Some(end) if piece.end.is_some() && at < end => {
                let had = self.size.unwrap_or(end);
                Err(self.changed(format!("it ended after {at} of the {had} bytes it had")))
            }
            _ => Ok(piece),
        }
    }

    fn changed(&self, why: String) -> Failure {
        Failure::new(self.what.clone(), why, "put it again when nothing writes to it")
            .not_resumable()
    }
}

impl Fetching {
    async fn next(&mut self) -> Result<Piece, Failure> {
        loop {
            // Data that arrives together with the digest is returned once the stream has ended.
            if self.digest.is_none() && !self.data.is_empty() {
                return Ok(Piece { data: std::mem::take(&mut self.data), end: None });
            }
            let message = self.stream.message().await;
            let message = message.map_err(|status| Failure::status(self.what.clone(), &status))?;
            match (self.digest, message) {
                (end @ Some(_), None) => {
                    return Ok(Piece { data: std::mem::take(&mut self.data), end });
                }
                (Some(_), Some(_)) => return Err(self.breach("more after its digest")),
                (None, None) => return Err(self.breach("its answer ends without a digest")),
                (None, Some(GetResponse { header: Some(_), .. })) => {
                    return Err(self.breach("a second header"));
                }
                (None, Some(GetResponse { header: None, data, digest })) => {
                    self.data = data;
                    self.digest = digest.map(Digest::from);
                }
            }
        }
    }

    fn breach(&self, breached: &str) -> Failure {
        breach(self.what.clone(), breached)
    }
}

pub(super) fn breach(what: String, breached: &str) -> Failure {
    Failure::new(
        what,
        format!("the server breaks the protocol: {breached}"),
        "is it an rpc-demo server?",
    )
}
