//! Log lines that a peer can cause go through the throttle: in the libraries, only `throttled!` of
//! the crate memory calls `warn!`, `error!`, `info!` and `event!` of tracing.
//!
//! Which log lines a peer can cause depends on the code around them, so the rule holds for all log
//! lines.

use proc_macro2::{TokenStream, TokenTree};

use crate::files::Source;

/// Folders of the libraries.
pub const FOLDERS: &[&str] = &[
    "memory/src/",
    "transport/proto/src/",
    "transport/codec/src/",
    "transport/fabric/src/",
    "transport/tonic/src/",
];

/// The file that defines the throttle.
const THROTTLE: &str = "memory/src/log_throttle.rs";

/// Macros of tracing that log above DEBUG, or may do so.
const MACROS: &[&str] = &["warn", "error", "info", "event"];

/// Whether the rule holds for a file.
pub fn holds(source: &Source) -> bool {
    let path = source.path.as_str();
    let is_test = path.contains("/tests/") || path.ends_with("/tests.rs");
    source.is_rust() && !is_test && path != THROTTLE && FOLDERS.iter().any(|f| path.starts_with(f))
}

/// Returns the lines of a Rust file that log without the throttle, and the number of calls to the
/// throttle.
///
/// # Errors
///
/// If the file cannot be split into Rust tokens.
pub fn lines(source: &Source) -> Result<(Vec<usize>, usize), String> {
    let text = source.text.strip_prefix('\u{feff}').unwrap_or(&source.text);
    let tokens: TokenStream = text.parse().map_err(|error| format!("{}: {error}", source.path))?;
    let (mut found, mut throttled) = (Vec::new(), 0);
    walk(tokens, &mut found, &mut throttled);
    Ok((found, throttled))
}

fn walk(tokens: TokenStream, found: &mut Vec<usize>, throttled: &mut usize) {
    let tokens: Vec<_> = tokens.into_iter().collect();
    for (at, token) in tokens.iter().enumerate() {
        let is_call = matches!(
            (tokens.get(at + 1), tokens.get(at + 2)),
            (Some(TokenTree::Punct(mark)), Some(TokenTree::Group(_))) if mark.as_char() == '!'
        );
        match token {
            TokenTree::Ident(word) if is_call && word == "throttled" => *throttled += 1,
            TokenTree::Ident(word) if is_call && MACROS.iter().any(|name| word == name) => {
                found.push(word.span().start().line);
            }
            // Report an import of one of the macros as well: under another name, it would hide
            // calls.
            TokenTree::Ident(word) if word == "tracing" => found.extend(import(&tokens[at + 1..])),
            TokenTree::Group(group) => walk(group.stream(), found, throttled),
            _ => {}
        }
    }
}

/// The line of an import of one of the macros; `rest` follows `tracing`.
fn import(rest: &[TokenTree]) -> Option<usize> {
    let is_macro = |token: &TokenTree| matches!(token, TokenTree::Ident(word) if MACROS.iter().any(|name| word == name));
    let [TokenTree::Punct(_), TokenTree::Punct(_), first, next, ..] = rest else { return None };
    let is_call = matches!(next, TokenTree::Punct(mark) if mark.as_char() == '!');
    let imports = match first {
        TokenTree::Group(list) => list.stream().into_iter().any(|token| is_macro(&token)),
        one => is_macro(one) && !is_call,
    };
    imports.then(|| first.span().start().line)
}
