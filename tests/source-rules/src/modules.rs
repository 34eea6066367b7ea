//! The module tree of a crate, and the search for the module that defines the item of a path.
//!
//! Only the crate's own modules and items are known. A path into another crate, a local variable or
//! a generic parameter resolves to nothing.

use std::collections::{HashMap, HashSet};

use proc_macro2::TokenStream;
use syn::{Attribute, Item, UseTree, Visibility};

use crate::files::Source;

/// The meaning of a name in a module.
#[derive(Clone, Debug)]
enum Def {
    Module(usize),
    /// An item that is defined in this module.
    Item,
    /// `use path`, `use path as name`.
    Import(Vec<String>),
}

/// The thing that a path resolves to.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash)]
pub enum Target {
    /// A module of the crate.
    Module(usize),
    /// An item, or something associated with it, defined in this module.
    Item(usize),
}

/// A module, inline or in a file of its own.
#[derive(Debug)]
pub struct Module {
    /// Index of the file that holds it.
    pub file: usize,
    /// Modules declared inline, by name.
    pub inline: HashMap<String, usize>,
    parent: Option<usize>,
    names: HashMap<String, Vec<Def>>,
    globs: Vec<Vec<String>>,
}

/// A file of a crate, parsed.
pub struct File {
    /// Path below the root of the repository.
    pub path: String,
    /// Index of the module that the whole file is.
    pub module: usize,
    /// Its content.
    pub syntax: syn::File,
}

/// The modules of a crate, without those for tests only.
#[derive(Default)]
pub struct Crate {
    /// All modules; the root of the crate is the first.
    pub modules: Vec<Module>,
    /// All files.
    pub files: Vec<File>,
}

impl Crate {
    /// Reads the crate whose root is the file `root`, such as `memory/src/lib.rs`.
    ///
    /// # Errors
    ///
    /// When a file does not parse, or a module's file is not among `sources`.
    pub fn read(sources: &[Source], root: &str) -> Result<Crate, String> {
        let by_path = sources.iter().map(|source| (source.path.as_str(), source)).collect();
        let mut crate_ = Crate::default();
        let directory = root.rsplit_once('/').map_or("", |(directory, _)| directory);
        crate_.add_file(&by_path, root, directory, None)?;
        Ok(crate_)
    }

    fn add_file(
        &mut self,
        sources: &HashMap<&str, &Source>,
        path: &str,
        directory: &str,
        parent: Option<usize>,
    ) -> Result<usize, String> {
        let source = sources.get(path).ok_or_else(|| format!("{path}: no such file"))?;
        let syntax = syn::parse_file(&source.text).map_err(|error| format!("{path}: {error}"))?;
        let (file, module) = (self.files.len(), self.modules.len());
        self.modules.push(Module::new(file, parent));
        let items = syntax.items.clone();
        self.files.push(File { path: path.to_owned(), module, syntax });
        self.add_items(sources, module, directory, &items)?;
        Ok(module)
    }

    fn add_items(
        &mut self,
        sources: &HashMap<&str, &Source>,
        module: usize,
        directory: &str,
        items: &[Item],
    ) -> Result<(), String> {
        for item in items {
            if is_for_tests(attributes(item)) {
                continue;
            }
            match item {
                Item::Mod(declared) => {
                    let name = declared.ident.to_string();
                    let inner = format!("{directory}/{name}");
                    let child = if let Some((_, items)) = &declared.content {
                        let child = self.modules.len();
                        self.modules.push(Module::new(self.modules[module].file, Some(module)));
                        self.modules[module].inline.insert(name.clone(), child);
                        self.add_items(sources, child, &inner, items)?;
                        child
                    } else {
                        if declared.attrs.iter().any(|a| a.path().is_ident("path")) {
                            return Err(format!("{inner}: #[path] is not understood"));
                        }
                        let own = format!("{inner}.rs");
                        let own = if sources.contains_key(own.as_str()) {
                            own
                        } else {
                            format!("{inner}/mod.rs")
                        };
                        self.add_file(sources, &own, &inner, Some(module))?
                    };
                    self.define(module, name, Def::Module(child));
                }
                Item::Use(used) if used.leading_colon.is_none() => self.add_use(module, &used.tree),
                _ => {
                    if let Some(name) = name_of(item) {
                        self.define(module, name, Def::Item);
                    }
                    // A function may have imports of its own.
                    let mut inner = Uses::default();
                    syn::visit::visit_item(&mut inner, item);
                    for tree in inner.0 {
                        self.add_use(module, &tree);
                    }
                }
            }
        }
        Ok(())
    }

