//! Command-line errors in one line.

use clap::error::ErrorKind;

use crate::failure::Failure;

/// Parses the command line. `Err` holds the message and the exit code. If help or the version is
/// requested, clap prints it and ends the process with exit code 0.
pub(crate) fn parse<C: clap::Parser>() -> Result<C, Failure> {
    C::try_parse().map_err(|error| match error.kind() {
        ErrorKind::DisplayHelp | ErrorKind::DisplayVersion => error.exit(),
        _ => failure(&error.to_string(), &command_of(std::env::args())),
    })
}

/// The command whose help the error line refers to: `rpc-demo`, or for example `rpc-demo put`.
fn command_of(args: impl Iterator<Item = String>) -> String {
    let known = <super::Cli as clap::CommandFactory>::command();
    let named = args.skip(1).find(|arg| known.find_subcommand(arg).is_some());
    named.map_or("rpc-demo".to_owned(), |name| format!("rpc-demo {name}"))
}

/// Shortens clap's message of several lines to one line with its first paragraph and its
/// suggestions.
fn failure(message: &str, command: &str) -> Failure {
    let mut paragraphs = message.split("\n\n").map(one_line);
    let first = paragraphs.next().unwrap_or_default();
    let what = first.strip_prefix("error: ").unwrap_or(&first).to_owned();
    let more = format!("see `{command} --help`");
    let tips: Vec<_> =
        paragraphs.filter_map(|line| Some(line.strip_prefix("tip: ")?.to_owned())).collect();
    match what.as_str() {
        // Without any argument clap prints the whole help.
        _ if !message.starts_with("error: ") => Failure::usage(
            "no command was given",
            "there is nothing to do",
            "see `rpc-demo --help`",
        ),
        _ if tips.is_empty() => Failure::usage("wrong usage", what, more),
        _ => Failure::usage("wrong usage", what, format!("{}; {more}", tips.join("; "))),
    }
}

fn one_line(paragraph: &str) -> String {
    paragraph.split_whitespace().collect::<Vec<_>>().join(" ")
}

#[cfg(test)]
mod tests {
    use clap::Parser;

    use super::super::Cli;
    use super::*;

    #[test]
    fn is_one_line_that_names_what_is_wrong() {
        let cases: [(&[&str], &[&str]); 6] = [
            (&[], &["no command was given", "`rpc-demo --help`"]),
            (&["fetch"], &["unrecognized subcommand 'fetch'"]),
            (
                &["ls", "--jsn"],
                &["unexpected argument '--jsn'", "'--json'", "`rpc-demo ls --help`"],
            ),
            (&["put", "x"], &["required arguments were not provided", "`rpc-demo put --help`"]),
            (&["put", "x", "y", "--chunk-size", "9"], &["--chunk-size", "4KiB to 3MiB"]),
            (&["get", "x", "y", "--jobs", "0"], &["invalid value '0' for '--jobs <N>'"]),
        ];
        for (args, said) in cases {
            let all = || ["rpc-demo"].into_iter().chain(args.iter().copied());
            let error = Cli::try_parse_from(all()).unwrap_err();
            let line =
                failure(&error.to_string(), &command_of(all().map(str::to_owned))).to_string();
            assert!(!line.contains('\n'), "{line}");
            assert!(said.iter().all(|part| line.contains(part)), "{line}");
        }
    }
}
