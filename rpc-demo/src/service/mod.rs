//! The gRPC service over a [`Store`].
//!
//! | module | what |
//! |---|---|
//! | `put` | writes |
//! | `get` | reads, and checksums |
//! | `slots` | limits on parallel transfers |
//! | `errors` | conversion of errors to gRPC statuses |

mod errors;
mod get;
mod put;
mod slots;

use std::ops::ControlFlow;
use std::pin::Pin;
use std::sync::Arc;
use std::time::Duration;

use errors::{bad_name, bad_ranges, store_status, upload_status};
use futures_util::Stream;
pub(crate) use get::damaged;
use slots::Slots;
use tokio::sync::mpsc;
use tokio_stream::wrappers::ReceiverStream;
use tonic::{Request, Response, Status, Streaming};

use crate::attributes::Attributes;
use crate::digest::Digest;
use crate::names::Name;
use crate::pb::object_store_server::ObjectStore;
use crate::pb::{
    AbortUploadRequest, AbortUploadResponse, BeginUploadRequest, BeginUploadResponse, Checksum,
    ChecksumsRequest, ChecksumsResponse, FinishUploadRequest, GetRequest, GetResponse, ListRequest,
    ListResponse, MakeDirectoryRequest, MakeDirectoryResponse, PutRequest, PutResponse,
    RemoveRequest, RemoveResponse, SetAttributesRequest, SetAttributesResponse, StatRequest,
    StatResponse,
};
use crate::ranges::Ranges;
use crate::store::{Removed, Store, Wanted};

/// Entries of a listing per message. With names of 4000 bytes a message stays below 4 MiB.
const LIST_BATCH: usize = 256;
/// Interval at which idle uploads are closed.
const SWEEP_EVERY: Duration = Duration::from_secs(60);

/// The service. Clones share the store and the limits on transfers.
#[derive(Clone)]
pub(crate) struct Service {
    store: Arc<Store>,
    reads: Slots,
    writes: Slots,
}

type Answers<T> = Pin<Box<dyn Stream<Item = Result<T, Status>> + Send>>;

impl Service {
    /// Serves `store` with at most `reads` and `writes` in parallel.
    pub(crate) fn new(store: Store, reads: u32, writes: u32) -> Service {
        Service {
            store: Arc::new(store),
            reads: Slots::new(reads, "--max-reads"),
            writes: Slots::new(writes, "--max-writes"),
        }
    }

    /// Returns a future that closes idle uploads periodically.
    pub(crate) fn sweep(&self) -> impl Future<Output = ()> + use<> {
        let store = self.store.clone();
        async move {
            loop {
                tokio::time::sleep(SWEEP_EVERY).await;
                let store = store.clone();
                let swept = tokio::task::spawn_blocking(move || store.sweep_uploads()).await;
                if let Ok(Err(error)) = swept {
                    tracing::warn!("cannot remove old uploads: {error}");
                }
            }
        }
    }

    /// Runs `work`, which blocks on the disk, on a blocking thread.
    async fn on_disk<T: Send + 'static, E: IntoStatus + Send + 'static>(
        &self,
        work: impl FnOnce(&Store) -> Result<T, E> + Send + 'static,
    ) -> Result<T, Status> {
        let store = self.store.clone();
        match tokio::task::spawn_blocking(move || work(&store)).await {
            Ok(result) => result.map_err(|error| error.status()),
            Err(_) => Err(Status::unavailable("the server is shutting down")),
        }
    }

    /// Refuses an object that is larger than the free space of the disk.
    fn room(&self, name: &Name, size: u64) -> Result<(), Status> {
        match self.store.free() {
            Some(free) if free < size => Err(Status::resource_exhausted(format!(
                "cannot write '{name}': it has {size} bytes, and the server's disk has {free} free; free some space \
                 under the server's root"
            ))),
            _ => Ok(()),
        }
    }
}

/// Converts an error of the store to a status.
trait IntoStatus {
    fn status(&self) -> Status;
}

impl IntoStatus for crate::store::StoreError {
    fn status(&self) -> Status {
        store_status(self)
    }
}

impl IntoStatus for crate::store::UploadError {
    fn status(&self) -> Status {
        upload_status(self)
    }
}

#[tonic::async_trait]
impl ObjectStore for Service {
    async fn put(
        &self,
        request: Request<Streaming<PutRequest>>,
    ) -> Result<Response<PutResponse>, Status> {
        let path = tonic_rdma::connect_info(&request).path;
        let stored = self.receive(path, request.into_inner()).await?;
        Ok(Response::new(PutResponse { stored: Some(stored.into()) }))
    }

    async fn begin_upload(
        &self,
        request: Request<BeginUploadRequest>,
    ) -> Result<Response<BeginUploadResponse>, Status> {
        let BeginUploadRequest { name, size, range_size, attributes, resume } =
            request.into_inner();
        let name = parse(&name)?;
        let ranges = Ranges::new(size, range_size).ok_or_else(|| bad_ranges(&name))?;
        let attributes = attributes.map(Attributes::from).unwrap_or_default();
        let wanted = Wanted { name, ranges, attributes, resume };
        let (upload, resumed) = self.on_disk(move |store| store.begin_upload(wanted)).await?;
        Ok(Response::new(BeginUploadResponse { upload, resumed }))
    }

