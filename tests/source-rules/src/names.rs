//! Names of types: in the library a type name means one thing.
//!
//! Two types may share a name, for example if each operating system has its own type. Three types
//! may not. In the library and in the programs, no type has a name that says nothing without its
//! module.

use std::collections::{BTreeMap, BTreeSet};

use syn::Item;

use crate::files::Source;
use crate::modules::{attributes, is_for_tests};
use crate::size;

/// Folders of the library.
pub const FOLDERS: &[&str] = &["memory/", "transport/"];
/// Folders of the programs.
pub const PROGRAMS: &[&str] = &["rpc-demo/", "benches/"];
/// Number of files that may define a type of the same name.
pub const MAX_FILES: usize = 2;
/// Names that say nothing without their module. No type may have one of these names.
pub const BARE: &[&str] = &["State", "Entry", "Kind", "Place", "Held", "Next", "Settings"];

/// For each name of a type, the files of the library that define a type with this name, not
/// counting tests. The map also contains the files of the programs that define a type with a name
/// of [`BARE`].
///
/// # Errors
///
/// When a file does not parse.
pub fn types(sources: &[Source]) -> Result<BTreeMap<String, BTreeSet<String>>, String> {
    let crates = size::crates(sources);
    let mut types: BTreeMap<String, BTreeSet<String>> = BTreeMap::new();
    for source in sources {
        let [library, program] =
            [FOLDERS, PROGRAMS].map(|folders| is_product(source, folders, &crates));
        if !library && !program {
            continue;
        }
        let syntax = syn::parse_file(&source.text).map_err(|e| format!("{}: {e}", source.path))?;
        let mut names = Vec::new();
        defined(&syntax.items, &mut names);
        names.retain(|name| library || BARE.contains(&name.as_str()));
        for name in names {
            types.entry(name).or_default().insert(source.path.clone());
        }
    }
    Ok(types)
}

/// The names that break the rule, each with the files that define it.
pub fn ambiguous(
    types: &BTreeMap<String, BTreeSet<String>>,
) -> impl Iterator<Item = (&str, &BTreeSet<String>)> {
    let breaks = |(name, files): &(&String, &BTreeSet<String>)| {
        files.len() > MAX_FILES || BARE.contains(&name.as_str())
    };
    types.iter().filter(breaks).map(|(name, files)| (name.as_str(), files))
}

fn is_product(source: &Source, folders: &[&str], crates: &[String]) -> bool {
    let path = source.path.as_str();
    source.is_rust()
        && path.contains("/src/")
        && folders.iter().any(|folder| path.starts_with(folder))
        && !path.ends_with("/test_util.rs")
        && !size::is_all_tests(path, crates)
}

/// Adds the types that these items define, and those of modules among them.
fn defined(items: &[Item], names: &mut Vec<String>) {
    for item in items.iter().filter(|item| !is_for_tests(attributes(item))) {
        match item {
            Item::Enum(item) => names.push(item.ident.to_string()),
            Item::Struct(item) => names.push(item.ident.to_string()),
            Item::Union(item) => names.push(item.ident.to_string()),
            Item::Mod(item) => {
                let items = item.content.as_ref().map_or(&[][..], |(_, items)| items);
                defined(items, names);
            }
            _ => {}
        }
    }
}
