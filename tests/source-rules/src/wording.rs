//! Sentences that were in comments and documents once, as a reminder of how not to write.

use crate::files::Source;

/// Parts of the sentences that do not come again.
pub const SENTENCES: &[&str] = &[
    "Of a task of the runtime that this is called in",
    "At so many the next look whether any has to",
    "When it was armed, the peer was to answer by then",
    "A caller has posted its work itself since the driver last looked",
    "It copies for itself, and not for one that was there before and is long",
    "Who copies a long message without a pause is done sooner",
    "Stands between a task and one thing that it polls",
    "What answers one must have its own time",
    "are 66 in the short run below",
    "fault it in in both",
    "# Errors There is none.",
    "# Errors: There is none.",
];

/// The sentences that a file has, wherever its lines break.
pub fn found(source: &Source) -> Vec<&'static str> {
    let text = joined(&source.text);
    SENTENCES.iter().copied().filter(|sentence| text.contains(sentence)).collect()
}

/// The text on one line, without the marks of comments.
fn joined(text: &str) -> String {
    let mut words = Vec::new();
    for line in text.lines() {
        let line = line.trim_start();
        let line = line.strip_prefix("//").map_or(line, |rest| rest.trim_start_matches(['/', '!']));
        let line =
            line.strip_prefix("# ").filter(|_| !line.starts_with("# Errors")).unwrap_or(line);
        words.extend(line.split_whitespace());
    }
    words.join(" ")
}
