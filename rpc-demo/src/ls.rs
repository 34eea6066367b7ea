//! The command `rpc-demo ls`.

use std::io::{self, BufWriter, Write};

use crate::cli::{Asked, Ls};
use crate::failure::Failure;
use crate::names::{Escaped, Name, Shown};
use crate::pb::entry::Kind;
use crate::pb::{Checksum, Entry, ListRequest};
use crate::{entry, net, output};

/// Output format.
#[derive(Clone, Copy)]
enum Form {
    Short,
    Long,
    Json,
}

/// Lists the objects that the flags select.
pub(crate) async fn run(args: Ls) -> Result<(), Failure> {
    let Ls { prefix, long, checksum, asked: Asked { json, remote } } = args;
    // Users copy the '/' that a listing shows after a directory, so accept it.
    let prefix = prefix.as_deref().map(|prefix| prefix.strip_suffix('/').unwrap_or(prefix));
    let name = match prefix {
        None | Some("") => None,
        Some(prefix) => Some(Name::parse(prefix).map_err(|error| Failure::name(prefix, error))?),
    };
    let form = match (json, long || checksum) {
        (true, _) => Form::Json,
        (false, true) => Form::Long,
        (false, false) => Form::Short,
    };
    let checksum = match (checksum, form) {
        (true, _) => Checksum::Computed,
        (false, Form::Short) => Checksum::Unspecified,
        (false, _) => Checksum::Recorded,
    };
    let connection = net::connect(&remote.server, &remote.path).await?;
    let what =
        || name.as_ref().map_or("cannot list".to_owned(), |name| format!("cannot list '{name}'"));
    let mut unreadable = Vec::new();
    let mut out = BufWriter::new(io::stdout().lock());
    let request = ListRequest {
        name: name.as_ref().map(|name| name.as_str().to_owned()).unwrap_or_default(),
        checksum: checksum.into(),
    };
    let status = |status| Failure::status(what(), &status);
    let mut stream = connection.store().list(request).await.map_err(status)?.into_inner();
    while let Some(batch) = stream.message().await.map_err(status)? {
        for entry in batch.entries {
            let written = write(&mut out, &entry, form);
            if written.as_ref().is_err_and(|error| error.kind() == io::ErrorKind::BrokenPipe) {
                return Ok(());
            }
            output::checked(written)?;
            if matches!(entry.kind(), Kind::Unreadable | Kind::Unspecified) {
                unreadable.push(entry);
            }
        }
    }
    output::checked(out.flush())?;
    match unreadable.as_slice() {
        [] => Ok(()),
        [first, more @ ..] => {
            let others =
                if more.is_empty() { String::new() } else { format!(" and {} others", more.len()) };
            let what = format!("cannot list '{}'{others}", Shown(&first.name));
            Err(Failure::new(
                what,
                Shown(&first.note),
                "check the permissions under the server's root",
            ))
        }
    }
}

fn write(out: &mut impl Write, entry: &Entry, form: Form) -> io::Result<()> {
    let kind = entry.kind();
    let name = Escaped(&entry.name);
    let (size, mark, note) = match kind {
        Kind::File => (entry.size.to_string(), "", None),
        Kind::Directory => ("-".to_owned(), "/", None),
        Kind::Other => ("?".to_owned(), "", Some(Shown(&entry.note))),
        // Unreadable entries are reported at the end.
        Kind::Unreadable | Kind::Unspecified if !matches!(form, Form::Json) => return Ok(()),
        Kind::Unreadable | Kind::Unspecified => (String::new(), "", None),
    };
    match form {
        Form::Json => {
            serde_json::to_writer(&mut *out, &entry::Json::of(entry))?;
            return writeln!(out);
        }
        Form::Short => write!(out, "{size:>16}  {name}{mark}")?,
        Form::Long => write!(
            out,
            "{} {size:>16} {:>19} {:>8}  {name}{mark}",
            entry::mode(entry),
            entry::modified(entry),
            entry::crc32c(entry)
        )?,
    }
    match note {
        Some(note) => writeln!(out, " ({note})"),
        None => writeln!(out),
    }
}
