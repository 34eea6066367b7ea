//! `rpc-demo get`.

use crate::cli::Get;
use crate::digest::Digest;
use crate::failure::Failure;
use crate::ls;
use crate::names::{Name, Shown};
use crate::net::{self, Connection, Direction, Meter};
use crate::output;
use crate::pb::entry::Kind;
use crate::pb::get_response::Part;
use crate::pb::{Entry, GetHeader, GetRequest, GetResponse};
use crate::progress::Progress;
use crate::sink::{Pending, Writer};
use crate::summary::{Summary, Tally};
use crate::tree::shown;
use cap_std::ambient_authority;
use cap_std::fs::Dir;
use std::io;
use std::path::{Path, PathBuf};
use std::sync::Arc;
use std::sync::atomic::{AtomicU64, Ordering};
use std::time::Instant;
use tonic::Streaming;

/// Fetches what the flags name.
pub(crate) async fn run(args: Get) -> Result<(), Failure> {
    let name = Name::parse(&args.name).map_err(|error| Failure::name(&args.name, error))?;
    let connection = net::connect(&args.remote).await?;
    let what = format!("cannot get '{name}'");
    let mut entries =
        ls::all(&connection, Some(&name)).await.map_err(|status| Failure::status(&what, &status))?;
    if entries.is_empty() {
        return Err(Failure::new(what, "the server does not say what it is", "see the server's log"));
    }
    let first = entries.remove(0);
    let job = Job { connection: &connection, chunk: args.chunks.chunk_size };
    let meter = Meter::start(&connection, Direction::Received);
    let began = Instant::now();
    let tally = match first.kind() {
        Kind::File => {
            let progress = Progress::start(Some(first.size));
            let target = Target::of(&args.path)?;
            let digest = job.file(&name, &target, &progress).await?;
            Tally { bytes: digest.size, files: 1, ..Tally::default() }
        }
        Kind::Directory => job.tree(&name, &entries, &args.path).await?,
        _ => {
            return Err(Failure::new(what, format!("it is {}", Shown(&first.note)), "only files are served"));
        }
    };
    let (elapsed, route) = (began.elapsed(), meter.route());
    let summary = Summary { verb: "get", name: name.as_str(), tally, elapsed, route };
    output::line(format_args!("{summary}"))
}

/// Where a file goes: an open directory, and a name in it.
struct Target {
    dir: Arc<Dir>,
    last: String,
    shown: String,
}

impl Target {
    /// A path that the user gave: its directory must be there.
    fn of(path: &Path) -> Result<Target, Failure> {
        let shown = shown(path);
        let what = || format!("cannot write {shown}");
        if path.is_dir() {
            return Err(Failure::new(what(), "it is a directory", "name the file to write"));
        }
        let Some(last) = path.file_name() else {
            return Err(Failure::usage(what(), "it names no file", "name the file to write"));
        };
        let last = last
            .to_str()
            .ok_or_else(|| Failure::usage(what(), "its name is not UTF-8", "use another name"))?;
        let parent = match path.parent() {
            Some(parent) if !parent.as_os_str().is_empty() => parent,
            _ => Path::new("."),
        };
        let dir = Dir::open_ambient_dir(parent, ambient_authority())
            .map_err(|error| Failure::io(format!("{}: its directory cannot be opened", what()), &error))?;
        Ok(Target { dir: Arc::new(dir), last: last.to_owned(), shown })
    }
}

/// What all files of one command share.
struct Job<'a> {
    connection: &'a Connection,
    chunk: usize,
}

