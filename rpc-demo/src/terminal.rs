//! Decides whether stderr and stdout show colours and lines that change, from the user's
//! environment.
//!
//! | variable | effect |
//! |---|---|
//! | `NO_COLOR`, not empty | no colours (<https://no-color.org>) |
//! | `TERM=dumb` | no colours and no bars, because such a terminal shows escape sequences as text |

use std::ffi::{OsStr, OsString};
use std::io::{self, IsTerminal};

/// Whether log lines have colours.
pub(crate) fn has_colors() -> bool {
    io::stderr().is_terminal() && colors(|name| std::env::var_os(name))
}

/// Whether bars can be drawn, which requires a cursor that moves.
pub(crate) fn draws() -> bool {
    io::stderr().is_terminal() && moves(|name| std::env::var_os(name))
}

/// Whether stdout shows a screen that is drawn again and again.
pub(crate) fn draws_on_stdout() -> bool {
    io::stdout().is_terminal() && moves(|name| std::env::var_os(name))
}

/// Whether the screen on stdout has colours.
pub(crate) fn has_colors_on_stdout() -> bool {
    io::stdout().is_terminal() && colors(|name| std::env::var_os(name))
}

/// The columns and rows of stdout's terminal, if the terminal reports them.
pub(crate) fn size_of_stdout() -> Option<(usize, usize)> {
    let (width, height) = terminal_size::terminal_size_of(io::stdout())?;
    Some((width.0.into(), height.0.into()))
}

fn colors(variable: impl Fn(&str) -> Option<OsString>) -> bool {
    variable("NO_COLOR").is_none_or(|value| value.is_empty()) && moves(variable)
}

fn moves(variable: impl Fn(&str) -> Option<OsString>) -> bool {
    variable("TERM").as_deref() != Some(OsStr::new("dumb"))
}

#[cfg(test)]
mod tests {
    use super::*;

    /// Whether there are colours, and whether there are bars, with these values of NO_COLOR and
    /// TERM.
    fn shown(no_color: Option<&str>, term: Option<&str>) -> (bool, bool) {
        let variable = |name: &str| match name {
            "NO_COLOR" => no_color.map(OsString::from),
            "TERM" => term.map(OsString::from),
            other => panic!("unexpected variable {other}"),
        };
        (colors(variable), moves(variable))
    }

    #[test]
    fn the_environment_decides() {
        assert_eq!(shown(None, Some("xterm")), (true, true));
        assert_eq!(shown(Some(""), Some("xterm")), (true, true));
        assert_eq!(shown(Some("0"), Some("xterm")), (false, true));
        assert_eq!(shown(Some("1"), None), (false, true));
        assert_eq!(shown(None, Some("dumb")), (false, false));
        assert_eq!(shown(None, None), (true, true));
    }
}
