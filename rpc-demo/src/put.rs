//! The command `rpc-demo put`.

use std::path::{Path, PathBuf};
use std::sync::Arc;
use std::time::Instant;

use crate::attributes::Attributes;
use crate::cli::Put;
use crate::costs::Costs;
use crate::destination::{Destination, all_different};
use crate::failure::Failure;
use crate::names::Name;
use crate::net::{self, Connection, Direction, Meter};
use crate::summary::{Routes, Summary};
use crate::transfer::{Directory, Item, Job, Origin, Plan, Target, Verb};
use crate::tree::{Tree, shown};
use crate::{listing, output};

/// Stores the named files and directories.
pub(crate) async fn run(args: Put) -> Result<(), Failure> {
    let Put { sources, target, transfer, remote } = args;
    transfer.files.apply();
    let destination = Destination::parse(&target, sources.len())?;
    // Errors in a local tree are reported before anything is sent.
    let sources: Vec<_> = sources
        .into_iter()
        .map(|path| Source::look(path, &destination))
        .collect::<Result<_, _>>()?;
    all_different(sources.iter().map(|source| source.name.as_str()))?;
    let connection = net::connect(&remote.server, &remote.path).await?;
    let meter = Meter::start(&connection, Direction::Sent);
    let (began, before) = (Instant::now(), Costs::now());
    let mut plan = Plan::default();
    for source in sources {
        source.plan(&connection, transfer.resume, &mut plan).await?;
    }
    let job = Arc::new(Job::new(Verb::Put, &transfer, plan.bytes()));
    plan.run(job.clone()).await?;
    let (elapsed, costs, route) = (began.elapsed(), Costs::now() - before, meter.route());
    let name = target.trim_end_matches('/');
    let name = if name.is_empty() { "/" } else { name };
    let (tally, routes) = (job.tally(), Routes::One(Box::new(route)));
    let summary = Summary { verb: "put", name, tally, elapsed, costs, routes };
    if transfer.json {
        output::json(&summary.json())
    } else {
        output::line(format_args!("{summary}"))
    }
}

struct Source {
    path: PathBuf,
    name: Name,
    kind: SourceKind,
}

enum SourceKind {
    Stdin,
    File { size: Option<u64>, attributes: Attributes },
    Directory { tree: Tree, attributes: Attributes },
}

impl Source {
    fn look(path: PathBuf, destination: &Destination) -> Result<Source, Failure> {
        if path.as_os_str() == "-" {
            return Ok(Source {
                name: destination.name(None, "stdin")?,
                path,
                kind: SourceKind::Stdin,
            });
        }
        let last = path.file_name().map(|last| last.to_string_lossy());
        let name = destination.name(last.as_deref(), &shown(&path))?;
        let metadata = std::fs::metadata(&path)
            .map_err(|error| Failure::io(format!("cannot read {}", shown(&path)), &error))?;
        let attributes = Attributes::of(&metadata);
        let kind = if metadata.is_dir() {
            SourceKind::Directory { tree: Tree::walk(&path)?, attributes }
        } else {
            // Files under /proc report size 0 but have content, and a pipe has no size.
            let size = (metadata.is_file() && metadata.len() > 0).then_some(metadata.len());
            SourceKind::File { size, attributes }
        };
        Ok(Source { path, name, kind })
    }

    async fn plan(
        self,
        connection: &Connection,
        resume: bool,
        plan: &mut Plan,
    ) -> Result<(), Failure> {
        let Source { path, name, kind } = self;
        let mut there = match resume {
            true => {
                listing::there(
                    connection,
                    &name,
                    &format!("cannot put {} as '{name}'", shown(&path)),
                )
                .await?
            }
            false => Default::default(),
        };
        let mut item = |origin: Origin, name: Name, size, attributes| Item {
            there: there.remove(name.as_str()),
            target: Target::Object(connection.clone(), name),
            crc32c: None,
            origin,
            size,
            attributes,
        };
        match kind {
            SourceKind::Stdin => {
                plan.items.push(item(Origin::Stdin, name, None, Attributes::default()))
            }
            SourceKind::File { size, attributes } => {
                plan.items.push(item(Origin::File(path), name, size, attributes));
            }
            SourceKind::Directory { tree, attributes } => {
                plan.skipped += tree.skipped;
                let target = Target::Object(connection.clone(), name.clone());
                plan.directories.push(Directory { target, attributes, empty: false, top: true });
                for (index, node) in tree.nodes.iter().enumerate() {
                    let full = below(&path, &name, &node.path)?;
                    match node.size {
                        Some(size) => {
                            let origin = Origin::File(path.join(&node.path));
                            plan.items.push(item(origin, full, Some(size), node.attributes));
                        }
                        None => plan.directories.push(Directory {
                            target: Target::Object(connection.clone(), full),
                            attributes: node.attributes,
                            empty: tree.is_empty_at(index),
                            top: false,
                        }),
                    }
                }
            }
        }
        Ok(())
    }
}

fn below(dir: &Path, name: &Name, path: &str) -> Result<Name, Failure> {
    name.join(path).map_err(|error| {
        let what = format!(
            "cannot put {}: '{name}/{}' cannot be the name of an object",
            shown(&dir.join(path)),
            crate::names::Shown(path)
        );
        Failure::new(what, error, "rename it, or move it elsewhere")
    })
}
