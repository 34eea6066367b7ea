//! The fields of the doctor's JSON that docs/troubleshooting.md documents.

use serde_json::Value;

const GUIDE: &str = include_str!("../../../docs/troubleshooting.md");

/// Checks that the guide documents all fields of `found`, with their paths.
pub(crate) fn are_documented(found: &Value) {
    let (_, table) = GUIDE.split_once("\n### JSON\n").expect("the section on JSON");
    let (table, _) = table.split_once("\n## ").expect("an end");
    let mut known: Vec<String> = Vec::new();
    for row in table.lines().filter(|line| line.starts_with("| `")) {
        let (places, text) = row.trim_matches('|').split_once(" | ").expect("two columns");
        let words = |text: &'static str| text.split('`').skip(1).step_by(2);
        for place in words(places) {
            known.push(place.to_owned());
            known.extend(
                words(text)
                    .filter(|word| word.starts_with('.'))
                    .map(|word| format!("{place}{word}")),
            );
        }
    }
    look(found, "", &known);
}

fn look(value: &Value, path: &str, known: &[String]) {
    match value {
        // The fields of a reason are the same at every path.
        _ if path.ends_with("reason") => {
            assert!(known.contains(&path.to_owned()), "{path} is not documented")
        }
        Value::Object(fields) => {
            for (name, value) in fields {
                let dot = if path.is_empty() { "" } else { "." };
                look(value, &format!("{path}{dot}{name}"), known);
            }
        }
        Value::Array(items) => {
            let path = format!("{path}[]");
            assert!(known.contains(&path), "{path} is not documented");
            items.iter().for_each(|item| look(item, &path, known));
        }
        _ => assert!(
            known.contains(&path.to_owned()) || known.contains(&format!("{path}[]")),
            "{path} is not documented"
        ),
    }
}
