//! The target argument of a command: the name of an object, or a directory, in a store.

use std::collections::HashSet;

use crate::failure::Failure;
use crate::names::{Name, NameError, Shown};

/// Where items are stored.
pub(crate) enum Destination {
    /// The only item gets this name.
    As(Name),
    /// Each item keeps the last component of its name and is stored in this directory; `None` is
    /// the root.
    Into(Option<Name>),
}

impl Destination {
    /// Parses `target`, under which a command stores `count` items. If `count` is above 1, `target`
    /// is a directory even without a final slash.
    pub(crate) fn parse(target: &str, count: usize) -> Result<Destination, Failure> {
        let parse = |text: &str| Name::parse(text).map_err(|error| Failure::name(target, error));
        match target.strip_suffix('/') {
            Some("") => Ok(Destination::Into(None)),
            Some(directory) => Ok(Destination::Into(Some(parse(directory)?))),
            None if count > 1 => Ok(Destination::Into(Some(parse(target)?))),
            None => Ok(Destination::As(parse(target)?)),
        }
    }

    /// Returns the name for an item. `last` is the last component of the item's own name, if it has
    /// one.
    pub(crate) fn name(&self, last: Option<&str>, shown: &str) -> Result<Name, Failure> {
        let directory = match self {
            Destination::As(name) => return Ok(name.clone()),
            Destination::Into(directory) => directory,
        };
        let refused = |error: NameError| {
            let what = format!("{shown} cannot be the name of an object");
            Failure::usage(what, error, "rename it, or move it elsewhere")
        };
        let Some(last) = last else {
            let why = "it has no name of its own for a directory";
            return Err(Failure::usage(
                format!("{shown} cannot go there"),
                why,
                "give it a target without a / at its end",
            ));
        };
        match directory {
            Some(directory) => directory.join(last).map_err(refused),
            None => Name::parse(last).map_err(refused),
        }
    }
}

/// Fails if two items would get the same name.
pub(crate) fn all_different<'a>(names: impl Iterator<Item = &'a str>) -> Result<(), Failure> {
    let mut seen = HashSet::new();
    for name in names {
        if !seen.insert(name) {
            let what = format!("two of them would get the name '{}'", Shown(name));
            return Err(Failure::usage(
                what,
                "only one could be kept",
                "give them in two commands",
            ));
        }
    }
    Ok(())
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn as_cp_has_it() {
        let name = |target: &str, count, last| {
            Destination::parse(target, count)
                .and_then(|to| to.name(last, "it"))
                .map(|name| name.to_string())
        };
        assert_eq!(name("a/b", 1, Some("x")).unwrap(), "a/b");
        assert_eq!(name("a/b", 2, Some("x")).unwrap(), "a/b/x");
        assert_eq!(name("a/b/", 1, Some("x")).unwrap(), "a/b/x");
        assert_eq!(name("/", 1, Some("x")).unwrap(), "x");
        assert_eq!(name("a", 1, None).unwrap(), "a");
        for (target, count, last) in [
            ("a/", 1, None),
            ("", 1, Some("x")),
            ("//", 1, Some("x")),
            ("../", 1, Some("x")),
            ("/", 1, Some("..")),
        ] {
            assert!(name(target, count, last).is_err(), "{target}");
        }
        assert!(all_different(["a", "b"].into_iter()).is_ok());
        assert!(all_different(["a", "b", "a"].into_iter()).is_err());
    }
}
