//! Reads objects, ranges and checksums.

use std::io;
use std::ops::ControlFlow;
use std::sync::Arc;

use futures_util::{StreamExt, stream};
use tokio::sync::mpsc;
use tokio_stream::wrappers::ReceiverStream;
use tonic::Status;

use super::errors::{bad_ranges, status, upload_status};
use super::{Answers, Service, parse};
use crate::cli::{CHUNK, CHUNK_MAX, CHUNK_MIN};
use crate::digest::Digest;
use crate::names::{Name, Shown};
use crate::net::fitting;
use crate::pb::checksums_request::Of;
use crate::pb::{self, ChecksumsRequest, ChecksumsResponse, GetHeader, GetRequest, GetResponse};
use crate::ranges::Ranges;
use crate::source::{self, Extent, Piece};
use crate::store::{Object, StoreError};

/// Checksums per message. With the default range size, the client receives a message for every 512
/// MiB of the object.
const CHECKSUMS_BATCH: usize = 64;

impl Service {
    pub(super) async fn send(
        &self,
        path: tonic_rdma::Path,
        pool: Option<tonic_rdma::Pool>,
        request: GetRequest,
    ) -> Result<Answers<GetResponse>, Status> {
        let GetRequest { name, chunk_size, range } = request;
        let name = parse(&name)?;
        let chunk = match usize::try_from(chunk_size) {
            Ok(0) | Err(_) => CHUNK,
            Ok(asked) => asked.clamp(CHUNK_MIN, CHUNK_MAX),
        };
        let chunk = fitting(chunk, pool.as_ref());
        let slot = self.reads.take(&name).await?;
        let (wanted, into) = (name.clone(), pool.clone());
        let (object, small) = self
            .on_disk(move |store| {
                let object = store.read(&wanted)?;
                let is_small = range.is_none() && object.size <= chunk as u64;
                let small = is_small.then(|| source::read_small(&object.file, object.size, into));
                Ok::<_, StoreError>((object, small))
            })
            .await?;
        let Object { file, size, attributes, version, recorded } = object;
        let header =
            GetHeader { size, attributes: Some(attributes.into()), version, crc32c: recorded };
        let expected = match range {
            None => {
                tracing::info!("get '{name}' over {path}: {size} bytes");
                Expected { name, size, recorded }
            }
            Some(pb::Range { offset, length }) => {
                tracing::debug!("get '{name}' over {path}: {length} bytes at {offset}");
                Expected { name, size: length.min(size.saturating_sub(offset)), recorded: None }
            }
        };
        if let Some(read) = small {
            let (data, digest) = read.map_err(|error| status("read", &expected.name, &error))?;
            let digest = Some(expected.end(digest)?);
            let whole = GetResponse { header: Some(header), data, digest };
            return Ok(Box::pin(stream::once(async { Ok(whole) })));
        }
        let extent = match range {
            None => Extent::Whole(Some(size)),
            Some(pb::Range { offset, .. }) => Extent::Range { offset, length: expected.size },
        };
        let pieces = ReceiverStream::new(source::start(Arc::new(file), extent, chunk, pool));
        let body = pieces.map(move |piece| {
            // The slot is held until the stream is dropped.
            let _slot = &slot;
            expected.answer(piece)
        });
        let header = GetResponse { header: Some(header), ..GetResponse::default() };
        Ok(Box::pin(stream::once(async { Ok(header) }).chain(body)))
    }

    pub(super) async fn checksums(
        &self,
        request: ChecksumsRequest,
    ) -> Result<Answers<ChecksumsResponse>, Status> {
        let ChecksumsRequest { of, range_size } = request;
        let (sender, receiver) = mpsc::channel(4);
        let mut batches = Batches { batch: Vec::new(), sender };
        match of {
            None => {
                return Err(Status::invalid_argument(
                    "checksums of what? name an object or an upload",
                ));
            }
            Some(Of::Upload(id)) => {
                let upload = self.store.upload(&id).map_err(|error| upload_status(&error))?;
                let name = upload.name().clone();
                if range_size != upload.ranges().each() {
                    return Err(bad_ranges(&name));
                }
                let slot = self.reads.take(&name).await?;
                tokio::task::spawn_blocking(move || {
                    let done = upload.checksums(|crc32c| batches.add(crc32c));
                    batches.end(done.map_err(|error| status("read", &name, &error)));
                    drop(slot);
                });
            }
            Some(Of::Name(name)) => {
                let name = parse(&name)?;
                let slot = self.reads.take(&name).await?;
                let wanted = name.clone();
                let object = self.on_disk(move |store| store.read(&wanted)).await?;
                let ranges =
                    Ranges::new(object.size, range_size).ok_or_else(|| bad_ranges(&name))?;
                tokio::task::spawn_blocking(move || {
                    let done = source::checksums(&object.file, &ranges, |_, digest| {
                        batches.add(digest.crc32c)
                    });
                    batches.end(done.map_err(|error| status("read", &name, &error)));
                    drop(slot);
                });
            }
        }
        Ok(Box::pin(ReceiverStream::new(receiver)))
    }
}

/// Batches checksums for the client.
struct Batches {
    batch: Vec<u32>,
    sender: mpsc::Sender<Result<ChecksumsResponse, Status>>,
}

impl Batches {
    fn add(&mut self, crc32c: u32) -> ControlFlow<()> {
        self.batch.push(crc32c);
        if self.batch.len() < CHECKSUMS_BATCH {
            return ControlFlow::Continue(());
        }
        let crc32c = std::mem::take(&mut self.batch);
        match self.sender.blocking_send(Ok(ChecksumsResponse { crc32c })) {
            Ok(()) => ControlFlow::Continue(()),
            Err(_) => ControlFlow::Break(()),
        }
    }

    fn end(self, done: Result<(), Status>) {
        // The receiver may have been dropped.
        let _ = self.sender.blocking_send(done.map(|()| ChecksumsResponse { crc32c: self.batch }));
    }
}

/// The size of an object, and its recorded CRC32C, if any. Reading the object should yield both.
struct Expected {
    name: Name,
    size: u64,
    recorded: Option<u32>,
}

impl Expected {
    fn answer(&self, piece: io::Result<Piece>) -> Result<GetResponse, Status> {
        let Piece { data, end } = piece.map_err(|error| status("read", &self.name, &error))?;
        let digest = end.map(|digest| self.end(digest)).transpose()?;
        Ok(GetResponse { header: None, data, digest })
    }

    fn end(&self, digest: Digest) -> Result<pb::Digest, Status> {
        let Expected { name, size, recorded } = self;
        if digest.size != *size {
            return Err(Status::aborted(format!(
                "'{name}' changed while it was read: {} bytes were read where there were {size}; try again",
                digest.size
            )));
        }
        match recorded {
            Some(recorded) if *recorded != digest.crc32c => {
                let message = damaged(name, digest.crc32c, *recorded);
                tracing::error!("{message}");
                Err(Status::data_loss(message))
            }
            _ => Ok(digest.into()),
        }
    }
}

/// The message for an object whose content no longer has the recorded CRC32C.
pub(crate) fn damaged(name: &Name, found: u32, recorded: u32) -> String {
    format!(
        "'{}' is damaged on the server's disk: its CRC32C is {found:08x}, and {recorded:08x} was stored; put it again \
         from a good copy",
        Shown(name.as_str())
    )
}
