//! The source of the data to transfer: a local file, stdin, or an object on a server.

use std::fs::File;
use std::io;
use std::os::fd::AsFd;
use std::path::PathBuf;
use std::sync::Arc;

use super::pieces::{Pieces, Reading, breach};
use crate::attributes::Attributes;
use crate::cli::CHUNK;
use crate::digest::Digest;
use crate::failure::Failure;
use crate::names::Name;
use crate::net::Connection;
use crate::pb::checksums_request::Of;
use crate::pb::{ChecksumsRequest, GetHeader, GetRequest, Range};
use crate::ranges::Ranges;
use crate::source::{self, BLOCK, Extent};
use crate::tree::shown;

/// The source of the data to transfer.
#[derive(Clone)]
pub(crate) enum Origin {
    /// A local file.
    File(PathBuf),
    /// The standard input.
    Stdin,
    /// An object on a server.
    Object(Connection, Name),
}

impl std::fmt::Display for Origin {
    fn fmt(&self, f: &mut std::fmt::Formatter<'_>) -> std::fmt::Result {
        match self {
            Origin::File(path) => f.write_str(&shown(path)),
            Origin::Stdin => f.write_str("stdin"),
            Origin::Object(_, name) => write!(f, "'{name}'"),
        }
    }
}

/// Facts that are known once a file is open.
#[derive(Clone, Debug, Default)]
pub(super) struct Known {
    /// Size in bytes.
    pub(super) size: Option<u64>,
    /// Mode and modification time of a local file.
    pub(super) attributes: Attributes,
}

/// A local file whose ranges are read.
#[derive(Clone)]
pub(super) struct Opened {
    file: Arc<File>,
    attributes: Attributes,
}

impl Origin {
    fn cannot_read(&self) -> impl Fn(io::Error) -> Failure + use<> {
        let what = format!("cannot read {self}");
        move |error| Failure::io(what.clone(), &error).not_resumable()
    }

    /// Returns the data of the whole file or object. `what` describes the transfer in error
    /// messages. A file is read into the pool of the connection `to` the target, in messages of
    /// `chunk` bytes.
    pub(super) async fn whole(
        &self,
        what: String,
        chunk: Option<usize>,
        to: Option<&Connection>,
    ) -> Result<(Known, Pieces), Failure> {
        let failed = self.cannot_read();
        let to_read = to.map_or(chunk.unwrap_or(CHUNK), |to| to.chunk(chunk));
        let pool = to.and_then(Connection::pool);
        match self {
            Origin::Object(..) => {
                let (header, pieces) = self.fetch(what, chunk, None).await?;
                let attributes = header.attributes.map(Attributes::from).unwrap_or_default();
                Ok((Known { size: Some(header.size), attributes }, pieces))
            }
            Origin::Stdin => {
                let open = || -> io::Result<_> {
                    Ok(File::from(io::stdin().as_fd().try_clone_to_owned()?))
                };
                let file = open().map_err(failed)?;
                let pieces = source::start(Arc::new(file), Extent::Stream, to_read, pool);
                Ok((Known::default(), self.reading(what, pieces, 0, None, None)))
            }
            Origin::File(path) => {
                let (path, into) = (path.clone(), pool.clone());
                let open = move || -> io::Result<_> {
                    let file = File::open(path)?;
                    let metadata = file.metadata()?;
                    // Files under /proc report size 0 but have content.
                    let size = (metadata.is_file() && metadata.len() > 0).then_some(metadata.len());
                    let small = match size {
                        Some(size) if size <= to_read as u64 => {
                            Some(source::read_small(&file, size, into)?)
                        }
                        _ => None,
                    };
                    Ok((file, metadata, size, small))
                };
                let (file, metadata, size, small) = blocking(open).await.map_err(failed)?;
                let attributes = if metadata.is_file() {
                    Attributes::of(&metadata)
                } else {
                    Attributes::default()
                };
                let known = Known { size, attributes };
                match small {
                    Some((bytes, digest)) if Some(digest.size) == size => {
                        Ok((known, Pieces::memory(bytes, digest)))
                    }
                    // If the file has changed, reading it like any other file detects the change.
                    _ => {
                        let extent =
                            if metadata.is_file() { Extent::Whole(size) } else { Extent::Stream };
                        let pieces = source::start(Arc::new(file), extent, to_read, pool);
                        Ok((known, self.reading(what, pieces, 0, size, size)))
                    }
                }
            }
        }
    }

    fn reading(
        &self,
        what: String,
        pieces: tokio::sync::mpsc::Receiver<io::Result<source::Piece>>,
        offset: u64,
        size: Option<u64>,
        end: Option<u64>,
    ) -> Pieces {
        Pieces::file(Reading { shown: self.to_string(), what, pieces, offset, size, end })
    }