    fn add_use(&mut self, module: usize, tree: &UseTree) {
        for used in flatten(tree) {
            match used.name {
                Some(name) => self.define(module, name, Def::Import(used.path)),
                None => self.modules[module].globs.push(used.path),
            }
        }
    }

    fn define(&mut self, module: usize, name: String, def: Def) {
        self.modules[module].names.entry(name).or_default().push(def);
    }

    /// Returns everything that `path`, written in `module`, may name. These are several things if a
    /// module and a function share a name, or if an item has a variant for each platform.
    pub fn resolve(&self, module: usize, path: &[String]) -> HashSet<Target> {
        self.resolve_guarded(module, path, &mut HashSet::new())
    }

    fn resolve_guarded(
        &self,
        module: usize,
        path: &[String],
        guard: &mut Guard,
    ) -> HashSet<Target> {
        let mut segments = path.iter();
        let Some(first) = segments.next() else { return HashSet::new() };
        let mut targets = match first.as_str() {
            "crate" | "$crate" => HashSet::from([Target::Module(0)]),
            "self" => HashSet::from([Target::Module(module)]),
            "super" => {
                self.modules[module].parent.map(Target::Module).into_iter().collect::<HashSet<_>>()
            }
            name => self.look_up(module, name, guard),
        };
        for segment in segments {
            // A path continues through a module, not through a function of the same name.
            if targets.iter().any(|target| matches!(target, Target::Module(_))) {
                targets.retain(|target| matches!(target, Target::Module(_)));
            }
            let mut next = HashSet::new();
            for target in targets {
                match target {
                    Target::Module(inner) if segment == "super" => {
                        next.extend(self.modules[inner].parent.map(Target::Module));
                    }
                    Target::Module(inner) => next.extend(self.look_up(inner, segment, guard)),
                    Target::Item(_) => {
                        next.insert(target);
                    }
                }
            }
            targets = next;
        }
        targets
    }

    fn look_up(&self, module: usize, name: &str, guard: &mut Guard) -> HashSet<Target> {
        let mut targets = HashSet::new();
        for (n, def) in self.modules[module].names.get(name).into_iter().flatten().enumerate() {
            match def {
                Def::Module(inner) => {
                    targets.insert(Target::Module(*inner));
                }
                Def::Item => {
                    targets.insert(Target::Item(module));
                }
                Def::Import(path) => {
                    let step = (module, name.to_owned(), n);
                    if guard.insert(step.clone()) {
                        targets.extend(self.resolve_guarded(module, path, guard));
                        guard.remove(&step);
                    }
                }
            }
        }
        if targets.is_empty() {
            for (n, path) in self.modules[module].globs.iter().enumerate() {
                let step = (module, String::new(), n);
                if guard.insert(step.clone()) {
                    for target in self.resolve_guarded(module, path, guard) {
                        if let Target::Module(inner) = target {
                            targets.extend(self.look_up(inner, name, guard));
                        }
                    }
                    guard.remove(&step);
                }
            }
        }
        targets
    }
}

/// Imports that are being followed. An import that leads back to itself is not followed again.
type Guard = HashSet<(usize, String, usize)>;

impl Module {
    fn new(file: usize, parent: Option<usize>) -> Module {
        Module { file, parent, inline: HashMap::new(), names: HashMap::new(), globs: Vec::new() }
    }
}

#[derive(Default)]
struct Uses(Vec<UseTree>);

