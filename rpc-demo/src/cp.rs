//! `rpc-demo cp` copies objects from one server to another, or on one server. The data passes
//! through this program.

use std::sync::Arc;
use std::time::Instant;

use crate::cli::Cp;
use crate::costs::Costs;
use crate::destination::{Destination, all_different};
use crate::entry::attributes;
use crate::failure::Failure;
use crate::listing::{self, Found, Listed};
use crate::names::{Name, Shown};
use crate::net::{self, Direction, Meter};
use crate::output;
use crate::pb::Checksum;
use crate::summary::{Routes, Summary};
use crate::transfer::{Directory, Item, Job, Origin, Plan, Target, Verb};

/// Copies the named objects and directories.
pub(crate) async fn run(args: Cp) -> Result<(), Failure> {
    let Cp { names, target, from, to, path, transfer } = args;
    transfer.files.apply();
    let destination = Destination::parse(&target, names.len())?;
    let mut pairs = Vec::new();
    for name in &names {
        let name = Name::parse(name).map_err(|error| Failure::name(name, error))?;
        let new = destination.name(Some(name.split().1), &format!("'{name}'"))?;
        let same = to.as_ref().is_none_or(|to| *to == from);
        if same && (name == new || name.below(&new).is_some()) {
            let what = format!("cannot copy '{name}' as '{new}'");
            return Err(Failure::usage(
                what,
                "it would be copied into itself",
                "name another server with --to",
            ));
        }
        pairs.push((name, new));
    }
    all_different(pairs.iter().map(|(_, new)| new.as_str()))?;
    let source = net::connect(&from, &path).await?;
    let sink = net::connect(to.as_deref().unwrap_or(&from), &path).await?;
    let (read, written) =
        (Meter::start(&source, Direction::Received), Meter::start(&sink, Direction::Sent));
    let (began, before) = (Instant::now(), Costs::now());
    let checksum = if transfer.resume { Checksum::Computed } else { Checksum::Recorded };
    let mut plan = Plan::default();
    for (name, new) in &pairs {
        let what = format!("cannot copy '{name}' as '{new}'");
        let listed = Listed::of(&source, name, checksum, &what).await?;
        let mut there = match transfer.resume {
            true => listing::there(&sink, new, &what).await?,
            false => Default::default(),
        };
        plan.skipped += listed.skipped;
        let empty: Vec<_> =
            (0..listed.found.len()).map(|index| listed.is_empty_at(index)).collect();
        for (Found { name, below, directory, entry }, empty) in listed.found.into_iter().zip(empty)
        {
            let top = below.is_empty();
            let full = if top { Ok(new.clone()) } else { new.join(&below) };
            let full = full.map_err(|error| {
                let what =
                    format!("{what}: '{new}/{}' cannot be the name of an object", Shown(&below));
                Failure::new(what, error, "copy it to a shorter name")
            })?;
            let attributes = attributes(&entry);
            let there = there.remove(full.as_str());
            let target = Target::Object(sink.clone(), full);
            if directory {
                plan.directories.push(Directory { target, attributes, empty, top });
            } else {
                let origin = Origin::Object(source.clone(), name);
                let (size, crc32c) = (Some(entry.size), entry.crc32c);
                plan.items.push(Item { origin, target, size, attributes, crc32c, there });
            }
        }
    }
    let job = Arc::new(Job::new(Verb::Copy, &transfer, plan.bytes()));
    plan.run(job.clone()).await?;
    let routes = Routes::Two { from: Box::new(read.route()), to: Box::new(written.route()) };
    let name = target.trim_end_matches('/');
    let name = if name.is_empty() { "/" } else { name };
    let (elapsed, costs) = (began.elapsed(), Costs::now() - before);
    let summary = Summary { verb: "cp", name, tally: job.tally(), elapsed, costs, routes };
    if transfer.json {
        output::json(&summary.json())
    } else {
        output::line(format_args!("{summary}"))
    }
}
