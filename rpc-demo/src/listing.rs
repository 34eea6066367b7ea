//! The entries that a server has under a name. The server is not trusted: each name that it returns
//! must be the requested name or lie below it.

use std::collections::HashMap;

use tonic::{Code, Status};

use crate::failure::Failure;
use crate::names::{Name, Shown};
use crate::net::Connection;
use crate::pb::entry::Kind;
use crate::pb::{Checksum, Entry, ListRequest};

/// An object, or a directory with everything below it.
pub(crate) struct Listed {
    /// The entries. The entry of the requested name comes first.
    pub(crate) found: Vec<Found>,
    /// Number of links and special files, which are not transferred.
    pub(crate) skipped: u64,
}

/// A file or directory.
pub(crate) struct Found {
    pub(crate) name: Name,
    /// The part of the name after the requested name; empty for the requested name itself.
    pub(crate) below: String,
    pub(crate) directory: bool,
    pub(crate) entry: Entry,
}

impl Listed {
    /// Lists `name` on the server. `what` describes the operation in the error message.
    pub(crate) async fn of(
        connection: &Connection,
        name: &Name,
        checksum: Checksum,
        what: &str,
    ) -> Result<Listed, Failure> {
        let entries = all(connection, name, checksum)
            .await
            .map_err(|status| Failure::status(what, &status))?;
        Listed::check(name, entries, what)
    }

    fn check(name: &Name, entries: Vec<Entry>, what: &str) -> Result<Listed, Failure> {
        // If an entry cannot be read, nothing is fetched.
        if let Some(entry) = entries.iter().find(|entry| entry.kind() == Kind::Unreadable) {
            let what = format!("{what}: '{}' cannot be read", Shown(&entry.name));
            return Err(Failure::new(
                what,
                Shown(&entry.note),
                "check the permissions under the server's root",
            ));
        }
        let mut listed = Listed { found: Vec::new(), skipped: 0 };
        for (index, entry) in entries.into_iter().enumerate() {
            let kind = entry.kind();
            if kind == Kind::Other && index == 0 {
                let why = format!("it is {}", Shown(&entry.note));
                return Err(Failure::new(what, why, "only files are served"));
            }
            if kind == Kind::Other {
                tracing::warn!(
                    "'{}' on the server is left out: {}",
                    Shown(&entry.name),
                    Shown(&entry.note)
                );
                listed.skipped += 1;
                continue;
            }
            let full = Name::parse(&entry.name).ok();
            let below = full.as_ref().and_then(|full| match index {
                0 => (full == name).then(String::new),
                _ => name.below(full).map(str::to_owned),
            });
            let (Some(full), Some(below)) = (full, below) else {
                let why =
                    format!("the server lists '{}', which is not below it", Shown(&entry.name));
                return Err(Failure::new(what, why, "do not trust this server"));
            };
            let known = matches!(kind, Kind::File | Kind::Directory);
            let only = index == 0 || listed.found.first().is_some_and(|first| first.directory);
            if !known || !only {
                let why = format!("the server does not say what '{full}' is");
                return Err(Failure::new(what, why, "see the server's log"));
            }
            listed.found.push(Found {
                name: full,
                below,
                directory: kind == Kind::Directory,
                entry,
            });
        }
        if listed.found.is_empty() {
            return Err(Failure::new(
                what,
                "the server does not say what it is",
                "see the server's log",
            ));
        }
        Ok(listed)
    }

    /// Whether the directory at `index` contains no listed entry.
    pub(crate) fn is_empty_at(&self, index: usize) -> bool {
        let holds = |(found, next): (&Found, &Found)| found.name.below(&next.name).is_some();
        !self.found.get(index).zip(self.found.get(index + 1)).is_some_and(holds)
    }
}

/// Returns the files that exist at or below a target name. The key is the file's name. The map is
/// empty if the target does not exist.
pub(crate) async fn there(
    connection: &Connection,
    name: &Name,
    what: &str,
) -> Result<HashMap<String, Entry>, Failure> {
    match all(connection, name, Checksum::Computed).await {
        Ok(entries) => {
            let files = entries.into_iter().filter(|entry| entry.kind() == Kind::File);
            Ok(files.map(|entry| (entry.name.clone(), entry)).collect())
        }
        Err(status) if status.code() == Code::NotFound => Ok(HashMap::new()),
        Err(status) => Err(Failure::status(what, &status)),
    }
}

async fn all(
    connection: &Connection,
    name: &Name,
    checksum: Checksum,
) -> Result<Vec<Entry>, Status> {
    let request = ListRequest { name: name.as_str().to_owned(), checksum: checksum.into() };
    let mut stream = connection.store().list(request).await?.into_inner();
    let mut entries = Vec::new();
    while let Some(batch) = stream.message().await? {
        entries.extend(batch.entries);
    }
    Ok(entries)
}
