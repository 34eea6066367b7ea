//! Transfers large files and objects in ranges, in parallel and resumably.

use std::io;
use std::ops::ControlFlow;
use std::sync::atomic::{AtomicBool, AtomicUsize, Ordering};
use std::sync::{Arc, Mutex, OnceLock, PoisonError};

use rustix::fs::{FlockOperation, flock};
use tokio::sync::{OnceCell, SemaphorePermit};

use super::item::{Item, is_there};
use super::job::Job;
use super::origin::{Opened, Origin, blocking, checksums};
use super::pieces::breach;
use super::target::{LocalFile, Target};
use super::whole;
use crate::attributes::Attributes;
use crate::digest::Digest;
use crate::failure::Failure;
use crate::net::Connection;
use crate::pb::checksums_request::Of;
use crate::pb::put_request::Head;
use crate::pb::{
    AbortUploadRequest, BeginUploadRequest, FinishUploadRequest, GetHeader, RangeHead,
};
use crate::progress::Bar;
use crate::ranges::Ranges;
use crate::sink::{Part, Pending, Written};
use crate::source;

/// A large file or object in flight. Each free task transfers the next range. The task that comes
/// first begins the transfer, and the task that ends last completes it.
pub(super) struct Large {
    item: Item,
    what: String,
    ranges: Ranges,
    begun: OnceCell<Begun>,
    /// CRC32C of each range that is done.
    done: Vec<OnceLock<u32>>,
    left: AtomicUsize,
    /// The header of the object being read, from its first response.
    header: OnceLock<GetHeader>,
    bar: OnceLock<Bar>,
    /// Whether a range has failed permanently. The data transferred so far is then discarded.
    discarded: AtomicBool,
}

enum Begun {
    /// The target already had the content.
    There,
    Moving(Box<Moving>),
}

struct Moving {
    opened: Option<Opened>,
    into: Into,
    /// When resuming: the CRC32C of each range at the target, and of each range of the object being
    /// read.
    had: Option<(Vec<u32>, Vec<u32>)>,
}

enum Into {
    Upload { connection: Connection, id: String },
    File { place: LocalFile, file: Arc<Written>, pending: Mutex<Option<Pending>> },
}

impl Large {
    pub(super) fn new(job: &Job, item: Item, ranges: Ranges) -> Large {
        Large {
            what: job.what(&item),
            begun: OnceCell::new(),
            done: (0..ranges.count()).map(|_| OnceLock::new()).collect(),
            left: AtomicUsize::new(ranges.count()),
            header: OnceLock::new(),
            bar: OnceLock::new(),
            discarded: AtomicBool::new(false),
            ranges,
            item,
        }
    }

