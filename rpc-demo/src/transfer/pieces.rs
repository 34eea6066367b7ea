//! A content on its way: bytes, and at the end what they amount to, wherever they come from.

use std::io;

use bytes::Bytes;
use tokio::sync::mpsc;
use tonic::Streaming;

use crate::digest::Digest;
use crate::failure::Failure;
use crate::pb::{GetHeader, GetResponse};
use crate::source::Piece;

/// A content on its way.
pub(crate) struct Pieces {
    from: From,
    /// Bytes that have come by.
    seen: u64,
}

enum From {
    /// All of it in memory, and what it amounts to.
    Memory(Bytes, Digest),
    /// The same bytes again and again, as long as some are left.
    Pattern {
        pattern: Bytes,
        left: u64,
        digest: Digest,
    },
    File(Reading),
    Object(Box<Fetching>),
}

/// A file that is read.
pub(super) struct Reading {
    /// The file, for messages.
    pub(super) shown: String,
    /// What reading it for this transfer is called.
    pub(super) what: String,
    pub(super) pieces: mpsc::Receiver<io::Result<Piece>>,
    /// Where it begins in the file, and how long the file was, if that is known.
    pub(super) offset: u64,
    pub(super) size: Option<u64>,
    /// Where it must end, if that is known.
    pub(super) end: Option<u64>,
}

/// An object that is fetched.
struct Fetching {
    what: String,
    stream: Streaming<GetResponse>,
    /// Of the message that was looked at last.
    data: Bytes,
    digest: Option<Digest>,
}

impl Pieces {
    /// These bytes again and again, `size` in all.
    pub(crate) fn pattern(pattern: Bytes, size: u64) -> Pieces {
        Pieces { from: From::Pattern { pattern, left: size, digest: Digest::default() }, seen: 0 }
    }

    /// These bytes at once, which amount to `digest`.
    pub(super) fn memory(bytes: Bytes, digest: Digest) -> Pieces {
        Pieces { from: From::Memory(bytes, digest), seen: 0 }
    }

    pub(super) fn file(reading: Reading) -> Pieces {
        Pieces { from: From::File(reading), seen: 0 }
    }

    /// An answer to a get: its header, and what follows.
    pub(crate) async fn object(
        mut stream: Streaming<GetResponse>,
        what: String,
    ) -> Result<(GetHeader, Pieces), Failure> {
        let status = |status| Failure::status(what.clone(), &status);
        let first = stream.message().await.map_err(status)?.unwrap_or_default();
        let GetResponse { header: Some(header), data, digest } = first else {
            return Err(breach(what, "its answer does not begin with a header"));
        };
        let digest = digest.map(Digest::from);
        let fetching = Fetching { what, stream, data, digest };
        Ok((header, Pieces { from: From::Object(Box::new(fetching)), seen: 0 }))
    }

    /// The next piece. After the last one it must not be called again.
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
            // With its digest goes the end of the stream.
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
