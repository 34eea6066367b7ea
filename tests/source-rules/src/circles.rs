//! Import circles: files of a crate that need each other.
//!
//! A file needs another one when it imports an item that the other one defines, or names it by a
//! path. A re-export is followed to the file with the definition, so a `mod.rs` that lists its
//! children does not need them, unless its own code uses what it lists.
//!
//! Circles that exist only because a module needs its own parent are listed separately: see
//! [`without_parents`].

use std::collections::{BTreeMap, BTreeSet, VecDeque};

use proc_macro2::{TokenStream, TokenTree};
use syn::visit::{self, Visit};

use crate::modules::{Crate, Target, attributes, flatten, is_exported, is_for_tests};

/// For each file, the other files that it needs, each with the items that it takes from there.
pub type Needs = BTreeMap<String, BTreeMap<String, BTreeSet<String>>>;

/// Finds what the files of a crate need from each other.
pub fn needs(crate_: &Crate) -> Needs {
    let mut needs = Needs::new();
    for (n, file) in crate_.files.iter().enumerate() {
        let mut visitor = Visitor { crate_, file: n, module: file.module, needs: BTreeMap::new() };
        visitor.visit_file(&file.syntax);
        needs.insert(file.path.clone(), visitor.needs);
    }
    needs
}

struct Visitor<'a> {
    crate_: &'a Crate,
    file: usize,
    module: usize,
    needs: BTreeMap<String, BTreeSet<String>>,
}

impl Visitor<'_> {
    fn path(&mut self, path: &[String]) {
        for target in self.crate_.resolve(self.module, path) {
            let Target::Item(module) = target else { continue };
            let file = self.crate_.modules[module].file;
            if file != self.file {
                let other = &self.crate_.files[file].path;
                // Take the type that the path leads through, or else the last part of the path.
                let is_type = |part: &&String| part.starts_with(char::is_uppercase);
                if let Some(item) = path.iter().find(is_type).or(path.last()) {
                    self.needs.entry(other.clone()).or_default().insert(item.clone());
                }
            }
        }
    }

    /// Follows the paths in the arguments of a macro, which are not parsed further than into
    /// tokens.
    fn tokens(&mut self, tokens: TokenStream) {
        let mut path: Vec<String> = Vec::new();
        let (mut colons, mut after_dollar) = (0, false);
        for token in tokens {
            match token {
                TokenTree::Ident(name) => {
                    if colons != 2 || path.is_empty() {
                        self.end_of_path(&mut path);
                    }
                    // Keep `$crate`. Any other `$name` is a parameter, which names no item.
                    if !after_dollar || name == "crate" {
                        path.push(name.to_string());
                    }
                    (colons, after_dollar) = (0, false);
                }
                TokenTree::Punct(mark) if mark.as_char() == ':' && !path.is_empty() => colons += 1,
                TokenTree::Punct(mark) => {
                    self.end_of_path(&mut path);
                    (colons, after_dollar) = (0, mark.as_char() == '$');
                }
                TokenTree::Group(group) => {
                    self.end_of_path(&mut path);
                    (colons, after_dollar) = (0, false);
                    self.tokens(group.stream());
                }
                TokenTree::Literal(_) => {
                    self.end_of_path(&mut path);
                    (colons, after_dollar) = (0, false);
                }
            }
        }
        self.end_of_path(&mut path);
    }

    fn end_of_path(&mut self, path: &mut Vec<String>) {
        // Skip a single word, which may be anything in a macro. If it is an imported item, its
        // import counts.
        if path.len() > 1 {
            self.path(path);
        }
        path.clear();
    }
}

