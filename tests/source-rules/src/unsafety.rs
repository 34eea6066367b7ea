//! `unsafe` lives in memory/, transport/fabric/ and transport/rdma-sys/ only, and clippy requires a
//! SAFETY comment at each block.

use proc_macro2::{TokenStream, TokenTree};

use crate::files::Source;

/// Where `unsafe` may be.
pub const ALLOWED: &[&str] = &["memory/", "transport/fabric/", "transport/rdma-sys/"];

/// The lint that requires a SAFETY comment at each block.
const LINT: &str = "undocumented_unsafe_blocks";

/// The lines of a Rust file with the word `unsafe`, in code and in macros.
///
/// # Errors
///
/// If the file cannot be split into Rust tokens.
pub fn lines(source: &Source) -> Result<Vec<usize>, String> {
    fn walk(tokens: TokenStream, found: &mut Vec<usize>) {
        for token in tokens {
            match token {
                TokenTree::Ident(word) if word == "unsafe" => found.push(word.span().start().line),
                TokenTree::Group(group) => walk(group.stream(), found),
                _ => {}
            }
        }
    }
    let text = source.text.strip_prefix('\u{feff}').unwrap_or(&source.text);
    let tokens: TokenStream = text.parse().map_err(|error| format!("{}: {error}", source.path))?;
    let mut found = Vec::new();
    walk(tokens, &mut found);
    Ok(found)
}

/// Lists the places that switch clippy's lint off: members of the workspace that do not inherit the
/// workspace's lints, a workspace that does not deny it, and attributes that allow it.
pub fn lint_is_off(sources: &[Source]) -> Vec<String> {
    let mut found = Vec::new();
    let manifest = |path: &str| sources.iter().find(|source| source.path == path);
    let root = manifest("Cargo.toml").map_or("", |source| source.text.as_str());
    if !root.contains(&format!("{LINT} = \"deny\"")) {
        found.push(format!("Cargo.toml: clippy's {LINT} is not denied"));
    }
    let members = root.split_once("members = [").and_then(|(_, rest)| rest.split_once(']'));
    let members = members.map_or("", |(members, _)| members);
    for member in members.split(',').map(|member| member.trim().trim_matches('"')) {
        let path = format!("{member}/Cargo.toml");
        let inherits = |source: &Source| source.text.contains("[lints]\nworkspace = true");
        if !member.is_empty() && !manifest(&path).is_some_and(inherits) {
            found.push(format!("{path}: does not inherit the workspace's lints"));
        }
    }
    let allows = format!("allow(clippy::{LINT}");
    let allowing = sources.iter().filter(|s| s.is_rust() && s.text.contains(&allows));
    let ours = |source: &&Source| !source.path.starts_with("tests/source-rules/");
    found.extend(allowing.filter(ours).map(|s| format!("{}: allows clippy's {LINT}", s.path)));
    found
}
