//! Names of objects, and escaping of text for display.
//!
//! Names come from untrusted peers in both directions: a client may try to leave the server's root,
//! and a server may try to make `get` write outside its target directory. Both sides parse names
//! with [`Name::parse`].

use std::fmt;

/// Escapes text without cutting it, for listings.
pub(crate) use tonic_rdma_doctor::Escaped;

/// Maximum length of a component in bytes, which is NAME_MAX of common file systems.
const MAX_COMPONENT: usize = 255;
/// Maximum length of a name in bytes: below PATH_MAX, which includes the final NUL.
pub(crate) const MAX_NAME: usize = 4000;
/// The server's directory for incomplete files. The first component of an object's name must not be
/// this name, whatever the case of its letters.
pub(crate) const PRIVATE_DIR: &str = ".rpc-demo-tmp";

/// A validated name: relative, UTF-8, with components separated by `/`. No component is empty, `.`
/// or `..`.
///
/// A backslash is an ordinary character on Unix. A name with a backslash is refused on systems
/// where a backslash separates paths.
#[derive(Clone, Debug, PartialEq, Eq, PartialOrd, Ord)]
pub(crate) struct Name(String);

/// Why a text is not a valid name.
#[derive(Clone, Copy, Debug, PartialEq, Eq, thiserror::Error)]
pub(crate) enum NameError {
    #[error("it is empty")]
    Empty,
    #[error("it begins with '/', and names are relative to the server's root")]
    Absolute,
    #[error("it has an empty component ('//' or a '/' at the end)")]
    EmptyComponent,
    #[error("it has a component '{0}'")]
    Dots(&'static str),
    #[error("it contains a NUL character")]
    Nul,
    #[error("it contains a backslash, which separates paths on this system")]
    Backslash,
    #[error("a component of it has {0} bytes, more than {MAX_COMPONENT}")]
    LongComponent(usize),
    #[error("it has {0} bytes, more than {MAX_NAME}")]
    Long(usize),
    #[error("'{PRIVATE_DIR}' is reserved for the server's own files")]
    Private,
}

impl Name {
    /// Validates `text`.
    pub(crate) fn parse(text: &str) -> Result<Name, NameError> {
        if text.is_empty() {
            return Err(NameError::Empty);
        }
        if text.len() > MAX_NAME {
            return Err(NameError::Long(text.len()));
        }
        if text.contains('\0') {
            return Err(NameError::Nul);
        }
        if cfg!(windows) && text.contains(['\\', ':']) {
            return Err(NameError::Backslash);
        }
        if text.starts_with('/') {
            return Err(NameError::Absolute);
        }
        for component in text.split('/') {
            match component {
                "" => return Err(NameError::EmptyComponent),
                "." => return Err(NameError::Dots(".")),
                ".." => return Err(NameError::Dots("..")),
                long if long.len() > MAX_COMPONENT => {
                    return Err(NameError::LongComponent(long.len()));
                }
                _ => {}
            }
        }
        // Some file systems are case-insensitive.
        if text.split('/').next().is_some_and(|first| first.eq_ignore_ascii_case(PRIVATE_DIR)) {
            return Err(NameError::Private);
        }
        Ok(Name(text.to_owned()))
    }

    /// The name as text.
    pub(crate) fn as_str(&self) -> &str {
        &self.0
    }

    /// The directory part (empty for the root) and the last component.
    pub(crate) fn split(&self) -> (&str, &str) {
        self.0.rsplit_once('/').unwrap_or(("", &self.0))
    }

    /// Returns the name `self/below`, if it is valid.
    pub(crate) fn join(&self, below: &str) -> Result<Name, NameError> {
        Name::parse(&format!("{}/{below}", self.0))
    }

    /// The part of `other` after `self/`; `None` if `other` is not below `self`.
    pub(crate) fn below<'a>(&self, other: &'a Name) -> Option<&'a str> {
        other.0.strip_prefix(&self.0)?.strip_prefix('/')
    }
}

impl fmt::Display for Name {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        Shown(&self.0).fmt(f)
    }
}