    async fn fetch(
        &self,
        what: String,
        chunk: Option<usize>,
        range: Option<Range>,
    ) -> Result<(GetHeader, Pieces), Failure> {
        let Origin::Object(connection, name) = self else {
            return Err(Failure::new(what, "it is not an object", ""));
        };
        let chunk = match range {
            Some(_) => connection.range_chunk(chunk),
            None => connection.chunk(chunk),
        };
        let chunk_size = u32::try_from(chunk).unwrap_or_default();
        let request = GetRequest { name: name.as_str().to_owned(), chunk_size, range };
        Pieces::get(connection, request, what).await
    }

    /// Opens a file whose ranges are to be read. `None` for an object and for stdin.
    pub(super) async fn open(&self) -> Result<Option<Opened>, Failure> {
        let Origin::File(path) = self else { return Ok(None) };
        let path = path.clone();
        let open = move || -> io::Result<_> {
            let file = File::open(path)?;
            let attributes = Attributes::of(&file.metadata()?);
            Ok(Opened { file: Arc::new(file), attributes })
        };
        blocking(open).await.map(Some).map_err(self.cannot_read())
    }

    /// Returns the data of one range, and for an object the header of the response.
    pub(super) async fn range(
        &self,
        what: String,
        opened: Option<&Opened>,
        ranges: &Ranges,
        index: usize,
        chunk: Option<usize>,
        to: Option<&Connection>,
    ) -> Result<(Option<GetHeader>, Pieces), Failure> {
        let (offset, length) = ranges.get(index).unwrap_or_default();
        match opened {
            Some(opened) => {
                let extent = Extent::Range { offset, length };
                let to_read = to.map_or(chunk.unwrap_or(CHUNK), |to| to.range_chunk(chunk));
                let pool = to.and_then(Connection::pool);
                let pieces = source::start(opened.file.clone(), extent, to_read, pool);
                let (size, end) = (Some(ranges.size()), Some(offset + length));
                Ok((None, self.reading(what, pieces, offset, size, end)))
            }
            None => {
                let (header, pieces) =
                    self.fetch(what, chunk, Some(Range { offset, length })).await?;
                Ok((Some(header), pieces))
            }
        }
    }

    /// The CRC32C of each range of an object.
    pub(super) async fn object_checksums(
        &self,
        what: &str,
        ranges: &Ranges,
    ) -> Result<Vec<u32>, Failure> {
        let Origin::Object(connection, name) = self else { return Ok(Vec::new()) };
        checksums(connection, what, Of::Name(name.as_str().to_owned()), ranges).await
    }

    /// Reads the whole local file and returns its digest.
    pub(super) async fn file_digest(&self) -> Result<Digest, Failure> {
        let Origin::File(path) = self else { return Ok(Digest::default()) };
        let path = path.clone();
        blocking(move || source::whole_digest(&File::open(path)?)).await.map_err(self.cannot_read())
    }
}

impl Opened {
    /// Reads one range of the file and returns its digest.
    pub(super) async fn range_digest(&self, ranges: Ranges, index: usize) -> io::Result<Digest> {
        let file = self.file.clone();
        blocking(move || source::range_digest(&file, &ranges, index, &mut vec![0; BLOCK])).await
    }

    /// Checks that the file has not changed since it was opened. `Err` says what has changed.
    pub(super) fn unchanged(&self, had: u64) -> Result<(), String> {
        let metadata = self.file.metadata().map_err(|error| error.to_string())?;
        match metadata.len() {
            now if now > had => Err(format!("it grew past the {had} bytes it had")),
            now if now < had => Err(format!("it ended after {now} of the {had} bytes it had")),
            _ if Attributes::of(&metadata).modified != self.attributes.modified => {
                Err("it was changed during the transfer".to_owned())
            }
            _ => Ok(()),
        }
    }
}

/// The server's CRC32C of each range.
pub(super) async fn checksums(
    connection: &Connection,
    what: &str,
    of: Of,
    ranges: &Ranges,
) -> Result<Vec<u32>, Failure> {
    let failed = |status| Failure::status(what, &status);
    let request = ChecksumsRequest { of: Some(of), range_size: ranges.each() };
    let mut stream = connection.store().checksums(request).await.map_err(failed)?.into_inner();
    let mut found = Vec::new();
    while let Some(batch) = stream.message().await.map_err(failed)? {
        found.extend(batch.crc32c);
        if found.len() > ranges.count() {
            return Err(breach(what.to_owned(), "more checksums than ranges"));
        }
    }
    if found.len() < ranges.count() {
        let why = "the object changed while it was read";
        return Err(Failure::new(what, why, "repeat the command"));
    }
    Ok(found)
}

/// Runs `work`, which blocks on the disk, on a blocking thread.
pub(crate) async fn blocking<T: Send + 'static>(
    work: impl FnOnce() -> io::Result<T> + Send + 'static,
) -> io::Result<T> {
    tokio::task::spawn_blocking(work).await.map_err(io::Error::other)?
}
