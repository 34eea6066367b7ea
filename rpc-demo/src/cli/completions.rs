//! Shell completion scripts.

use clap::CommandFactory;
use clap_complete::Shell;

use super::Cli;

const NAME: &str = "rpc-demo";
/// The program's name without a hyphen.
const PLAIN: &str = "rpc_demo";

/// Generates the script for `shell`.
///
/// clap_complete's bash script handles a hyphen in the program's name inconsistently, and then
/// completes nothing after a subcommand. So the script is generated for a name without a hyphen and
/// registered for the real name.
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