/// A hash (FNV-1a) for file names. The hash must not change between versions of the program.
pub(crate) fn hash(name: &str) -> u64 {
    name.bytes().fold(0xcbf2_9ce4_8422_2325, |hash, byte| {
        (hash ^ u64::from(byte)).wrapping_mul(0x0000_0100_0000_01b3)
    })
}

/// Untrusted text for one line of a terminal: control characters are escaped, and long text is cut
/// in the middle.
pub(crate) struct Shown<'a>(pub(crate) &'a str);

/// Maximum number of characters that [`Shown`] keeps, before escaping.
const SHOWN_CHARS: usize = 240;

impl fmt::Display for Shown<'_> {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        let at = |n: usize| self.0.char_indices().nth(n).map_or(self.0.len(), |(at, _)| at);
        let count = self.0.chars().count();
        if count <= SHOWN_CHARS {
            return Escaped(self.0).fmt(f);
        }
        let (begin, end) = (at(SHOWN_CHARS / 2), at(count - SHOWN_CHARS / 2));
        write!(f, "{}...{}", Escaped(&self.0[..begin]), Escaped(&self.0[end..]))
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn takes_what_is_a_name() {
        for good in
            ["a", "a/b/c", ".hidden", "...", "a..b", "ü/é 😀", "a\\..\\b", "new\nline", " ", "-x"]
        {
            assert_eq!(Name::parse(good).unwrap().as_str(), good);
        }
        assert!(Name::parse(&"x".repeat(255)).is_ok());
        assert!(Name::parse("x/".repeat(1999).trim_end_matches('/')).is_ok());
    }

    #[test]
    fn refuses_what_could_lead_out() {
        for (bad, why) in [
            ("", NameError::Empty),
            ("/", NameError::Absolute),
            ("/etc/passwd", NameError::Absolute),
            ("a//b", NameError::EmptyComponent),
            ("a/", NameError::EmptyComponent),
            (".", NameError::Dots(".")),
            ("..", NameError::Dots("..")),
            ("a/../b", NameError::Dots("..")),
            ("a/..", NameError::Dots("..")),
            ("./a", NameError::Dots(".")),
            ("a\0b", NameError::Nul),
            (".rpc-demo-tmp", NameError::Private),
            (".rpc-demo-tmp/x", NameError::Private),
            (".RPC-demo-TMP/x", NameError::Private),
        ] {
            assert_eq!(Name::parse(bad), Err(why), "{bad:?}");
        }
        assert_eq!(Name::parse(&"x".repeat(256)), Err(NameError::LongComponent(256)));
        assert_eq!(Name::parse(&"x/".repeat(2001)), Err(NameError::Long(4002)));
    }

    #[test]
    fn parts_and_below() {
        let name = Name::parse("a/b/c").unwrap();
        assert_eq!(name.split(), ("a/b", "c"));
        assert_eq!(Name::parse("a").unwrap().split(), ("", "a"));
        let top = Name::parse("a").unwrap();
        assert_eq!(top.below(&name), Some("b/c"));
        assert_eq!(top.below(&Name::parse("ab/c").unwrap()), None);
        assert_eq!(top.below(&top), None);
        assert_eq!(top.join("x").unwrap().as_str(), "a/x");
        assert!(top.join("../x").is_err());
    }

    #[test]
    fn the_hash_stays_the_same() {
        assert_eq!(hash(""), 0xcbf2_9ce4_8422_2325);
        assert_eq!(hash("a"), 0xaf63_dc4c_8601_ec8c);
        assert_eq!(hash("foobar"), 0x8594_4171_f739_67e8);
    }

    #[test]
    fn shows_no_control_characters() {
        assert_eq!(Shown("a\nb\u{1b}[31m\u{202e}é").to_string(), "a\\nb\\u{1b}[31m\\u{202e}é");
        let long = "x".repeat(1000);
        assert_eq!(Shown(&long).to_string().len(), SHOWN_CHARS + 3);
        assert_eq!(Escaped(&long).to_string().len(), 1000);
    }
}
