//! `rpc-demo ls`.

use crate::cli::Ls;
use crate::failure::Failure;
use crate::names::{Escaped, Name, Shown};
use crate::net::{self, Connection};
use crate::output;
use crate::pb::entry::Kind;
use crate::pb::{Entry, ListRequest};
use std::io::{self, BufWriter, Write};
use tonic::Status;

/// Lists what the flags name: bytes and name, a `/` after the name of a directory.
pub(crate) async fn run(args: Ls) -> Result<(), Failure> {
    // People write the '/' that the listing shows.
    let prefix = args.prefix.as_deref().map(|prefix| prefix.strip_suffix('/').unwrap_or(prefix));
    let name = match prefix {
        None | Some("") => None,
        Some(prefix) => Some(Name::parse(prefix).map_err(|error| Failure::name(prefix, error))?),
    };
    let connection = net::connect(&args.remote).await?;
    let what = || name.as_ref().map_or("cannot list".to_owned(), |name| format!("cannot list '{name}'"));
    let mut unreadable = Vec::new();
    let mut out = BufWriter::new(io::stdout().lock());
    let request =
        ListRequest { name: name.as_ref().map(|name| name.as_str().to_owned()).unwrap_or_default() };
    let status = |status| Failure::status(what(), &status);
    let mut stream = connection.store.clone().list(request).await.map_err(status)?.into_inner();
    while let Some(batch) = stream.message().await.map_err(status)? {
        for entry in batch.entries {
            let name = Escaped(&entry.name);
            let written = match entry.kind() {
                Kind::File => writeln!(out, "{:>16}  {name}", entry.size),
                Kind::Directory => writeln!(out, "{:>16}  {name}/", "-"),
                Kind::Other => writeln!(out, "{:>16}  {name} ({})", "?", Shown(&entry.note)),
                Kind::Unreadable | Kind::Unspecified => {
                    unreadable.push(entry);
                    Ok(())
                }
            };
            if written.as_ref().is_err_and(|error| error.kind() == io::ErrorKind::BrokenPipe) {
                return Ok(());
            }
            output::checked(written)?;
        }
    }
    output::checked(out.flush())?;
    match unreadable.as_slice() {
        [] => Ok(()),
        [first, more @ ..] => {
            let others = if more.is_empty() { String::new() } else { format!(" and {} others", more.len()) };
            let what = format!("cannot list '{}'{others}", Shown(&first.name));
            Err(Failure::new(what, Shown(&first.note), "check the permissions under the server's root"))
        }
    }
}

/// The whole listing of an object or directory.
pub(crate) async fn all(connection: &Connection, name: Option<&Name>) -> Result<Vec<Entry>, Status> {
    let request = ListRequest { name: name.map(|name| name.as_str().to_owned()).unwrap_or_default() };
    let mut stream = connection.store.clone().list(request).await?.into_inner();
    let mut entries = Vec::new();
    while let Some(batch) = stream.message().await? {
        entries.extend(batch.entries);
    }
    Ok(entries)
}