    /// Waits until one more range may be transferred, if both ends are on this host. Dropping the
    /// permit ends the turn.
    pub(super) async fn turn<'a>(&self, job: &'a Job) -> Option<SemaphorePermit<'a>> {
        let Item { origin, target, .. } = &self.item;
        let from = !matches!(origin, Origin::Object(connection, _) if !connection.is_on_one_host());
        let to = !matches!(target, Target::Object(connection, _) if !connection.is_on_one_host());
        // The semaphore is never closed.
        if from && to { job.ranges_on_one_host.acquire().await.ok() } else { None }
    }

    pub(super) async fn range(&self, job: &Job, index: usize) -> Result<(), Failure> {
        let begun = self.begun.get_or_try_init(|| self.begin(job)).await?;
        let Begun::Moving(moving) = begun else { return Ok(()) };
        let moved = async {
            let crc32c = self.moved(job, moving, index).await?;
            if let Some(done) = self.done.get(index) {
                let _ = done.set(crc32c);
            }
            if self.left.fetch_sub(1, Ordering::AcqRel) == 1 {
                self.finish(job, moving).await?;
            }
            Ok(())
        };
        let moved: Result<(), Failure> = moved.await;
        let Err(failure) = &moved else { return moved };
        let discard = !failure.resumable();
        let discarded = if discard {
            self.discarded.swap(true, Ordering::AcqRel)
        } else {
            self.discarded.load(Ordering::Acquire)
        };
        if discarded {
            // This range failed because the upload was aborted. The range that failed first reports
            // the cause, and cancels this task.
            return std::future::pending().await;
        }
        if discard {
            moving.into.discard().await;
        }
        moved
    }

    async fn begin(&self, job: &Job) -> Result<Begun, Failure> {
        if job.resume && is_there(&self.item, Some(self.ranges.size())).await? {
            job.kept(self.ranges.size());
            return Ok(Begun::There);
        }
        let bar =
            self.bar.get_or_init(|| job.progress.file(&self.item.shown(), self.ranges.size()));
        bar.add(0);
        let opened = self.item.origin.open().await?;
        if let Some(opened) = &opened {
            opened.unchanged(self.ranges.size()).map_err(|why| self.changed(why))?;
        }
        let (into, resumed) = match &self.item.target {
            Target::Object(connection, name) => {
                let request = BeginUploadRequest {
                    name: name.as_str().to_owned(),
                    size: self.ranges.size(),
                    range_size: self.ranges.each(),
                    attributes: Some(self.item.attributes.into()),
                    resume: job.resume,
                };
                let answer = connection.store().begin_upload(request).await;
                let answer =
                    answer.map_err(|status| Failure::status(&self.what, &status))?.into_inner();
                (Into::Upload { connection: connection.clone(), id: answer.upload }, answer.resumed)
            }
            Target::File(place) => self.begin_file(job, place).await?,
        };
        let mut had = None;
        if resumed {
            had = Some((
                self.had(&into).await?,
                self.item.origin.object_checksums(&self.what, &self.ranges).await?,
            ));
        }
        Ok(Begun::Moving(Box::new(Moving { opened, into, had })))
    }

    async fn begin_file(&self, job: &Job, place: &LocalFile) -> Result<(Into, bool), Failure> {
        let (here, resume, size) = (place.clone(), job.resume, self.ranges.size());
        let open = move || -> io::Result<_> {
            let mut pending = here.partial()?;
            flock(&***pending.file(), FlockOperation::NonBlockingLockExclusive).map_err(|_| {
                io::Error::new(
                    io::ErrorKind::ResourceBusy,
                    "another rpc-demo is getting it at the same time",
                )
            })?;
            let resumed = resume && pending.file().metadata()?.len() > 0;
            if !resumed {
                // Before any data has arrived, the file is not worth keeping.
                pending.discard();
                pending.file().set_len(0)?;
            }
            pending.file().set_len(size)?;
            Ok((pending, resumed))
        };
        let (pending, resumed) =
            blocking(open).await.map_err(|error| place.cannot_write(&error))?;
        let file = pending.file().clone();
        Ok((Into::File { place: place.clone(), file, pending: Mutex::new(Some(pending)) }, resumed))
    }

    /// The CRC32C of each range at the target.
    async fn had(&self, into: &Into) -> Result<Vec<u32>, Failure> {
        match into {
            Into::Upload { connection, id } => {
                checksums(connection, &self.what, Of::Upload(id.clone()), &self.ranges).await
            }
            Into::File { place, file, .. } => {
                let (file, ranges) = (file.clone(), self.ranges);
                let read = move || {
                    let mut found = Vec::with_capacity(ranges.count());
                    source::checksums(&file, &ranges, |_, digest| {
                        found.push(digest.crc32c);
                        ControlFlow::Continue(())
                    })?;
                    Ok(found)
                };
                blocking(read).await.map_err(|error| place.cannot_write(&error))
            }
        }
    }

    /// Ensures that the target has one range, and returns its CRC32C.
    async fn moved(&self, job: &Job, moving: &Moving, index: usize) -> Result<u32, Failure> {
        let (_, length) = self.ranges.get(index).unwrap_or_default();
        let Moving { opened, into, had } = moving;
        if let Some((had, object)) = had {
            let wanted = match opened {
                Some(opened) => {
                    let read = opened.range_digest(self.ranges, index).await;
                    let failed =
                        |error| Failure::io(format!("cannot read {}", self.item.origin), &error);
                    Some(read.map_err(failed)?)
                        .filter(|digest| digest.size == length)
                        .map(|digest| digest.crc32c)
                }
                None => object.get(index).copied(),
            };
            if let (Some(wanted), Some(had)) = (wanted, had.get(index))
                && wanted == *had
            {
                job.kept_range(length);
                if let Some(bar) = self.bar.get() {
                    bar.kept(length);
                }
                return Ok(wanted);
            }
        }
        let to = self.item.target.connection();
        let read = self
            .item
            .origin
            .range(self.what.clone(), opened.as_ref(), &self.ranges, index, job.chunk, to)
            .await?;
        let (header, mut pieces) = read;
        if let Some(header) = header {
            self.same(header)?;
        }
        let quiet = Bar::none();
        let bar = self.bar.get().unwrap_or(&quiet);
        let digest = match into {
            Into::Upload { connection, id } => {
                let head = Head::Range(RangeHead { upload: id.clone(), index: index as u64 });
                whole::send(connection, head, pieces, &self.what, bar).await?
            }
            Into::File { place, file, pending } => {
                let (offset, _) = self.ranges.get(index).unwrap_or_default();
                let room = Part { file: file.clone(), offset };
                let first = pieces.next().await?;
                let (arrived, promised) =
                    whole::write(place, room, first, pieces, &self.what, bar).await?;
                whole::checked(&self.what, arrived, promised, length)?;
                if let Some(pending) =
                    pending.lock().unwrap_or_else(PoisonError::into_inner).as_mut()
                {
                    pending.keep();
                }
                arrived
            }
        };
        job.moved(digest.size);
        Ok(digest.crc32c)
    }

    /// Checks that all ranges come from the same version of the object, and that the object has the
    /// listed size.
    fn same(&self, header: GetHeader) -> Result<(), Failure> {
        let first = self.header.get_or_init(|| header.clone());
        if header.version == first.version && header.size == self.ranges.size() {
            return Ok(());
        }
        Err(self.changed("it was replaced while it was read".into()))
    }

    fn changed(&self, why: String) -> Failure {
        let cure = match &self.item.origin {
            Origin::Object(..) => "repeat the command",
            _ => "put it again when nothing writes to it",
        };
        Failure::new(&self.what, why, cure).not_resumable()
    }

    async fn finish(&self, job: &Job, moving: &Moving) -> Result<(), Failure> {
        let mut digest = Digest::default();
        for (index, crc32c) in self.done.iter().enumerate() {
            let (_, size) = self.ranges.get(index).unwrap_or_default();
            digest =
                digest.then(Digest { size, crc32c: crc32c.get().copied().unwrap_or_default() });
        }
        if let Some(opened) = &moving.opened {
            opened.unchanged(self.ranges.size()).map_err(|why| self.changed(why))?;
        }
        self.undamaged(digest)?;
        match &moving.into {
            Into::Upload { connection, id } => {
                let request =
                    FinishUploadRequest { upload: id.clone(), digest: Some(digest.into()) };
                let answer = connection.store().finish_upload(request).await;
                let answer =
                    answer.map_err(|status| Failure::status(&self.what, &status))?.into_inner();
                if answer.stored.map(Digest::from) != Some(digest) {
                    return Err(breach(
                        self.what.clone(),
                        "it stored something else than was sent",
                    ));
                }
            }
            Into::File { place, pending, .. } => {
                let pending = pending.lock().unwrap_or_else(PoisonError::into_inner).take();
                let Some(pending) = pending else {
                    return Err(Failure::new(&self.what, "it was given up", "repeat the command"));
                };
                let (here, attributes) = (place.clone(), self.attributes());
                blocking(move || here.place(pending, &attributes))
                    .await
                    .map_err(|error| place.cannot_write(&error))?;
            }
        }
        job.file_done();
        Ok(())
    }

    fn attributes(&self) -> Attributes {
        self.item.attributes
    }

    /// Checks the CRC32C of the whole object against the recorded one. No single range can show
    /// whether the object is damaged.
    fn undamaged(&self, digest: Digest) -> Result<(), Failure> {
        let Origin::Object(_, name) = &self.item.origin else { return Ok(()) };
        // If nothing had to be read, the listing has the record.
        let recorded = match self.header.get() {
            Some(header) => header.crc32c,
            None => self.item.crc32c,
        };
        match recorded {
            Some(recorded) if recorded != digest.crc32c => {
                let why = crate::service::damaged(name, digest.crc32c, recorded);
                Err(Failure::new(&self.what, why, "").not_resumable())
            }
            _ => Ok(()),
        }
    }
}

impl Into {
    /// Discards the data that has arrived.
    async fn discard(&self) {
        match self {
            Into::Upload { connection, id } => {
                let request = AbortUploadRequest { upload: id.clone() };
                if let Err(status) = connection.store().abort_upload(request).await {
                    tracing::debug!("the upload could not be ended: {status}");
                }
            }
            Into::File { pending, .. } => {
                if let Some(mut pending) =
                    pending.lock().unwrap_or_else(PoisonError::into_inner).take()
                {
                    pending.discard();
                }
            }
        }
    }
}