impl Job<'_> {
    async fn tree(&self, name: &Name, entries: &[Entry], path: &Path) -> Result<Tally, Failure> {
        // Nothing is fetched when something is sure to be missing.
        if let Some(entry) = entries.iter().find(|entry| entry.kind() == Kind::Unreadable) {
            let what = format!("cannot get '{}'", Shown(&entry.name));
            return Err(Failure::new(
                what,
                Shown(&entry.note),
                "check the permissions under the server's root",
            ));
        }
        let failed =
            |error: io::Error| Failure::io(format!("cannot write to the directory {}", shown(path)), &error);
        std::fs::create_dir_all(path).map_err(failed)?;
        let root = Dir::open_ambient_dir(path, ambient_authority()).map_err(failed)?;
        let total = entries.iter().map(|entry| entry.size).fold(0, u64::saturating_add);
        let progress = Progress::start(Some(total));
        let mut tally = Tally::default();
        for entry in entries {
            if entry.kind() == Kind::Other {
                tracing::warn!("'{}' on the server is left out: {}", Shown(&entry.name), Shown(&entry.note));
                tally.skipped += 1;
                continue;
            }
            // The server's word is no better than a stranger's: no name of its making leads out of `path`.
            let below = Name::parse(&entry.name).ok().filter(|full| name.below(full).is_some());
            let Some((full, below)) = below.as_ref().and_then(|full| Some((full, name.below(full)?))) else {
                let why = format!("the server lists '{}', which is not below it", Shown(&entry.name));
                return Err(Failure::new(format!("cannot get '{name}'"), why, "do not trust this server"));
            };
            match entry.kind() {
                Kind::Directory => {
                    make_dir(&root, below).map_err(|error| cannot_write(path, below, &error))?;
                    tally.directories += 1;
                }
                Kind::File => {
                    let target = Target::below(&root, path, below)?;
                    tally.bytes += self.file(full, &target, &progress).await?.size;
                    tally.files += 1;
                }
                Kind::Other | Kind::Unreadable | Kind::Unspecified => {
                    let why = format!("the server does not say what '{full}' is");
                    return Err(Failure::new(format!("cannot get '{name}'"), why, "see the server's log"));
                }
            }
        }
        Ok(tally)
    }

    async fn file(&self, name: &Name, target: &Target, progress: &Progress) -> Result<Digest, Failure> {
        let what = || format!("cannot get '{name}' as {}", target.shown);
        progress.file(name.as_str());
        let chunk_size = u32::try_from(self.chunk).unwrap_or_default();
        let request = GetRequest { name: name.as_str().to_owned(), chunk_size };
        let status = |status| Failure::status(what(), &status);
        let mut stream = self.connection.store.clone().get(request).await.map_err(status)?.into_inner();
        let Some(GetResponse { part: Some(Part::Header(header)) }) =
            stream.message().await.map_err(status)?
        else {
            return Err(breach(what(), "its answer does not begin with a header"));
        };
        let write_failed = |error: io::Error| Failure::io(format!("cannot write {}", target.shown), &error);
        let pending = temporary(target, &header).map_err(write_failed)?;
        let mut writer = Writer::start(pending);
        let promised = match receive(&mut stream, &mut writer, progress).await {
            Ok(promised) => promised,
            Err(Received::Status(error)) => return Err(status(error)),
            Err(Received::Breach(breached)) => return Err(breach(what(), breached)),
            Err(Received::DiskFailed) => {
                // The disk failed; this says how.
                writer.finish().await.map_err(write_failed)?;
                return Err(Failure::new(what(), "the writer stopped", ""));
            }
        };
        let pending = writer.finish().await.map_err(write_failed)?;
        if pending.digest() != promised || promised.size != header.size {
            let why = format!(
                "{} came where {promised} was sent and {} bytes were announced; nothing was kept",
                pending.digest(),
                header.size
            );
            return Err(Failure::new(what(), why, "get it again"));
        }
        let (dir, last) = (target.dir.clone(), target.last.clone());
        tokio::task::spawn_blocking(move || pending.place(&dir, &last))
            .await
            .map_err(io::Error::other)
            .and_then(|placed| placed)
            .map_err(write_failed)?;
        Ok(promised)
    }
}

impl Target {
    /// A file below a tree's directory, whose own directories are made as needed.
    fn below(root: &Dir, path: &Path, below: &str) -> Result<Target, Failure> {
        let failed = |error| cannot_write(path, below, &error);
        let (parent, last) = below.rsplit_once('/').unwrap_or((".", below));
        make_dir(root, parent).map_err(failed)?;
        let dir = root.open_dir(parent).map_err(failed)?;
        Ok(Target { dir: Arc::new(dir), last: last.to_owned(), shown: shown(&path.join(below)) })
    }
}

fn cannot_write(path: &Path, below: &str, error: &io::Error) -> Failure {
    let full: PathBuf = path.join(below);
    Failure::io(format!("cannot write {}", shown(&full)), error)
}

fn make_dir(root: &Dir, path: &str) -> io::Result<()> {
    if root.is_dir(path) { Ok(()) } else { root.create_dir_all(path) }
}

fn breach(what: String, breached: &str) -> Failure {
    Failure::new(what, format!("the server breaks the protocol: {breached}"), "is it an rpc-demo server?")
}

/// A file beside the target, under a name that is free.
fn temporary(target: &Target, header: &GetHeader) -> io::Result<Pending> {
    static NEXT: AtomicU64 = AtomicU64::new(0);
    loop {
        let number = NEXT.fetch_add(1, Ordering::Relaxed);
        let temp = format!(".rpc-demo-{}-{number}.part", std::process::id());
        match Pending::create(target.dir.clone(), temp, Some(header.mode)) {
            // An earlier process of this number was killed and left it.
            Err(error) if error.kind() == io::ErrorKind::AlreadyExists && number < 100_000 => {}
            other => return other,
        }
    }
}

/// Why a stream did not come to its end.
enum Received {
    Status(tonic::Status),
    Breach(&'static str),
    DiskFailed,
}

async fn receive(
    stream: &mut Streaming<GetResponse>,
    writer: &mut Writer,
    progress: &Progress,
) -> Result<Digest, Received> {
    let promised = loop {
        match stream.message().await.map_err(Received::Status)?.and_then(|answer| answer.part) {
            Some(Part::Chunk(chunk)) => {
                let length = chunk.len();
                writer.push(chunk).await.map_err(|_| Received::DiskFailed)?;
                progress.add(length);
            }
            Some(Part::Trailer(trailer)) => break Digest::from(trailer),
            Some(Part::Header(_)) => return Err(Received::Breach("a second header")),
            None => return Err(Received::Breach("its answer ends without a trailer")),
        }
    };
    match stream.message().await.map_err(Received::Status)? {
        None => Ok(promised),
        Some(_) => Err(Received::Breach("more after the trailer")),
    }
}
