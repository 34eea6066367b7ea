//! The command `rpc-demo stat`.

use crate::cli::{Asked, Stat};
use crate::failure::Failure;
use crate::names::{Escaped, Name, Shown};
use crate::pb::entry::Kind;
use crate::pb::{Checksum, StatRequest};
use crate::{entry, net, output};

/// Prints all properties of the named entry.
pub(crate) async fn run(args: Stat) -> Result<(), Failure> {
    let Stat { name, asked: Asked { json, remote } } = args;
    let name = name.strip_suffix('/').unwrap_or(&name);
    let name = Name::parse(name).map_err(|error| Failure::name(name, error))?;
    let connection = net::connect(&remote.server, &remote.path).await?;
    let request =
        StatRequest { name: name.as_str().to_owned(), checksum: Checksum::Computed.into() };
    let what = format!("cannot describe '{name}'");
    let answer = connection.store().stat(request).await;
    let answer = answer.map_err(|status| Failure::status(&what, &status))?.into_inner();
    let Some(found) = answer.entry else {
        return Err(Failure::new(
            what,
            "the server does not say what it is",
            "see the server's log",
        ));
    };
    if json {
        return output::json(&entry::Json::of(&found));
    }
    let kind = found.kind();
    output::line(format_args!("name      {}", Escaped(&found.name)))?;
    output::line(format_args!("kind      {}", entry::kind_name(kind)))?;
    if kind == Kind::File {
        output::line(format_args!("size      {} bytes", found.size))?;
        output::line(format_args!("crc32c    {}", entry::crc32c(&found)))?;
    }
    if let Some(mode) = entry::attributes(&found).mode {
        output::line(format_args!("mode      {mode:04o} ({})", entry::mode(&found)))?;
    }
    if let Some(modified) = entry::attributes(&found).modified {
        output::line(format_args!("modified  {}", entry::rfc3339(modified)))?;
    }
    if !found.note.is_empty() {
        output::line(format_args!("note      {}", Shown(&found.note)))?;
    }
    Ok(())
}
