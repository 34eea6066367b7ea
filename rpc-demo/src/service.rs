//! The gRPC service over a [`Store`].

use crate::cli::{CHUNK, CHUNK_MAX, CHUNK_MIN};
use crate::digest::Digest;
use crate::names::{Name, Shown};
use crate::pb::object_store_server::ObjectStore;
use crate::pb::{
    self, GetHeader, GetRequest, GetResponse, ListRequest, ListResponse, MakeDirectoryRequest,
    MakeDirectoryResponse, PutHeader, PutRequest, PutResponse, get_response, put_request::Part,
};
use crate::sink::Writer;
use crate::source::{Piece, Source};
use crate::store::{Store, StoreError};
use futures_util::{Stream, StreamExt, stream};
use std::io;
use std::ops::ControlFlow;
use std::pin::Pin;
use std::sync::Arc;
use std::time::Duration;
use tokio::sync::{OwnedSemaphorePermit, Semaphore, mpsc};
use tokio_stream::wrappers::ReceiverStream;
use tonic::{Code, Request, Response, Status, Streaming};

/// How long a transfer waits for its turn.
const QUEUE_TIMEOUT: Duration = Duration::from_secs(60);
/// Entries of a listing in one message. With names of 4000 bytes it stays below 4 MiB.
const LIST_BATCH: usize = 256;

/// The service. Clones share the store and the limit on transfers.
#[derive(Clone)]
pub(crate) struct Service {
    store: Arc<Store>,
    slots: Arc<Semaphore>,
}

type Answers<T> = Pin<Box<dyn Stream<Item = Result<T, Status>> + Send>>;

impl Service {
    /// Serves `store`, at most `transfers` at once.
    pub(crate) fn new(store: Store, transfers: usize) -> Service {
        Service { store: Arc::new(store), slots: Arc::new(Semaphore::new(transfers)) }
    }

    /// Each transfer holds a thread for the disk, and there is not any number of those.
    async fn slot(&self, name: &Name) -> Result<OwnedSemaphorePermit, Status> {
        match tokio::time::timeout(QUEUE_TIMEOUT, self.slots.clone().acquire_owned()).await {
            Ok(Ok(slot)) => Ok(slot),
            _ => Err(Status::resource_exhausted(format!(
                "'{name}' waited {} s for other transfers to end; try again later, or give the server a higher \
                 --max-transfers",
                QUEUE_TIMEOUT.as_secs()
            ))),
        }
    }

    /// Runs `work`, which blocks on the disk.
    async fn on_disk<T: Send + 'static>(
        &self,
        work: impl FnOnce(&Store) -> Result<T, StoreError> + Send + 'static,
    ) -> Result<T, Status> {
        let store = self.store.clone();
        match tokio::task::spawn_blocking(move || work(&store)).await {
            Ok(result) => result.map_err(|error| store_status(&error)),
            Err(_) => Err(Status::unavailable("the server is shutting down")),
        }
    }

    /// Refuses at once what cannot fit.
    fn room(&self, name: &Name, size: u64) -> Result<(), Status> {
        match self.store.free() {
            Some(free) if free < size => Err(Status::resource_exhausted(format!(
                "cannot write '{name}': it has {size} bytes, and the server's disk has {free} free; free some space \
                 under the server's root"
            ))),
            _ => Ok(()),
        }
    }

    async fn receive(
        &self,
        name: &Name,
        header: &PutHeader,
        stream: &mut Streaming<PutRequest>,
    ) -> Result<Digest, Status> {
        let write_failed = |error: io::Error| status("write", name, &error);
        let mode = header.mode;
        let store = self.store.clone();
        let pending = tokio::task::spawn_blocking(move || store.begin(mode))
            .await
            .map_err(|_| Status::unavailable("the server is shutting down"))?
            .map_err(write_failed)?;
        let mut writer = Writer::start(pending);
        let mut size = 0;
        let promised = loop {
            match stream.message().await?.and_then(|request| request.part) {
                Some(Part::Chunk(chunk)) => {
                    size += chunk.len() as u64;
                    if header.size.is_some_and(|announced| size > announced) {
                        return Err(length_differs(name, header, size));
                    }
                    if writer.push(chunk).await.is_err() {
                        // The disk failed; this says how.
                        writer.finish().await.map_err(write_failed)?;
                        return Err(Status::internal(format!("cannot write '{name}': the writer stopped")));
                    }
                }
                Some(Part::Trailer(trailer)) => break Digest::from(trailer),
                Some(Part::Header(_)) => return Err(breach(name, "a second header")),
                None => {
                    return Err(Status::aborted(format!(
                        "the transfer of '{name}' ended early; nothing was stored"
                    )));
                }
            }
        };
        if stream.message().await?.is_some() {
            return Err(breach(name, "more after the trailer"));
        }
        if header.size.is_some_and(|announced| size != announced) {
            return Err(length_differs(name, header, size));
        }
        let pending = writer.finish().await.map_err(write_failed)?;
        if pending.digest() != promised {
            return Err(Status::data_loss(format!(
                "'{name}' arrived as {} where {promised} was sent; nothing was stored, send it again",
                pending.digest()
            )));
        }
        let target = name.clone();
        self.on_disk(move |store| store.commit(pending, &target)).await
    }
}

