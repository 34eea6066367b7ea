//! Scripts that complete commands and flags in a shell.

use clap::CommandFactory;
use clap_complete::Shell;

use super::Cli;

/// The name by which the program is called.
const NAME: &str = "rpc-demo";
/// A name without a hyphen.
const PLAIN: &str = "rpc_demo";

/// The script for `shell`.
///
/// clap_complete's script for bash takes the hyphen of a program's name apart in one place and not
/// in another, and then completes nothing behind a subcommand. It is made for a name without a
/// hyphen, and registered for the right one.
pub(crate) fn completions(shell: Shell) -> Vec<u8> {
    let mut script = Vec::new();
    let name = if shell == Shell::Bash { PLAIN } else { NAME };
    clap_complete::generate(shell, &mut Cli::command().name(name), name, &mut script);
    match shell {
        Shell::Bash => {
            let script = String::from_utf8_lossy(&script);
            script.replace(&format!("default {PLAIN}\n"), &format!("default {NAME}\n")).into_bytes()
        }
        _ => script,
    }
}
