//! A content on its way: bytes, and at the end what they amount to, wherever they come from.

use crate::digest::Digest;
use crate::failure::Failure;
use crate::pb::{GetHeader, GetResponse};
use crate::source::Piece;
use bytes::Bytes;
use std::io;
use tokio::sync::mpsc;
use tonic::Streaming;

/// A content on its way.
pub(crate) struct Pieces {
    from: From,
    /// Bytes that have come by.
    seen: u64,
}

enum From {
    /// In memory: what is left of it, and what the whole amounts to.
    Memory {
        left: Bytes,
        chunk: usize,
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
    /// These bytes, `chunk` of them at a time.
    pub(crate) fn memory(bytes: Bytes, chunk: usize) -> Pieces {
        let digest = Digest::of(&bytes);
        Pieces { from: From::Memory { left: bytes, chunk, digest }, seen: 0 }
    }

    /// These bytes at once, which amount to `digest`.
    pub(super) fn whole(bytes: Bytes, digest: Digest) -> Pieces {
        Pieces { from: From::Memory { chunk: bytes.len(), left: bytes, digest }, seen: 0 }
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

    /// The next piece. After the end it must not be called again.
    pub(crate) async fn next(&mut self) -> Result<Piece, Failure> {
        let piece = match &mut self.from {
            From::Memory { left, digest, .. } if left.is_empty() => Piece::End(*digest),
            From::Memory { left, chunk, .. } => Piece::Data(left.split_to(left.len().min(*chunk))),
            From::File(reading) => reading.next(self.seen).await?,
            From::Object(fetching) => fetching.next().await?,
        };
        if let Piece::Data(bytes) = &piece {
            self.seen += bytes.len() as u64;
        }
        Ok(piece)
    }
}

impl Reading {
    async fn next(&mut self, seen: u64) -> Result<Piece, Failure> {
        let cannot = |error: &io::Error| Failure::io(format!("cannot read {}", self.shown), error).for_good();
        let piece = match self.pieces.recv().await {
            Some(piece) => piece.map_err(|error| cannot(&error))?,
            None => return Err(cannot(&io::Error::other("the reader stopped"))),
        };
        let (at, ended) = match &piece {
            Piece::Data(bytes) => (self.offset + seen + bytes.len() as u64, false),
            Piece::End(digest) => (self.offset + digest.size, true),
        };
        match self.end {
            Some(end) if at > end => Err(self.changed(format!("it grew past the {end} bytes it had"))),
            Some(end) if ended && at < end => {
                let had = self.size.unwrap_or(end);
                Err(self.changed(format!("it ended after {at} of the {had} bytes it had")))
            }
            _ => Ok(piece),
        }
    }

    fn changed(&self, why: String) -> Failure {
        Failure::new(self.what.clone(), why, "put it again when nothing writes to it").for_good()
    }
}

impl Fetching {
    async fn next(&mut self) -> Result<Piece, Failure> {
        loop {
            if !self.data.is_empty() {
                return Ok(Piece::Data(std::mem::take(&mut self.data)));
            }
            let message = self.stream.message().await;
            let message = message.map_err(|status| Failure::status(self.what.clone(), &status))?;
            match (self.digest, message) {
                (Some(digest), None) => return Ok(Piece::End(digest)),
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
    Failure::new(what, format!("the server breaks the protocol: {breached}"), "is it an rpc-demo server?")
}