#[tonic::async_trait]
impl ObjectStore for Service {
    async fn put(&self, request: Request<Streaming<PutRequest>>) -> Result<Response<PutResponse>, Status> {
        let path = tonic_rdma::connect_info(&request).path;
        let mut stream = request.into_inner();
        let Some(PutRequest { part: Some(Part::Header(header)) }) = stream.message().await? else {
            return Err(Status::invalid_argument("a put begins with its header"));
        };
        let name = parse(&header.name)?;
        if let Some(size) = header.size {
            self.room(&name, size)?;
        }
        let _slot = self.slot(&name).await?;
        let stored = self.receive(&name, &header, &mut stream).await.inspect_err(|status| {
            tracing::info!("put of '{name}' over {path} failed: {}", Shown(status.message()));
        })?;
        tracing::info!("put '{name}' over {path}: {stored}");
        Ok(Response::new(PutResponse { stored: Some(stored.into()) }))
    }

    type GetStream = Answers<GetResponse>;

    async fn get(&self, request: Request<GetRequest>) -> Result<Response<Self::GetStream>, Status> {
        let path = tonic_rdma::connect_info(&request).path;
        let GetRequest { name, chunk_size } = request.into_inner();
        let name = parse(&name)?;
        let chunk = match usize::try_from(chunk_size) {
            Ok(0) | Err(_) => CHUNK,
            Ok(asked) => asked.clamp(CHUNK_MIN, CHUNK_MAX),
        };
        let slot = self.slot(&name).await?;
        let wanted = name.clone();
        let object = self.on_disk(move |store| store.read(&wanted)).await?;
        tracing::info!("get '{name}' over {path}: {} bytes", object.size);
        let expected = Expected { name, size: object.size, recorded: object.recorded };
        let header = GetHeader { size: object.size, mode: object.mode };
        let source = Source { file: object.file, size: Some(object.size), regular: true };
        let pieces = ReceiverStream::new(source.start(chunk));
        let body = pieces.map(move |piece| {
            // Held until the stream is dropped.
            let _slot = &slot;
            Ok(GetResponse { part: Some(expected.part(piece)?) })
        });
        let header = GetResponse { part: Some(get_response::Part::Header(header)) };
        Ok(Response::new(Box::pin(stream::once(async { Ok(header) }).chain(body))))
    }

    type ListStream = Answers<ListResponse>;

    async fn list(&self, request: Request<ListRequest>) -> Result<Response<Self::ListStream>, Status> {
        let name = request.into_inner().name;
        let name = if name.is_empty() { None } else { Some(parse(&name)?) };
        let (batches, receiver) = mpsc::channel(4);
        let store = self.store.clone();
        tokio::task::spawn_blocking(move || {
            let mut entries = Vec::new();
            let done = store.list(name.as_ref(), |entry| {
                entries.push(entry);
                if entries.len() == LIST_BATCH {
                    let entries = std::mem::take(&mut entries);
                    if batches.blocking_send(Ok(ListResponse { entries })).is_err() {
                        return ControlFlow::Break(());
                    }
                }
                ControlFlow::Continue(())
            });
            // A receiver that is gone does not want to know.
            let _ = batches.blocking_send(match done {
                Ok(()) => Ok(ListResponse { entries }),
                Err(error) => Err(store_status(&error)),
            });
        });
        Ok(Response::new(Box::pin(ReceiverStream::new(receiver))))
    }

    async fn make_directory(
        &self,
        request: Request<MakeDirectoryRequest>,
    ) -> Result<Response<MakeDirectoryResponse>, Status> {
        let name = parse(&request.into_inner().name)?;
        self.on_disk(move |store| store.make_dir(&name)).await?;
        Ok(Response::new(MakeDirectoryResponse {}))
    }
}

/// What an object should turn out to be when it is read.
struct Expected {
    name: Name,
    size: u64,
    recorded: Option<u32>,
}

