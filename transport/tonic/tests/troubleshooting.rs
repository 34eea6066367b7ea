//! The guide to troubleshooting covers exactly the code's reason codes.

use tonic_rdma::ReasonCode;

const GUIDE: &str = include_str!("../../../docs/troubleshooting.md");

/// The section of each code: the code and the text.
fn sections() -> Vec<(&'static str, &'static str)> {
    let (_, codes) = GUIDE.split_once("\n## Reason codes\n").expect("the section on reason codes");
    let codes = codes.split_once("\n## ").map_or(codes, |(codes, _)| codes);
    let sections = codes.split("\n### ").skip(1);
    sections
        .map(|section| {
            let (title, text) = section.split_once('\n').expect("a title and a text");
            (
                title
                    .strip_prefix('`')
                    .and_then(|t| t.strip_suffix('`'))
                    .expect("a code in backticks"),
                text,
            )
        })
        .collect()
}

#[test]
fn every_code_is_in_the_guide_in_its_order() {
    let listed: Vec<&str> = sections().into_iter().map(|(code, _)| code).collect();
    let codes: Vec<&str> = ReasonCode::ALL.into_iter().map(ReasonCode::as_str).collect();
    assert_eq!(listed, codes);
}

#[test]
fn every_section_says_what_to_do() {
    for (code, text) in sections() {
        let (meaning, cure) =
            text.split_once("\nDo").unwrap_or_else(|| panic!("{code} has no cure"));
        assert!(meaning.trim().len() > 40 && cure.trim().len() > 10, "{code} says too little");
    }
}