impl<'a> syn::visit::Visit<'a> for Uses {
    fn visit_item_use(&mut self, used: &'a syn::ItemUse) {
        if used.leading_colon.is_none() && !is_for_tests(&used.attrs) {
            self.0.push(used.tree.clone());
        }
    }
}

/// One path of a `use`.
pub struct Used {
    /// The whole path, but without the final `*` of an import of everything.
    pub path: Vec<String>,
    /// The name that the import defines. `None` for `*`.
    pub name: Option<String>,
}

/// The paths of a `use`, one by one.
pub fn flatten(tree: &UseTree) -> Vec<Used> {
    fn walk(tree: &UseTree, prefix: &[String], found: &mut Vec<Used>) {
        let with = |name: &syn::Ident| {
            let mut path = prefix.to_vec();
            // `use module::{self}` imports the module.
            if name != "self" || prefix.is_empty() {
                path.push(name.to_string());
            }
            path
        };
        match tree {
            UseTree::Path(path) => walk(&path.tree, &with(&path.ident), found),
            UseTree::Name(name) => {
                let path = with(&name.ident);
                let name = path.last().cloned();
                found.push(Used { path, name });
            }
            UseTree::Rename(renamed) => {
                let path = with(&renamed.ident);
                found.push(Used { path, name: Some(renamed.rename.to_string()) });
            }
            UseTree::Glob(_) => found.push(Used { path: prefix.to_vec(), name: None }),
            UseTree::Group(group) => {
                group.items.iter().for_each(|item| walk(item, prefix, found));
            }
        }
    }
    let mut found = Vec::new();
    walk(tree, &[], &mut found);
    found
}

/// True for an item with `#[cfg(test)]` or `#[cfg(all(test, ...))]`.
pub fn is_for_tests(attributes: &[Attribute]) -> bool {
    fn asks_for_test(tokens: TokenStream) -> bool {
        let condition = tokens.to_string().replace(' ', "");
        condition == "test"
            || condition
                .strip_prefix("all(")
                .and_then(|rest| rest.strip_suffix(')'))
                .is_some_and(|all| all.split(',').any(|part| part == "test"))
    }
    attributes.iter().any(|attribute| match &attribute.meta {
        syn::Meta::List(list) if list.path.is_ident("cfg") => asks_for_test(list.tokens.clone()),
        _ => false,
    })
}

/// The attributes of an item. Empty for an item that `syn` does not interpret.
pub fn attributes(item: &Item) -> &[Attribute] {
    match item {
        Item::Const(item) => &item.attrs,
        Item::Enum(item) => &item.attrs,
        Item::ExternCrate(item) => &item.attrs,
        Item::Fn(item) => &item.attrs,
        Item::ForeignMod(item) => &item.attrs,
        Item::Impl(item) => &item.attrs,
        Item::Macro(item) => &item.attrs,
        Item::Mod(item) => &item.attrs,
        Item::Static(item) => &item.attrs,
        Item::Struct(item) => &item.attrs,
        Item::Trait(item) => &item.attrs,
        Item::TraitAlias(item) => &item.attrs,
        Item::Type(item) => &item.attrs,
        Item::Union(item) => &item.attrs,
        Item::Use(item) => &item.attrs,
        _ => &[],
    }
}

/// Whether an import is a `pub use` or a `pub(crate) use`. Such an import names an item of another
/// file for others, and is no use of the item by this file.
pub fn is_exported(visibility: &Visibility) -> bool {
    !matches!(visibility, Visibility::Inherited)
}

fn name_of(item: &Item) -> Option<String> {
    let name = match item {
        Item::Const(item) => &item.ident,
        Item::Enum(item) => &item.ident,
        Item::Fn(item) => &item.sig.ident,
        Item::Macro(item) => item.ident.as_ref()?,
        Item::Static(item) => &item.ident,
        Item::Struct(item) => &item.ident,
        Item::Trait(item) => &item.ident,
        Item::TraitAlias(item) => &item.ident,
        Item::Type(item) => &item.ident,
        Item::Union(item) => &item.ident,
        _ => return None,
    };
    Some(name.to_string())
}
