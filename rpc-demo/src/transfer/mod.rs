//! Transfers files to objects, objects to files, and objects to objects.
//!
//! | module | what |
//! |---|---|
//! | `item` | a file to transfer |
//! | `origin`, `target` | source and target of a transfer |
//! | `pieces` | the data of a transfer, piece by piece |
//! | `whole` | transfers a file, an object or a range in one call |
//! | `ranged` | transfers a large file or object in ranges |
//! | `job` | what all items of one command share: limits, counts, progress |
//!
//! A [`Plan`] lists the files and directories to transfer. The files are divided into units. A unit
//! is a file or a range of a large file. A fixed number of tasks transfers the units in order. The
//! first failure ends all tasks.

mod item;
mod job;
mod origin;
mod pieces;
mod ranged;
mod target;
mod whole;

use std::sync::{Arc, Mutex, PoisonError};

pub(crate) use item::Item;
use item::is_there;
pub(crate) use job::{Job, Verb};
pub(crate) use origin::Origin;
pub(crate) use pieces::Pieces;
use ranged::Large;
pub(crate) use target::{LocalFile, Target};
use tokio::task::JoinSet;
pub(crate) use whole::send;

use crate::attributes::Attributes;
use crate::failure::Failure;
use crate::pb::ObjectHead;
use crate::pb::put_request::Head;
use crate::ranges::Ranges;

/// A directory that the receiver creates.
#[derive(Clone)]
pub(crate) struct Directory {
    pub(crate) target: Target,
    /// Mode and modification time to set once the directory's content is complete.
    pub(crate) attributes: Attributes,
    /// Whether no transferred file or directory lies in this directory, so that it must be created
    /// explicitly.
    pub(crate) empty: bool,
    /// Whether the directory is the root of a tree. The command line names such a directory, and
    /// the summary does not count it.
    pub(crate) top: bool,
}

/// Everything that a command transfers.
#[derive(Default)]
pub(crate) struct Plan {
    /// The files, in the order of their transfer.
    pub(crate) items: Vec<Item>,
    /// The directories, parents before their children.
    pub(crate) directories: Vec<Directory>,
    /// Number of links and special files that are left out.
    pub(crate) skipped: u64,
}

impl Plan {
    /// Bytes of all files, if all sizes are known.
    pub(crate) fn bytes(&self) -> Option<u64> {
        self.items
            .iter()
            .map(|item| item.size)
            .try_fold(0_u64, |sum, size| Some(sum.saturating_add(size?)))
    }

    /// Transfers everything.
    pub(crate) async fn run(self, job: Arc<Job>) -> Result<(), Failure> {
        let Plan { items, directories, skipped } = self;
        job.skipped(skipped);
        // A directory that its owner cannot write to is made writable during the transfer. Creating
        // the root of a tree first also shows whether its name is valid at the target.
        for directory in &directories {
            let closed = directory.attributes.mode.is_some_and(|mode| mode & 0o200 == 0);
            if closed || directory.empty || directory.top {
                directory.target.make_directory(closed).await?;
            }
        }
        let units = items.into_iter().flat_map({
            let job = job.clone();
            move |item| units(&job, item)
        });
        each(&job, units, |job, unit| async move {
            match unit {
                Unit::Whole(item) => one(&job, *item).await,
                Unit::Range(large, index) => {
                    let _turn = large.turn(&job).await;
                    large.range(&job, index).await
                }
            }
        })
        .await?;
        // Children come first, because a mode may make a directory inaccessible.
        for directory in directories.into_iter().rev() {
            directory.target.set_attributes(directory.attributes).await?;
            if !directory.top {
                job.directory_done();
            }
        }
        Ok(())
    }
}

enum Unit {
    Whole(Box<Item>),
    Range(Arc<Large>, usize),
}

fn units(job: &Job, item: Item) -> Box<dyn Iterator<Item = Unit> + Send> {
    let size =
        item.size.filter(|size| *size > job.range_size && !matches!(item.origin, Origin::Stdin));
    let Some(size) = size else { return Box::new(std::iter::once(Unit::Whole(Box::new(item)))) };
    let ranges = Ranges::near(size, job.range_size);
    let large = Arc::new(Large::new(job, item, ranges));
    Box::new((0..ranges.count()).map(move |index| Unit::Range(large.clone(), index)))
}

/// Runs `work` for all `units`, with the job's parallelism. The first failure ends all tasks.
pub(crate) async fn each<T, I, F, W>(job: &Arc<Job>, units: I, work: F) -> Result<(), Failure>
where
    T: Send,
    I: Iterator<Item = T> + Send + 'static,
    F: Fn(Arc<Job>, T) -> W + Clone + Send + 'static,
    W: Future<Output = Result<(), Failure>> + Send,
{
    let units = Arc::new(Mutex::new(units.fuse()));
    // Dropping the set ends its tasks.
    let mut workers = JoinSet::new();
    for _ in 0..job.jobs {
        let (units, work, job) = (units.clone(), work.clone(), job.clone());
        workers.spawn(async move {
            loop {
                let next = units.lock().unwrap_or_else(PoisonError::into_inner).next();
                match next {
                    Some(unit) => work(job.clone(), unit).await?,
                    None => return Ok(()),
                }
            }
        });
    }
    while let Some(ended) = workers.join_next().await {
        ended.map_err(|error| Failure::new("the transfer failed", error, ""))??;
    }
    Ok(())
}

/// Transfers one file in one call.
async fn one(job: &Job, item: Item) -> Result<(), Failure> {
    if job.resume && is_there(&item, item.size).await? {
        job.kept(item.size.unwrap_or_default());
        return Ok(());
    }
    let what = job.what(&item);
    let bar = job.progress.file(&item.shown(), item.size.unwrap_or(u64::MAX));
    let to = item.target.connection();
    let (known, pieces) = item.origin.whole(what.clone(), job.chunk, to).await?;
    let digest = match &item.target {
        Target::Object(connection, name) => {
            // A local file's attributes are read when it is opened. The attributes of an object
            // come from the listing.
            let attributes = match item.origin {
                Origin::Object(..) => item.attributes,
                _ => known.attributes,
            };
            let head = ObjectHead {
                name: name.as_str().to_owned(),
                size: known.size,
                attributes: Some(attributes.into()),
            };
            send(connection, Head::Object(head), pieces, &what, &bar).await?
        }
        Target::File(place) => {
            let size = known.size.unwrap_or_default();
            whole::receive(place, pieces, size, item.attributes, &what, &bar).await?
        }
    };
    job.moved(digest.size);
    job.file_done();
    Ok(())
}