impl Expected {
    fn part(&self, piece: io::Result<Piece>) -> Result<get_response::Part, Status> {
        let name = &self.name;
        match piece.map_err(|error| status("read", name, &error))? {
            Piece::Chunk(chunk) => Ok(get_response::Part::Chunk(chunk)),
            Piece::End(digest) if digest.size != self.size => Err(Status::aborted(format!(
                "'{name}' changed while it was read: it had {} bytes, and {} were read; try again",
                self.size, digest.size
            ))),
            Piece::End(digest) if self.recorded.is_some_and(|recorded| recorded != digest.crc32c) => {
                let recorded = self.recorded.unwrap_or_default();
                let message = format!(
                    "'{name}' is damaged on the server's disk: its CRC32C is {:08x}, and {recorded:08x} was stored; \
                     put it again from a good copy",
                    digest.crc32c
                );
                tracing::error!("{message}");
                Err(Status::data_loss(message))
            }
            Piece::End(digest) => Ok(get_response::Part::Trailer(pb::Digest::from(digest))),
        }
    }
}

fn parse(name: &str) -> Result<Name, Status> {
    Name::parse(name).map_err(|error| {
        Status::invalid_argument(format!("'{}' cannot be the name of an object: {error}", Shown(name)))
    })
}

fn breach(name: &Name, what: &str) -> Status {
    Status::invalid_argument(format!("the transfer of '{name}' has {what}; nothing was stored"))
}

fn length_differs(name: &Name, header: &PutHeader, size: u64) -> Status {
    Status::invalid_argument(format!(
        "'{name}' was announced with {} bytes, and {size} came; nothing was stored",
        header.size.unwrap_or_default()
    ))
}

fn store_status(error: &StoreError) -> Status {
    failed(error.doing, &error.name, &error.error)
}

fn status(doing: &'static str, name: &Name, error: &io::Error) -> Status {
    failed(doing, &name.to_string(), error)
}

/// The gRPC form of what a disk says. `name` is fit to be shown.
fn failed(doing: &str, name: &str, error: &io::Error) -> Status {
    use io::ErrorKind as Kind;
    let (code, cure) = match error.kind() {
        Kind::NotFound => (Code::NotFound, "see `rpc-demo ls` for what there is"),
        Kind::PermissionDenied => (Code::PermissionDenied, "check the permissions under the server's root"),
        Kind::StorageFull | Kind::QuotaExceeded => {
            (Code::ResourceExhausted, "free some space under the server's root")
        }
        Kind::FileTooLarge => (Code::ResourceExhausted, "raise the server's limit on file sizes (ulimit -f)"),
        Kind::ReadOnlyFilesystem => (Code::FailedPrecondition, "the server's root is mounted read-only"),
        Kind::IsADirectory => (Code::FailedPrecondition, "there is a directory of that name; use another"),
        Kind::NotADirectory => (Code::FailedPrecondition, "a part of the name is a file; use another name"),
        Kind::InvalidFilename => {
            (Code::InvalidArgument, "the server's file system refuses the name; use another")
        }
        Kind::InvalidInput => (Code::FailedPrecondition, ""),
        _ if too_many_files(error) => {
            (Code::ResourceExhausted, "raise the server's limit on open files (ulimit -n)")
        }
        _ => (Code::Internal, "see the server's log"),
    };
    if code == Code::Internal {
        tracing::error!("cannot {doing} '{name}': {error}");
    }
    let join = if cure.is_empty() { "" } else { "; " };
    Status::new(code, format!("cannot {doing} '{name}': {error}{join}{cure}"))
}

fn too_many_files(error: &io::Error) -> bool {
    use rustix::io::Errno;
    [Errno::MFILE, Errno::NFILE].iter().any(|errno| error.raw_os_error() == Some(errno.raw_os_error()))
}

#[cfg(test)]
mod tests {
    use super::*;
    use rustix::io::Errno;

    #[test]
    fn what_a_disk_says_has_a_code_and_names_the_object() {
        for (errno, code) in [
            (Errno::NOSPC, Code::ResourceExhausted),
            (Errno::DQUOT, Code::ResourceExhausted),
            (Errno::FBIG, Code::ResourceExhausted),
            (Errno::MFILE, Code::ResourceExhausted),
            (Errno::ACCESS, Code::PermissionDenied),
            (Errno::NOENT, Code::NotFound),
            (Errno::ISDIR, Code::FailedPrecondition),
            (Errno::NOTDIR, Code::FailedPrecondition),
            (Errno::ROFS, Code::FailedPrecondition),
            (Errno::NAMETOOLONG, Code::InvalidArgument),
            (Errno::IO, Code::Internal),
        ] {
            let status = failed("write", "a/b", &io::Error::from(errno));
            assert_eq!(status.code(), code, "{errno}");
            assert!(status.message().contains("'a/b'"), "{}", status.message());
        }
    }
}