    async fn finish_upload(
        &self,
        request: Request<FinishUploadRequest>,
    ) -> Result<Response<PutResponse>, Status> {
        let path = tonic_rdma::connect_info(&request).path;
        let FinishUploadRequest { upload, digest } = request.into_inner();
        let Some(digest) = digest.map(Digest::from) else {
            return Err(Status::invalid_argument("an upload is finished with its digest"));
        };
        let name =
            self.store.upload(&upload).map_err(|error| upload_status(&error))?.name().clone();
        let stored = self.on_disk(move |store| store.finish_upload(&upload, digest)).await?;
        tracing::info!("put '{name}' in ranges over {path}: {stored}");
        Ok(Response::new(PutResponse { stored: Some(stored.into()) }))
    }

    async fn abort_upload(
        &self,
        request: Request<AbortUploadRequest>,
    ) -> Result<Response<AbortUploadResponse>, Status> {
        let upload = request.into_inner().upload;
        self.on_disk(move |store| store.abort_upload(&upload)).await?;
        Ok(Response::new(AbortUploadResponse {}))
    }

    type GetStream = Answers<GetResponse>;

    async fn get(&self, request: Request<GetRequest>) -> Result<Response<Self::GetStream>, Status> {
        let (path, pool) = (tonic_rdma::connect_info(&request).path, crate::net::pool(&request));
        self.send(path, pool, request.into_inner()).await.map(Response::new)
    }

    type ChecksumsStream = Answers<ChecksumsResponse>;

    async fn checksums(
        &self,
        request: Request<ChecksumsRequest>,
    ) -> Result<Response<Self::ChecksumsStream>, Status> {
        self.checksums(request.into_inner()).await.map(Response::new)
    }

    async fn stat(&self, request: Request<StatRequest>) -> Result<Response<StatResponse>, Status> {
        let request = request.into_inner();
        let (name, checksum) = (parse(&request.name)?, request.checksum());
        let entry = self.on_disk(move |store| store.stat(&name, checksum)).await?;
        Ok(Response::new(StatResponse { entry: Some(entry) }))
    }

    type ListStream = Answers<ListResponse>;

    async fn list(
        &self,
        request: Request<ListRequest>,
    ) -> Result<Response<Self::ListStream>, Status> {
        let request = request.into_inner();
        let checksum = request.checksum();
        let name = if request.name.is_empty() { None } else { Some(parse(&request.name)?) };
        // Computing checksums reads objects, so the listing takes a slot for reads.
        let slot = match checksum {
            Checksum::Computed => Some(self.reads.take(&"the listing").await?),
            _ => None,
        };
        let (batches, receiver) = mpsc::channel(4);
        let store = self.store.clone();
        tokio::task::spawn_blocking(move || {
            let _slot = slot;
            let mut entries = Vec::new();
            let done = store.list(name.as_ref(), checksum, |entry| {
                entries.push(entry);
                if entries.len() == LIST_BATCH {
                    let entries = std::mem::take(&mut entries);
                    if batches.blocking_send(Ok(ListResponse { entries })).is_err() {
                        return ControlFlow::Break(());
                    }
                }
                ControlFlow::Continue(())
            });
            // The receiver may have been dropped.
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
        let MakeDirectoryRequest { name, writable } = request.into_inner();
        let name = parse(&name)?;
        self.on_disk(move |store| store.make_dir(&name, writable)).await?;
        Ok(Response::new(MakeDirectoryResponse {}))
    }

    async fn set_attributes(
        &self,
        request: Request<SetAttributesRequest>,
    ) -> Result<Response<SetAttributesResponse>, Status> {
        let SetAttributesRequest { name, attributes } = request.into_inner();
        let name = parse(&name)?;
        let attributes = attributes.map(Attributes::from).unwrap_or_default();
        self.on_disk(move |store| store.set_attributes(&name, &attributes)).await?;
        Ok(Response::new(SetAttributesResponse {}))
    }

    async fn remove(
        &self,
        request: Request<RemoveRequest>,
    ) -> Result<Response<RemoveResponse>, Status> {
        let RemoveRequest { name, recursive } = request.into_inner();
        let name = parse(&name)?;
        let shown = name.to_string();
        let Removed { files, directories, bytes } =
            self.on_disk(move |store| store.remove(&name, recursive)).await?;
        tracing::info!(
            "removed '{shown}': {bytes} bytes in {files} files, {directories} directories"
        );
        Ok(Response::new(RemoveResponse { files, directories, bytes }))
    }
}

fn parse(name: &str) -> Result<Name, Status> {
    Name::parse(name).map_err(|error| bad_name(name, error))
}
