//! Figures in a table: each figure is followed by the path of a constant, and must have the
//! constant's value.
//!
//! In "16 MiB (`map::MOST`)", the figure is compared with `const MOST` of a file `map.rs` or
//! `map/mod.rs`. Further folders in the path distinguish files of the same name
//! (`proto::config::window`). A lower-case name is the name of a field that an implementation of
//! `Default` sets. In a fraction such as `1/8`, the constant is the divisor.

use std::fmt;

use syn::visit::{self, Visit};
use syn::{BinOp, Expr, Lit};

use crate::files::Source;
use crate::modules::{attributes, is_for_tests};

/// The value of a figure or a constant.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Value {
    /// A number of bytes, or a number without a unit.
    Count(u128),
    /// Nanoseconds.
    Time(u128),
}

/// A figure, and the path of its constant.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct Figure {
    /// The figure as it is written.
    pub text: String,
    /// The value that the text states.
    pub value: Value,
    /// The path of the constant, such as `map::MOST`.
    pub constant: String,
}

impl fmt::Display for Figure {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        write!(f, "{} ({})", self.text, self.constant)
    }
}

/// The factor of a unit, and whether it is a unit of time.
fn unit(word: &str) -> Option<(u128, bool)> {
    Some(match word {
        "KiB" => (1 << 10, false),
        "MiB" => (1 << 20, false),
        "GiB" => (1 << 30, false),
        "TiB" => (1 << 40, false),
        "ms" => (1_000_000, true),
        "s" => (1_000_000_000, true),
        _ => return None,
    })
}

/// The figures of a cell.
///
/// # Errors
///
/// When a number is not followed by its constant.
pub fn of_cell(cell: &str) -> Result<Vec<Figure>, String> {
    let (mut figures, mut rest) = (Vec::new(), cell);
    while let Some(at) = rest.find(|c: char| c.is_ascii_digit()) {
        let (before, from) = rest.split_at(at);
        if before.matches('`').count() % 2 == 1 {
            return Err(format!("a number within a name: {cell}"));
        }
        let end = from.find(|c: char| !c.is_ascii_digit() && c != ',').unwrap_or(from.len());
        let number = from[..end].trim_end_matches(',');
        let behind = &from[number.len()..];
        if number == "1" && behind.starts_with('/') {
            rest = &behind[1..];
            continue;
        }
        let count: u128 = number.replace(',', "").parse().map_err(|e| format!("{number}: {e}"))?;
        let word = behind.trim_start().split(|c: char| !c.is_alphabetic()).next();
        let (factor, is_time) = word.and_then(unit).unwrap_or((1, false));
        let value = match is_time {
            true => Value::Time(count * factor),
            false => Value::Count(count * factor),
        };
        let (words, path) = behind
            .split_once("(`")
            .ok_or_else(|| format!("{number} is not followed by a constant: {cell}"))?;
        if words.contains(|c: char| c.is_ascii_digit()) {
            return Err(format!("{number} is not followed by a constant of its own: {cell}"));
        }
        let (path, after) =
            path.split_once("`)").ok_or_else(|| format!("no end of the constant: {cell}"))?;
        let text = format!("{number}{words}").trim().to_owned();
        figures.push(Figure { text, value, constant: path.to_owned() });
        rest = after;
    }
    match rest.contains("(`") {
        true => Err(format!("a constant without a figure: {cell}")),
        false => Ok(figures),
    }
}

/// Checks that a figure has the value of its constant in the code.
///
/// # Errors
///
/// If the values differ, if not exactly one constant has this path, or if its expression is too
/// complicated.
pub fn check(figure: &Figure, sources: &[Source]) -> Result<(), String> {
    let value = constant(&figure.constant, sources).map_err(|why| format!("{figure}: {why}"))?;
    match value == figure.value {
        true => Ok(()),
        false => Err(format!("{figure}: the code has {value:?}, not {:?}", figure.value)),
    }
}

/// The parts of the path of a source file that name its module.
fn module(path: &str) -> Vec<&str> {
    let path = path.trim_end_matches(".rs").trim_end_matches("/mod");
    path.split('/').filter(|part| *part != "src").collect()
}

