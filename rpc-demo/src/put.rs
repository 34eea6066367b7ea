//! `rpc-demo put`.

use crate::cli::Put;
use crate::digest::Digest;
use crate::failure::Failure;
use crate::names::Name;
use crate::net::{self, Connection, Direction, Meter};
use crate::output;
use crate::pb::{MakeDirectoryRequest, PutHeader, PutRequest, put_request::Part};
use crate::progress::Progress;
use crate::source::{Piece, Source};
use crate::summary::{Summary, Tally};
use crate::tree::{Tree, shown};
use std::fs::File;
use std::io;
use std::os::fd::AsFd;
use std::os::unix::fs::PermissionsExt;
use std::path::Path;
use std::pin::pin;
use std::time::Instant;
use tokio::sync::mpsc;
use tokio_stream::wrappers::ReceiverStream;

/// Stores what the flags name.
pub(crate) async fn run(args: Put) -> Result<(), Failure> {
    let name = Name::parse(&args.name).map_err(|error| Failure::name(&args.name, error))?;
    let metadata = if is_stdin(&args.source) { None } else { Some(look(&args.source)?) };
    // What is wrong with the tree is better said before anything is sent.
    let tree = match metadata {
        Some(metadata) if metadata.is_dir() => Some(Tree::walk(&args.source)?),
        _ => None,
    };
    let connection = net::connect(&args.remote).await?;
    let meter = Meter::start(&connection, Direction::Sent);
    let began = Instant::now();
    let chunk = args.chunks.chunk_size;
    let tally = match tree {
        Some(tree) => {
            let progress = Progress::start(Some(tree.bytes()));
            put_tree(&connection, &args.source, &name, &tree, chunk, &progress).await?
        }
        None => {
            let local = Local::open(&args.source)?;
            let progress = Progress::start(local.source.size);
            let digest = put_file(&connection, local, &name, chunk, &progress).await?;
            Tally { bytes: digest.size, files: 1, ..Tally::default() }
        }
    };
    let (elapsed, route) = (began.elapsed(), meter.route());
    let summary = Summary { verb: "put", name: name.as_str(), tally, elapsed, route };
    output::line(format_args!("{summary}"))
}

fn is_stdin(path: &Path) -> bool {
    path.as_os_str() == "-"
}

fn look(path: &Path) -> Result<std::fs::Metadata, Failure> {
    std::fs::metadata(path).map_err(|error| Failure::io(format!("cannot read {}", shown(path)), &error))
}

async fn put_tree(
    connection: &Connection,
    dir: &Path,
    name: &Name,
    tree: &Tree,
    chunk: usize,
    progress: &Progress,
) -> Result<Tally, Failure> {
    let mut tally = Tally { skipped: tree.skipped, ..Tally::default() };
    make_directory(connection, name).await?;
    for (at, node) in tree.nodes.iter().enumerate() {
        let path = dir.join(&node.path);
        let target = name.join(&node.path).map_err(|error| {
            let what = format!(
                "cannot put {}: '{}/{}' cannot be the name of an object",
                shown(&path),
                name,
                node.path
            );
            Failure::new(what, error, "rename it, or move it elsewhere")
        })?;
        if node.size.is_some() {
            let local = Local::open(&path)?;
            tally.bytes += put_file(connection, local, &target, chunk, progress).await?.size;
            tally.files += 1;
        } else {
            tally.directories += 1;
            // One that holds something is made with what it holds.
            let holds = |next: &crate::tree::Node| Path::new(&next.path).starts_with(&node.path);
            if !tree.nodes.get(at + 1).is_some_and(holds) {
                make_directory(connection, &target).await?;
            }
        }
    }
    Ok(tally)
}

async fn make_directory(connection: &Connection, name: &Name) -> Result<(), Failure> {
    let request = MakeDirectoryRequest { name: name.as_str().to_owned() };
    let made = connection.store.clone().make_directory(request).await;
    made.map(drop).map_err(|status| Failure::status(format!("cannot make the directory '{name}'"), &status))
}

/// A file of this side, open.
struct Local {
    shown: String,
    source: Source,
    mode: Option<u32>,
}

