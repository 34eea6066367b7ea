//! Hosted workflows call only targets that the Makefile has, and together they call every test and
//! every check.
//!
//! The workflows are read line by line: a command is the text behind `run:`, or the block below it.
//! Workflows must call `make` with literal targets, because an expression such as `${{
//! matrix.target }}` hides which targets are called.

use std::collections::BTreeSet;

use crate::files::Source;

/// Variables of the Makefile that list the steps of `.ci/run`. Each of these variables must exist.
pub const LISTS: &[&str] = &["TESTS", "TESTS_BESIDE", "MORE_TESTS", "CHECKS", "CHECKS_BESIDE"];

/// Words that may stand before a command, and may be followed by options and numbers.
const PREFIXES: &[&str] =
    &["exec", "sudo", "time", "timeout", "nice", "env", "if", "then", "else", "do", "!"];

/// A call to `make`.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct Call {
    /// Number of the line, from 1.
    pub line: usize,
    /// Name of the rule in the Makefile.
    pub target: String,
}

/// The targets that a Makefile has rules for.
pub fn targets(makefile: &str) -> BTreeSet<&str> {
    let rules = makefile.lines().filter(|line| !line.starts_with([' ', '\t', '#', '.']));
    rules
        .filter_map(|line| line.split_once(':'))
        .filter(|(names, rest)| !rest.starts_with('=') && !names.contains('='))
        .flat_map(|(names, _)| names.split_whitespace())
        .collect()
}

/// The words of a variable that a Makefile assigns, with the lines that continue it.
pub fn variable<'a>(makefile: &'a str, name: &str) -> Option<Vec<&'a str>> {
    let mut words = Vec::new();
    let mut lines = makefile.lines().skip_while(|line| assigned(line, name).is_none());
    let mut line = assigned(lines.next()?, name)?;
    while let Some(continued) = line.strip_suffix('\\') {
        words.extend(continued.split_whitespace());
        line = lines.next()?;
    }
    words.extend(line.split_whitespace());
    Some(words)
}

/// The value in a line that assigns to the variable.
fn assigned<'a>(line: &'a str, name: &str) -> Option<&'a str> {
    let rest = line.strip_prefix(name)?.trim_start();
    [":=", "?=", "="].into_iter().find_map(|operator| rest.strip_prefix(operator))
}

/// The calls to `make` in a workflow, one for each target.
pub fn calls(workflow: &str) -> Vec<Call> {
    let mut found = Vec::new();
    // The indentation of a `run:` whose commands are the lines below it.
    let mut block: Option<usize> = None;
    for (n, line) in workflow.lines().enumerate() {
        let text = line.trim_start();
        let indent = line.len() - text.len();
        if block.is_some_and(|key| !text.is_empty() && indent <= key) {
            block = None;
        }
        let key = text.strip_prefix("- ").map_or(text, str::trim_start);
        let command = match key.strip_prefix("run:") {
            _ if block.is_some() => text,
            Some(value) if value.trim_start().starts_with(['|', '>']) => {
                block = Some(line.len() - key.len());
                continue;
            }
            Some(value) => value.trim().trim_matches(['"', '\'']),
            None => continue,
        };
        found.extend(targets_called(command).map(|target| Call { line: n + 1, target }));
    }
    found
}

/// The targets that a line of a shell script makes.
fn targets_called(line: &str) -> impl Iterator<Item = String> {
    let code = if line.starts_with('#') { "" } else { line.split(" #").next().unwrap_or_default() };
    code.split(['&', '|', ';', '(', ')']).flat_map(|command| {
        let mut words = command.split_whitespace();
        let is_before = |word: &&str| {
            let is_number = word.bytes().all(|byte| byte.is_ascii_digit());
            is_number || word.starts_with('-') || is_assignment(word) || PREFIXES.contains(word)
        };
        let is_make = words.find(|word| !is_before(word)) == Some("make");
        let targets = words.filter(|word| !word.starts_with('-') && !is_assignment(word));
        targets.filter(move |_| is_make).map(str::to_owned).collect::<Vec<_>>()
    })
}

fn is_assignment(word: &str) -> bool {
    word.split_once('=').is_some_and(|(name, _)| {
        !name.is_empty() && name.bytes().all(|byte| byte.is_ascii_alphanumeric() || byte == b'_')
    })
}

/// Calls to targets that do not exist, and tests and checks that no workflow runs.
///
/// # Errors
///
/// The error names those of [`LISTS`] that the Makefile does not assign to.
pub fn wrong(makefile: &str, workflows: &[Source]) -> Result<Vec<String>, String> {
    let existing = targets(makefile);
    let mut wrong = Vec::new();
    let mut called = BTreeSet::new();
    for workflow in workflows {
        for Call { line, target } in calls(&workflow.text) {
            if !existing.contains(target.as_str()) {
                let path = &workflow.path;
                wrong.push(format!("{path}:{line}: the Makefile has no target {target}"));
            }
            called.insert(target);
        }
    }
    let mut unassigned = Vec::new();
    for name in LISTS {
        let Some(steps) = variable(makefile, name) else {
            unassigned.push(*name);
            continue;
        };
        for step in steps.into_iter().filter(|step| !called.contains(*step)) {
            wrong.push(format!("no workflow runs make {step}, a step of {name}"));
        }
    }
    if unassigned.is_empty() {
        Ok(wrong)
    } else {
        let names = unassigned.join(", ");
        Err(format!("the Makefile does not assign to {names}: correct LISTS in workflows.rs"))
    }
}