fn constant(path: &str, sources: &[Source]) -> Result<Value, String> {
    let parts: Vec<_> = path.split("::").collect();
    let Some((name, place)) = parts.split_last().filter(|(_, place)| !place.is_empty()) else {
        return Err("no module".to_owned());
    };
    let mut found = Vec::new();
    for source in sources.iter().filter(|s| s.is_rust() && module(&s.path).ends_with(place)) {
        let file = syn::parse_file(&source.text).map_err(|e| format!("{}: {e}", source.path))?;
        let mut constants = Constants { name, found: Vec::new() };
        constants.visit_file(&file);
        found.extend(constants.found.into_iter().map(|found| evaluate(&found, &file)));
    }
    match found.len() {
        1 => found.remove(0),
        n => Err(format!("{n} such constants")),
    }
}

/// Finds the constants and fields with this name.
struct Constants<'a> {
    name: &'a str,
    found: Vec<Expr>,
}

impl<'a> Visit<'a> for Constants<'_> {
    fn visit_item(&mut self, item: &'a syn::Item) {
        if !is_for_tests(attributes(item)) {
            visit::visit_item(self, item);
        }
    }

    fn visit_item_const(&mut self, item: &'a syn::ItemConst) {
        if item.ident == self.name {
            self.found.push((*item.expr).clone());
        }
    }

    fn visit_impl_item_const(&mut self, item: &'a syn::ImplItemConst) {
        if item.ident == self.name {
            self.found.push(item.expr.clone());
        }
    }

    fn visit_item_impl(&mut self, item: &'a syn::ItemImpl) {
        visit::visit_item_impl(self, item);
        let of = item.trait_.as_ref().and_then(|(path, _)| path.segments.last());
        if of.is_some_and(|of| of.ident == "Default") {
            Fields(self).visit_item_impl(item);
        }
    }
}

/// Finds the values that the field gets.
struct Fields<'a, 'b>(&'a mut Constants<'b>);

impl<'a> Visit<'a> for Fields<'_, '_> {
    fn visit_field_value(&mut self, field: &'a syn::FieldValue) {
        if matches!(&field.member, syn::Member::Named(name) if name == self.0.name) {
            self.0.found.push(field.expr.clone());
        }
    }
}

fn evaluate(expr: &Expr, file: &syn::File) -> Result<Value, String> {
    let other = || Err("neither a number nor a time".to_owned());
    match expr {
        Expr::Lit(lit) => match &lit.lit {
            Lit::Int(n) => n.base10_parse().map(Value::Count).map_err(|e| e.to_string()),
            _ => other(),
        },
        Expr::Paren(inner) => evaluate(&inner.expr, file),
        Expr::Cast(cast) => evaluate(&cast.expr, file),
        Expr::Path(path) => {
            let Some(name) = path.path.segments.last() else { return other() };
            let name = name.ident.to_string();
            let mut constants = Constants { name: &name, found: Vec::new() };
            constants.visit_file(file);
            match constants.found.as_slice() {
                [one] => evaluate(one, file),
                _ => Err(format!("{name} is not a constant of this file")),
            }
        }
        Expr::Call(call) => {
            let (Expr::Path(path), Some(first)) = (&*call.func, call.args.first()) else {
                return other();
            };
            let Some(of) = path.path.segments.last() else { return other() };
            let Value::Count(n) = evaluate(first, file)? else { return other() };
            match of.ident.to_string().as_str() {
                "from_secs" => Ok(Value::Time(n * 1_000_000_000)),
                "from_millis" => Ok(Value::Time(n * 1_000_000)),
                _ => other(),
            }
        }
        Expr::Binary(binary) => {
            let (left, right) = (evaluate(&binary.left, file)?, evaluate(&binary.right, file)?);
            let (Value::Count(left), Value::Count(right)) = (left, right) else { return other() };
            match binary.op {
                BinOp::Add(_) => Ok(Value::Count(left + right)),
                BinOp::Sub(_) => Ok(Value::Count(left - right)),
                BinOp::Mul(_) => Ok(Value::Count(left * right)),
                BinOp::Div(_) => Ok(Value::Count(left / right)),
                BinOp::Shl(_) => Ok(Value::Count(left << right)),
                _ => other(),
            }
        }
        _ => other(),
    }
}
