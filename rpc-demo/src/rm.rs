//! The command `rpc-demo rm`.

use serde::Serialize;

use crate::cli::{Asked, Rm};
use crate::failure::Failure;
use crate::names::Name;
use crate::pb::RemoveRequest;
use crate::{net, output};

/// The result as `--json` prints it.
#[derive(Default, Serialize)]
struct Removed {
    command: &'static str,
    files: u64,
    directories: u64,
    bytes: u64,
}

/// Removes the named entries one after the other.
pub(crate) async fn run(args: Rm) -> Result<(), Failure> {
    let Rm { names, recursive, asked: Asked { json, remote } } = args;
    let parse = |name: &String| {
        let bare = name.strip_suffix('/').unwrap_or(name);
        Name::parse(bare).map_err(|error| Failure::name(name, error))
    };
    let names: Vec<_> = names.iter().map(parse).collect::<Result<_, _>>()?;
    let connection = net::connect(&remote.server, &remote.path).await?;
    let mut removed = Removed { command: "rm", ..Removed::default() };
    for name in &names {
        let request = RemoveRequest { name: name.as_str().to_owned(), recursive };
        let answer = connection.store().remove(request).await;
        let answer = answer
            .map_err(|status| Failure::status(format!("cannot remove '{name}'"), &status))?
            .into_inner();
        removed.files += answer.files;
        removed.directories += answer.directories;
        removed.bytes += answer.bytes;
        if !json {
            output::line(format_args!(
                "rm '{name}': {} bytes in {} files, {} directories",
                answer.bytes, answer.files, answer.directories
            ))?;
        }
    }
    if json { output::json(&removed) } else { Ok(()) }
}
