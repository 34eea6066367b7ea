//! Reads the public items of a crate's source: exports of modules, and methods and traits of types.

use std::collections::{BTreeMap, BTreeSet};
use std::fs;
use std::path::{Path, PathBuf};

use quote::ToTokens;
use syn::{
    Attribute, File, FnArg, ImplItem, Item, Meta, ReceiverKind, ReturnType, Type, UseTree,
    Visibility,
};

/// The public names, each with its signature: the types of a method's arguments and result, the
/// associated types of a trait's implementation, and nothing for other names. Bounds are not
/// compared.
///
/// | key | stands for |
/// |---|---|
/// | `server::TcpIncoming` | a name that a module exports; the root has no prefix |
/// | `Server::serve()` | a public method |
/// | `Channel: Service<Request<Body>>` | a trait that a type implements |
pub(crate) type Surface = BTreeMap<String, String>;

/// Reads the exports of `modules`, pairs of a name and a file below `root`. Also reads the methods
/// and traits of `types`, from any file in `folders` below `root`.
pub(crate) fn read(
    root: &Path,
    modules: &[(&str, &str)],
    types: &[&str],
    folders: &[&str],
) -> Surface {
    let mut surface = Surface::new();
    for (module, file) in modules {
        for name in exports(&parse(&root.join(file))) {
            let key = if module.is_empty() { name } else { format!("{module}::{name}") };
            surface.insert(key, String::new());
        }
    }
    for folder in folders {
        for file in sources(&root.join(folder)) {
            members(&parse(&file).items, types, &mut surface);
        }
    }
    surface
}

fn parse(path: &Path) -> File {
    let source = fs::read_to_string(path).unwrap_or_else(|e| panic!("{}: {e}", path.display()));
    syn::parse_file(&source).unwrap_or_else(|e| panic!("{}: {e}", path.display()))
}

/// The source files of a folder, or the file itself.
fn sources(path: &Path) -> Vec<PathBuf> {
    if path.is_file() {
        return vec![path.to_owned()];
    }
    let entries = fs::read_dir(path).unwrap_or_else(|e| panic!("{}: {e}", path.display()));
    let mut files = Vec::new();
    for entry in entries {
        let path = entry.unwrap().path();
        if path.is_dir() {
            files.extend(sources(&path));
        } else if path.extension().is_some_and(|extension| extension == "rs") {
            files.push(path);
        }
    }
    files
}

fn is_public(visibility: &Visibility) -> bool {
    matches!(visibility, Visibility::Public(_))
}

fn exports(file: &File) -> BTreeSet<String> {
    let mut names = BTreeSet::new();
    for item in &file.items {
        let (visibility, name) = match item {
            Item::Use(item) if is_public(&item.vis) => {
                used(&item.tree, &mut names);
                continue;
            }
            Item::Struct(item) => (&item.vis, &item.ident),
            Item::Enum(item) => (&item.vis, &item.ident),
            Item::Trait(item) => (&item.vis, &item.ident),
            Item::Type(item) => (&item.vis, &item.ident),
            Item::Fn(item) => (&item.vis, &item.sig.ident),
            Item::Const(item) => (&item.vis, &item.ident),
            Item::Mod(item) => (&item.vis, &item.ident),
            // pin_project! wraps a struct.
            Item::Macro(item) => {
                if let Ok(Item::Struct(item)) = syn::parse2(item.mac.tokens.clone())
                    && is_public(&item.vis)
                {
                    names.insert(item.ident.to_string());
                }
                continue;
            }
            _ => continue,
        };
        if is_public(visibility) {
            names.insert(name.to_string());
        }
    }
    names
}

fn used(tree: &UseTree, names: &mut BTreeSet<String>) {
    match tree {
        UseTree::Path(path) => used(&path.tree, names),
        UseTree::Name(name) => drop(names.insert(name.ident.to_string())),
        UseTree::Rename(name) => drop(names.insert(name.rename.to_string())),
        UseTree::Group(group) => group.items.iter().for_each(|tree| used(tree, names)),
        UseTree::Glob(_) => panic!("what a glob exports cannot be compared"),
    }
}