impl Local {
    fn open(path: &Path) -> Result<Local, Failure> {
        let stdin = is_stdin(path);
        let shown = if stdin { "stdin".to_owned() } else { shown(path) };
        let open = || -> io::Result<(File, std::fs::Metadata)> {
            let file =
                if stdin { File::from(io::stdin().as_fd().try_clone_to_owned()?) } else { File::open(path)? };
            let metadata = file.metadata()?;
            Ok((file, metadata))
        };
        let (file, metadata) = open().map_err(|error| Failure::io(format!("cannot read {shown}"), &error))?;
        let regular = metadata.is_file();
        // Files under /proc say 0 and have content all the same.
        let size = (regular && !stdin && metadata.len() > 0).then_some(metadata.len());
        let mode = (regular && !stdin).then(|| metadata.permissions().mode() & 0o777);
        Ok(Local { shown, source: Source { file, size, regular }, mode })
    }
}

/// Why no more is sent.
enum Reading {
    /// All was sent.
    Done(Digest),
    /// The file could not be read.
    Failed(io::Error),
    /// It is not as long as it was announced: so many bytes were read.
    Changed(u64),
    /// The call has ended and takes no more.
    Stopped,
}

async fn put_file(
    connection: &Connection,
    local: Local,
    name: &Name,
    chunk: usize,
    progress: &Progress,
) -> Result<Digest, Failure> {
    let Local { shown, source, mode } = local;
    let what = format!("cannot put {shown} as '{name}'");
    progress.file(name.as_str());
    let size = source.size;
    let header = PutHeader { name: name.as_str().to_owned(), size, mode };
    let mut pieces = source.start(chunk);
    // The chunks that wait are those of the source.
    let (feed, requests) = mpsc::channel(1);
    let read = async move {
        let mut part = Part::Header(header);
        let mut read = 0;
        loop {
            let end = if let Part::Trailer(digest) = &part { Some(Digest::from(*digest)) } else { None };
            let sent = if let Part::Chunk(chunk) = &part { chunk.len() } else { 0 };
            if feed.send(PutRequest { part: Some(part) }).await.is_err() {
                return Reading::Stopped;
            }
            progress.add(sent);
            if let Some(digest) = end {
                return Reading::Done(digest);
            }
            part = match pieces.recv().await {
                // Without its trailer the server drops what it has.
                Some(Ok(Piece::Chunk(chunk))) => {
                    read += chunk.len() as u64;
                    if size.is_some_and(|size| read > size) {
                        return Reading::Changed(read);
                    }
                    Part::Chunk(chunk)
                }
                Some(Ok(Piece::End(_))) if size.is_some_and(|size| read != size) => {
                    return Reading::Changed(read);
                }
                Some(Ok(Piece::End(digest))) => Part::Trailer(digest.into()),
                Some(Err(error)) => return Reading::Failed(error),
                None => return Reading::Failed(io::Error::other("the reader stopped")),
            };
        }
    };
    let mut store = connection.store.clone();
    let mut call = pin!(store.put(ReceiverStream::new(requests)));
    let mut read = pin!(read);
    let mut reading = None;
    let answer = loop {
        tokio::select! {
            ended = &mut read, if reading.is_none() => reading = Some(ended),
            answer = &mut call => break answer,
        }
    };
    let sent = match (reading, answer) {
        (Some(Reading::Failed(error)), _) => return Err(Failure::io(format!("cannot read {shown}"), &error)),
        (Some(Reading::Changed(read)), _) => {
            let why = match size.unwrap_or_default() {
                had if read > had => format!("it grew past the {had} bytes it had"),
                had => format!("it ended after {read} of the {had} bytes it had"),
            };
            return Err(Failure::new(what, why, "put it again when nothing writes to it"));
        }
        (_, Err(status)) => return Err(Failure::status(what, &status)),
        (Some(Reading::Done(sent)), Ok(answer)) => (sent, answer.into_inner().stored.map(Digest::from)),
        (Some(Reading::Stopped) | None, Ok(_)) => {
            return Err(Failure::new(
                what,
                "the server answered before it had all of it",
                "see the server's log",
            ));
        }
    };
    match sent {
        (sent, Some(stored)) if sent == stored => Ok(sent),
        (sent, stored) => {
            let stored = stored.map_or("nothing".to_owned(), |stored| stored.to_string());
            Err(Failure::new(
                what,
                format!("the server stored {stored} where {sent} was sent"),
                "put it again",
            ))
        }
    }
}
