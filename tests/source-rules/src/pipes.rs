//! Scripts read each pipe to its end.
//!
//! With `pipefail` a pipe fails when its writer dies of SIGPIPE, which happens when the reader has
//! seen enough before the writer has written all. Whether that happens is a matter of chance: `ldd
//! | grep -q` fails once in a hundred runs.

use crate::files::Source;

/// Whether a file is a shell script, or is sourced by scripts. Neither has an extension.
pub fn is_script(source: &Source) -> bool {
    let first = source.text.lines().next().unwrap_or_default();
    let name = source.path.rsplit('/').next().unwrap_or_default();
    first.starts_with('#') && !name.contains('.') || source.path == ".ci/run"
}

/// The numbers of the lines, from 1, with a pipe whose reader may end before its writer.
pub fn cut_short(script: &str) -> Vec<usize> {
    let is_cut_short = |line: &str| {
        let code = line.trim_start();
        !code.starts_with('#') && code.replace("||", "\n").split('|').skip(1).any(ends_early)
    };
    (1..).zip(script.lines()).filter(|(_, line)| is_cut_short(line)).map(|(n, _)| n).collect()
}

/// Whether the command that the text begins with may end before it has read all of its input.
fn ends_early(command: &str) -> bool {
    let mut words = command.split_whitespace();
    match words.next() {
        Some("head") => true,
        Some("grep") => words
            .take_while(|word| word.starts_with('-'))
            .any(|option| !option.starts_with("--") && option.contains('q')),
        _ => false,
    }
}