fn members(items: &[Item], types: &[&str], surface: &mut Surface) {
    for item in items {
        match item {
            Item::Struct(item) => derives(&item.ident.to_string(), &item.attrs, types, surface),
            Item::Enum(item) => derives(&item.ident.to_string(), &item.attrs, types, surface),
            Item::Impl(block) => {
                let Type::Path(path) = &*block.self_ty else { continue };
                let Some(last) = path.path.segments.last() else { continue };
                let name = last.ident.to_string();
                if !types.contains(&&*name) {
                    continue;
                }
                match &block.trait_ {
                    Some((path, _)) => {
                        implements(&name, &text(path), associated(&block.items), surface);
                    }
                    None => methods(&name, &block.items, surface),
                }
            }
            _ => {}
        }
    }
}

fn derives(name: &str, attributes: &[Attribute], types: &[&str], surface: &mut Surface) {
    if !types.contains(&name) {
        return;
    }
    for attribute in attributes.iter().filter(|attribute| attribute.path().is_ident("derive")) {
        let Meta::List(list) = &attribute.meta else { continue };
        for derived in text(&list.tokens).split(',') {
            implements(name, derived, String::new(), surface);
            // thiserror::Error
            if derived == "Error" {
                implements(name, "Display", String::new(), surface);
            }
        }
    }
}

fn implements(name: &str, of: &str, associated: String, surface: &mut Surface) {
    // std's trait has two names in tonic's source.
    let of = if of == "StdError" { "Error" } else { of };
    surface.insert(format!("{name}: {of}"), associated);
}

/// The types that an implementation assigns to its trait's associated types.
fn associated(items: &[ImplItem]) -> String {
    let types = items.iter().filter_map(|item| match item {
        ImplItem::Type(item) => Some(format!("{}={}", item.ident, text(&item.ty))),
        _ => None,
    });
    types.collect::<Vec<_>>().join(", ")
}

fn methods(name: &str, items: &[ImplItem], surface: &mut Surface) {
    for item in items {
        let ImplItem::Fn(method) = item else { continue };
        if !is_public(&method.vis) {
            continue;
        }
        let signature = &method.sig;
        let inputs: Vec<String> = signature
            .inputs
            .iter()
            .map(|input| match input {
                // `mut self` concerns only the method's body.
                FnArg::Receiver(this) => match this.kind {
                    ReceiverKind::Reference(..) => text(this),
                    _ => "self".to_owned(),
                },
                FnArg::Typed(typed) => text(&typed.ty),
            })
            .collect();
        let output = match &signature.output {
            ReturnType::Default => String::new(),
            ReturnType::Type(_, output) => text(output),
        };
        let asyncness = if signature.asyncness.is_some() { "async " } else { "" };
        let signature = format!("{asyncness}({}) -> {output}", inputs.join(", "));
        surface.insert(format!("{name}::{}()", method.sig.ident), signature);
    }
}

/// The source text without the paths of names, which differ between crates, and with spaces only
/// between two words.
fn text(tokens: &impl ToTokens) -> String {
    let source = tokens.to_token_stream().to_string();
    let mut words: Vec<&str> = Vec::new();
    for word in source.split_whitespace() {
        match (word, words.last()) {
            ("::", Some(last)) if last.ends_with(is_of_word) => drop(words.pop()),
            ("::", _) => {}
            _ => words.push(word),
        }
    }
    let mut text = String::new();
    for word in words {
        if text.ends_with(is_of_word) && word.starts_with(is_of_word) {
            text.push(' ');
        }
        text.push_str(word);
    }
    text
}

fn is_of_word(c: char) -> bool {
    c.is_alphanumeric() || c == '_'
}
