//! Receives whole objects, and ranges of uploads.

use std::io;

use bytes::Bytes;
use tonic::{Status, Streaming};

use super::Service;
use super::errors::{breach, differs, status, upload_status};
use crate::attributes::Attributes;
use crate::digest::Digest;
use crate::names::{Name, Shown};
use crate::pb::put_request::Head;
use crate::pb::{ObjectHead, PutRequest, RangeHead};
use crate::sink::{Body, Part, Room, Writer, write_at};

impl Service {
    /// Receives the stream of one put, and returns the digest of the stored content.
    pub(super) async fn receive(
        &self,
        path: tonic_rdma::Path,
        mut stream: Streaming<PutRequest>,
    ) -> Result<Digest, Status> {
        let first = stream.message().await?.unwrap_or_default();
        let PutRequest { head: Some(head), data, digest } = first else {
            return Err(Status::invalid_argument("a put begins with its head"));
        };
        let (digest, body) = (digest.map(Digest::from), crate::net::body(path));
        let begun = Begun { data, digest, body, stream };
        match head {
            Head::Object(head) => {
                let name = super::parse(&head.name)?;
                if let Some(size) = head.size {
                    self.room(&name, size)?;
                }
                let _slot = self.writes.take(&name).await?;
                let stored = self.object(&name, head, begun).await.inspect_err(|status| {
                    tracing::info!(
                        "put of '{name}' over {path} failed: {}",
                        Shown(status.message())
                    );
                })?;
                tracing::info!("put '{name}' over {path}: {stored}");
                Ok(stored)
            }
            Head::Range(head) => {
                let upload =
                    self.store.upload(&head.upload).map_err(|error| upload_status(&error))?;
                let name = upload.name().clone();
                let _slot = self.writes.take(&name).await?;
                let stored = self.range(&name, &head, begun).await.inspect_err(|status| {
                    let why = Shown(status.message()).to_string();
                    tracing::info!(
                        "put of range {} of '{name}' over {path} failed: {why}",
                        head.index
                    );
                })?;
                tracing::debug!("put range {} of '{name}' over {path}: {stored}", head.index);
                Ok(stored)
            }
        }
    }

    async fn object(&self, name: &Name, head: ObjectHead, begun: Begun) -> Result<Digest, Status> {
        let size = head.size;
        let attributes = head.attributes.map(Attributes::from).unwrap_or_default();
        let private = attributes.mode.is_some();
        if let Some(promised) = begun.digest {
            // The content is complete: one disk operation suffices.
            let Begun { data, body, .. } = begun.ends(name).await?;
            let data = body.settle(data);
            let arrived = Digest::of(&data);
            announced(name, size, arrived.size)?;
            if arrived != promised {
                return Err(differs(name, arrived, promised));
            }
            let target = name.clone();
            return self
                .on_disk(move |store| {
                    let write = || -> io::Result<_> {
                        let pending = store.begin(private)?;
                        write_at(pending.file(), &data, 0)?;
                        Ok(pending)
                    };
                    let pending = write().map_err(|error| store_error(&target, error))?;
                    store.commit(pending, arrived, &attributes, &target)
                })
                .await
                .map(|()| arrived);
        }
        let target = name.clone();
        let pending = self
            .on_disk(move |store| store.begin(private).map_err(|error| store_error(&target, error)))
            .await?;
        let room = Part { file: pending.file().clone(), offset: 0 };
        let (arrived, promised) = begun.write(name, room, size).await?;
        announced(name, size, arrived.size)?;
        if arrived != promised {
            return Err(differs(name, arrived, promised));
        }
        let target = name.clone();
        self.on_disk(move |store| store.commit(pending, arrived, &attributes, &target)).await?;
        Ok(arrived)
    }

    async fn range(&self, name: &Name, head: &RangeHead, begun: Begun) -> Result<Digest, Status> {
        let failed = |error| upload_status(&error);
        let claim = self
            .store
            .upload(&head.upload)
            .and_then(|upload| upload.claim(head.index))
            .map_err(failed)?;
        let length = Some(claim.length());
        let (arrived, promised) = begun.write(name, claim.clone(), length).await?;
        announced(name, length, arrived.size)?;
        if arrived != promised {
            return Err(differs(name, arrived, promised));
        }
        claim.complete(arrived.crc32c);
        Ok(arrived)
    }
}

fn store_error(name: &Name, error: io::Error) -> crate::store::StoreError {
    crate::store::StoreError { doing: "write", name: name.to_string(), error }
}

/// A stream whose first message has been read.
struct Begun {
    data: Bytes,
    digest: Option<Digest>,
    body: Body,
    stream: Streaming<PutRequest>,
}

impl Begun {
    /// Checks that the stream has ended.
    async fn ends(mut self, name: &Name) -> Result<Begun, Status> {
        match self.stream.message().await? {
            None => Ok(self),
            Some(_) => Err(breach(name, "more after its digest")),
        }
    }

    /// Writes the whole stream. Returns the digest of the bytes that arrived and the digest that
    /// the client announced. Fails as soon as more than `size` bytes arrive. On return nothing uses
    /// `room` any more, so that the client can retry after a failure.
    async fn write(
        self,
        name: &Name,
        room: impl Room,
        size: Option<u64>,
    ) -> Result<(Digest, Digest), Status> {
        let mut writer = Writer::start(room, self.body);
        let taken = self.take(name, &mut writer, size).await;
        let written = writer.finish().await;
        let Some(promised) = taken? else {
            // The disk failed, and the next line returns the error.
            written.map_err(|error| status("write", name, &error))?;
            return Err(Status::internal(format!("cannot write '{name}': the writer stopped")));
        };
        Ok((written.map_err(|error| status("write", name, &error))?, promised))
    }

    /// Passes the whole stream to the writer. Returns the digest that the client announced, or
    /// `None` if the writer has stopped.
    async fn take(
        mut self,
        name: &Name,
        writer: &mut Writer,
        size: Option<u64>,
    ) -> Result<Option<Digest>, Status> {
        let mut arrived = 0;
        loop {
            if !self.data.is_empty() {
                arrived += self.data.len() as u64;
                if size.is_some_and(|size| arrived > size) {
                    announced(name, size, arrived)?;
                }
                if writer.push(std::mem::take(&mut self.data)).await.is_err() {
                    return Ok(None);
                }
            }
            if let Some(promised) = self.digest {
                self.ends(name).await?;
                return Ok(Some(promised));
            }
            match self.stream.message().await? {
                Some(PutRequest { head: None, data, digest }) => {
                    self.data = data;
                    self.digest = digest.map(Digest::from);
                }
                Some(_) => return Err(breach(name, "a second head")),
                None => {
                    let message =
                        format!("the transfer of '{name}' ended early; nothing was stored");
                    return Err(Status::aborted(message));
                }
            }
        }
    }
}

/// Checks that the length is the announced length.
fn announced(name: &Name, size: Option<u64>, arrived: u64) -> Result<(), Status> {
    match size {
        Some(size) if size != arrived => Err(Status::invalid_argument(format!(
            "'{name}' was announced with {size} bytes, and {arrived} came; nothing was stored"
        ))),
        _ => Ok(()),
    }
}