impl<'a> Visit<'a> for Visitor<'_> {
    fn visit_item(&mut self, item: &'a syn::Item) {
        if !is_for_tests(attributes(item)) {
            visit::visit_item(self, item);
        }
    }

    fn visit_impl_item_fn(&mut self, item: &'a syn::ImplItemFn) {
        if !is_for_tests(&item.attrs) {
            visit::visit_impl_item_fn(self, item);
        }
    }

    fn visit_field(&mut self, field: &'a syn::Field) {
        if !is_for_tests(&field.attrs) {
            visit::visit_field(self, field);
        }
    }

    fn visit_item_mod(&mut self, item: &'a syn::ItemMod) {
        let Some((_, items)) = &item.content else { return };
        let outer = self.module;
        let Some(inner) = self.crate_.modules[outer].inline.get(&item.ident.to_string()) else {
            return;
        };
        self.module = *inner;
        items.iter().for_each(|item| self.visit_item(item));
        self.module = outer;
    }

    fn visit_item_use(&mut self, item: &'a syn::ItemUse) {
        if item.leading_colon.is_some() || is_exported(&item.vis) {
            return;
        }
        for used in flatten(&item.tree) {
            if used.name.is_some() {
                self.path(&used.path);
            }
        }
    }

    fn visit_path(&mut self, path: &'a syn::Path) {
        if path.leading_colon.is_none() {
            let segments: Vec<_> =
                path.segments.iter().map(|part| part.ident.to_string()).collect();
            self.path(&segments);
        }
        visit::visit_path(self, path);
    }

    fn visit_macro(&mut self, called: &'a syn::Macro) {
        self.tokens(called.tokens.clone());
        visit::visit_macro(self, called);
    }

    fn visit_attribute(&mut self, _: &'a syn::Attribute) {}

    fn visit_visibility(&mut self, _: &'a syn::Visibility) {}
}

/// Returns `needs` without what each file needs from the modules that contain it.
pub fn without_parents(needs: &Needs) -> Needs {
    let is_parent = |file: &str, other: &str| {
        let folder =
            ["mod.rs", "lib.rs", "main.rs"].iter().find_map(|name| other.strip_suffix(name));
        let folder = folder.map_or_else(
            || format!("{}/", other.strip_suffix(".rs").unwrap_or(other)),
            |folder| folder.to_owned(),
        );
        file.starts_with(&folder)
    };
    let mut needs = needs.clone();
    for (file, others) in &mut needs {
        others.retain(|other, _| !is_parent(file, other));
    }
    needs
}

/// The groups of files that need each other, each sorted.
pub fn groups(needs: &Needs) -> Vec<Vec<String>> {
    let reached: BTreeMap<&str, BTreeSet<&str>> =
        needs.keys().map(|file| (file.as_str(), reachable(needs, file))).collect();
    let mut groups: Vec<Vec<String>> = Vec::new();
    for (file, others) in &reached {
        if !others.contains(file) || groups.iter().any(|group| group.iter().any(|f| f == file)) {
            continue;
        }
        let back = |other: &&&str| reached.get(**other).is_some_and(|far| far.contains(file));
        groups.push(others.iter().filter(back).map(|other| (*other).to_owned()).collect());
    }
    groups
}

/// Returns the files that `from` needs, directly or through other files. These include `from` only
/// if it is in a circle.
fn reachable<'a>(needs: &'a Needs, from: &str) -> BTreeSet<&'a str> {
    let mut reached = BTreeSet::new();
    let mut queue = VecDeque::from([from]);
    while let Some(file) = queue.pop_front() {
        for other in needs.get(file).into_iter().flatten().map(|(other, _)| other.as_str()) {
            if reached.insert(other) {
                queue.push_back(other);
            }
        }
    }
    reached
}

/// A shortest circle through `file`: the files in order, beginning with it.
pub fn shortest(needs: &Needs, file: &str) -> Option<Vec<String>> {
    let mut from: BTreeMap<&str, &str> = BTreeMap::new();
    let mut queue = VecDeque::from([file]);
    while let Some(at) = queue.pop_front() {
        for other in needs.get(at).into_iter().flatten().map(|(other, _)| other.as_str()) {
            if other == file {
                let mut circle = vec![at.to_owned()];
                let mut last = at;
                while last != file {
                    last = from[last];
                    circle.push(last.to_owned());
                }
                circle.reverse();
                return Some(circle);
            }
            if !from.contains_key(other) {
                from.insert(other, at);
                queue.push_back(other);
            }
        }
    }
    None
}

/// Describes the circles of a crate for people: for each file in a circle, a shortest circle
/// through the file, with the items that cause it.
pub fn describe(needs: &Needs) -> Vec<String> {
    let mut shown = BTreeSet::new();
    let mut lines = Vec::new();
    for file in groups(needs).iter().flatten() {
        let Some(circle) = shortest(needs, file) else { continue };
        if !shown.insert(circle.iter().cloned().collect::<BTreeSet<_>>()) {
            continue;
        }
        let mut line = circle[0].clone();
        for (n, from) in circle.iter().enumerate() {
            let to = &circle[(n + 1) % circle.len()];
            let items: Vec<_> = needs[from][to].iter().map(String::as_str).collect();
            line += &format!("\n        needs {to} for {}", items.join(", "));
        }
        lines.push(line);
    }
    lines
}
