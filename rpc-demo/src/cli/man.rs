//! The man pages. A test writes the pages, so that the program does not contain the code that
//! renders the pages.

use std::path::PathBuf;
use std::{env, fs};

use clap::{Command, CommandFactory};

use super::Cli;

/// `make man` sets MAN_PAGES to the directory for the pages.
#[test]
fn each_command_has_a_man_page() {
    let scratch = tempfile::tempdir().unwrap();
    let pages = env::var_os("MAN_PAGES").map_or(scratch.path().to_owned(), PathBuf::from);
    clap_mangen::generate_to(Cli::command(), &pages).unwrap();

    let mut command = Cli::command();
    command.build();
    let commands = command.get_subcommands().filter(|command| command.get_name() != "help");
    let named = commands.map(|command| (format!("rpc-demo-{}", command.get_name()), command));
    for (name, command) in named.chain([("rpc-demo".to_owned(), &command)]) {
        let page = fs::read_to_string(pages.join(format!("{name}.1"))).unwrap();
        let page = page.replace("\\-", "-");
        assert!(page.contains(&format!(".TH {name} 1")), "{name} has no title:\n{page}");
        for flag in flags(command) {
            assert!(page.contains(&format!("--{flag}")), "{name} has no --{flag}:\n{page}");
        }
        for variable in command.get_arguments().filter_map(|arg| arg.get_env()) {
            let variable = variable.to_str().unwrap();
            assert!(page.contains(variable), "{name} has no {variable}:\n{page}");
        }
    }
}

/// The long names of the flags that `--help` shows.
fn flags(command: &Command) -> impl Iterator<Item = &str> {
    command.get_arguments().filter(|arg| !arg.is_hide_set()).filter_map(|arg| arg.get_long())
}
