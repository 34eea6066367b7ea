//! The command `rpc-demo get`.

use std::path::{Path, PathBuf};
use std::sync::Arc;
use std::time::Instant;

use cap_std::ambient_authority;
use cap_std::fs::Dir;

use crate::cli::Get;
use crate::costs::Costs;
use crate::destination::all_different;
use crate::entry::attributes;
use crate::failure::Failure;
use crate::listing::{Found, Listed};
use crate::names::Name;
use crate::net::{self, Connection, Direction, Meter};
use crate::output;
use crate::pb::Checksum;
use crate::summary::{Routes, Summary};
use crate::transfer::{Directory, Item, Job, LocalFile, Origin, Plan, Target, Verb};
use crate::tree::shown;

/// Fetches the named objects and directories.
pub(crate) async fn run(args: Get) -> Result<(), Failure> {
    let Get { names, target, transfer, remote } = args;
    transfer.files.apply();
    let parse = |name: &String| Name::parse(name).map_err(|error| Failure::name(name, error));
    let names: Vec<_> = names.iter().map(parse).collect::<Result<_, _>>()?;
    let into = names.len() > 1 || target.as_os_str().as_encoded_bytes().ends_with(b"/");
    if into {
        all_different(names.iter().map(|name| name.split().1))?;
    }
    let connection = net::connect(&remote.server, &remote.path).await?;
    let meter = Meter::start(&connection, Direction::Received);
    let (began, before) = (Instant::now(), Costs::now());
    let checksum = if transfer.resume { Checksum::Computed } else { Checksum::Unspecified };
    let mut plan = Plan::default();
    // Nothing is created locally until all names have been found on the server.
    let mut listed = Vec::new();
    for name in &names {
        let list = Listed::of(&connection, name, checksum, &format!("cannot get '{name}'")).await?;
        let path = if into { target.join(name.split().1) } else { target.clone() };
        listed.push((list, path));
    }
    if into {
        make_root(&target)?;
    }
    for (list, path) in listed {
        add(&connection, list, &path, &mut plan)?;
    }
    let job = Arc::new(Job::new(Verb::Get, &transfer, plan.bytes()));
    plan.run(job.clone()).await?;
    let (elapsed, costs, route) = (began.elapsed(), Costs::now() - before, meter.route());
    let name = names.iter().map(Name::as_str).collect::<Vec<_>>().join("' '");
    let (tally, routes) = (job.tally(), Routes::One(Box::new(route)));
    let summary = Summary { verb: "get", name: &name, tally, elapsed, costs, routes };
    if transfer.json {
        output::json(&summary.json())
    } else {
        output::line(format_args!("{summary}"))
    }
}

fn add(
    connection: &Connection,
    listed: Listed,
    path: &Path,
    plan: &mut Plan,
) -> Result<(), Failure> {
    plan.skipped += listed.skipped;
    let tree = listed.found.first().is_some_and(|first| first.directory);
    let (root, path) = if tree { (make_root(path)?, path.to_owned()) } else { file_root(path)? };
    let place = |below: &str| {
        Target::File(LocalFile {
            root: root.clone(),
            // For a single file, `below` is the file's name, so this path is the file's directory.
            path: if tree {
                path.clone()
            } else {
                path.parent().unwrap_or(Path::new("")).to_owned()
            },
            below: below.to_owned(),
        })
    };
    let empty: Vec<_> = (0..listed.found.len()).map(|index| listed.is_empty_at(index)).collect();
    for (Found { name, below, directory, entry }, empty) in listed.found.into_iter().zip(empty) {
        let attributes = attributes(&entry);
        if directory {
            let top = below.is_empty();
            plan.directories.push(Directory { target: place(&below), attributes, empty, top });
            continue;
        }
        let last = path.file_name().map(|last| last.to_string_lossy()).unwrap_or_default();
        plan.items.push(Item {
            origin: Origin::Object(connection.clone(), name),
            target: place(if tree { &below } else { &last }),
            size: Some(entry.size),
            attributes,
            crc32c: entry.crc32c,
            there: None,
        });
    }
    Ok(())
}

/// Opens the directory for a tree, and creates it first if it does not exist.
fn make_root(path: &Path) -> Result<Arc<Dir>, Failure> {
    let open = || {
        std::fs::create_dir_all(path)?;
        Dir::open_ambient_dir(path, ambient_authority())
    };
    let failed =
        |error| Failure::io(format!("cannot write to the directory {}", shown(path)), &error);
    open().map(Arc::new).map_err(failed)
}

/// Opens the existing directory in which a single file is to be created. Also returns the file's
/// path.
fn file_root(path: &Path) -> Result<(Arc<Dir>, PathBuf), Failure> {
    let what = || format!("cannot write {}", shown(path));
    if path.is_dir() {
        return Err(Failure::new(
            what(),
            "it is a directory",
            "name the file to write, or add a / to put it in there",
        ));
    }
    match path.file_name().map(|last| last.to_str()) {
        None => return Err(Failure::usage(what(), "it names no file", "name the file to write")),
        Some(None) => {
            return Err(Failure::usage(what(), "its name is not UTF-8", "use another name"));
        }
        Some(Some(_)) => {}
    }
    let parent = match path.parent() {
        Some(parent) if !parent.as_os_str().is_empty() => parent,
        _ => Path::new("."),
    };
    let dir = Dir::open_ambient_dir(parent, ambient_authority()).map_err(|error| {
        Failure::io(format!("{}: its directory cannot be opened", what()), &error)
    })?;
    Ok((Arc::new(dir), path.to_owned()))
}
