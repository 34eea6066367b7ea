//! Wordings to avoid are found in made-up files, and plain ones are left alone.

use tonic_rdma_source_rules::files::Source;
use tonic_rdma_source_rules::prose::paragraphs;
use tonic_rdma_source_rules::wording::{self, Pattern};

/// The patterns in a file with this name and text.
fn patterns(path: &str, text: &str) -> Vec<Pattern> {
    let hits = wording::found(&Source::new(path, text)).expect("made-up sources parse");
    hits.into_iter().map(|hit| hit.pattern).collect()
}

#[track_caller]
fn refused(pattern: Pattern, texts: &[&str]) {
    for text in texts {
        assert_eq!(patterns("a.rs", text), [pattern], "{text}");
    }
}

#[track_caller]
fn allowed(texts: &[&str]) {
    for text in texts {
        assert_eq!(patterns("a.rs", text), [], "{text}");
    }
}

#[test]
fn a_doc_comment_begins_with_a_noun_or_a_verb() {
    refused(
        Pattern::Opening,
        &[
            "/// What a buffer waits for.\nstruct Wait;",
            "/// Of this link, if lending is allowed.\nfn pool() {}",
            "/// As `x`, with a limit.\nfn y() {}",
            "//! Whom a message is for.\n",
            "/// By which a peer is known.\nstruct Name;",
        ],
    );
    allowed(&[
        "/// The reason why a buffer waits.\nstruct Wait;",
        "/// Like `x`, but with a limit.\nfn y() {}",
        "// What follows is code.\nfn y() {}",
        "/// Returns a name.\n///\n/// What it is for, the caller knows.\nfn y() {}",
    ]);
}

#[test]
fn an_owner_is_not_a_genitive() {
    refused(
        Pattern::Genitive,
        &[
            "// A buffer of the application waits.",
            "// Keys of the peer.",
            "// A limit of\n// the system, which is low.",
        ],
    );
    allowed(&[
        "// An application buffer waits. A copy of the application's buffer.",
        "// The cost of the system call. A thread instead of the peer.",
    ]);
}

#[test]
fn dialect_is_refused() {
    refused(
        Pattern::Word,
        &[
            "// It goes, too.",
            "// It is sent anew.",
            "// Meanwhile, it waits.",
            "// It looks in vain.",
            "// Beside that, it waits.",
            "// It waits, as ever.",
        ],
    );
    refused(
        Pattern::Riddle,
        &[
            "// The key, if there is none.",
            "// It takes so many.",
            "// It waits if there are more.",
        ],
    );
    allowed(&["// It is too long, and also too wide.", "// `tests.rs` lies beside it."]);
}

#[test]
fn long_parentheses_and_two_semicolons_are_refused() {
    let (twelve, thirteen) = (["word"; 12].join(" "), ["word"; 13].join(" "));
    refused(Pattern::Parenthesis, &[&format!("// It goes ({thirteen}).")]);
    refused(
        Pattern::Parenthesis,
        &[&format!("// It goes ({}).", thirteen.replacen(' ', "\n// ", 5))],
    );
    allowed(&[&format!("// It goes ({twelve}).")]);
    allowed(&["// It goes (`as all of this code has more than twelve words in it if counted`)."]);
    allowed(&[&format!("// It goes {twelve} word).")]);
    refused(Pattern::Semicolons, &["// It comes; it goes; it ends."]);
    allowed(&["// | cell | one; two; three |"]);
    allowed(&[
        "// It comes; it goes. It starts; it ends.",
        "// `a(); b(); c();` is code.",
        "// for x in $y; do z; done",
    ]);
}

#[test]
fn a_comment_does_not_repeat_the_signature() {
    refused(
        Pattern::Signature,
        &[
            "/// The length.\nfn length() -> usize { 0 }",
            "/// Returns the name of this device.\n#[must_use]\nfn device_name() {}",
            "/// Queue pairs.\nstruct QueuePair;",
        ],
    );
    allowed(&[
        "/// The length in bytes.\nfn length() -> usize { 0 }",
        "/// The length.\n///\n/// It never changes.\nfn length() -> usize { 0 }",
    ]);
}

#[test]
fn prose_is_found_in_comments_documents_and_texts() {
    let kinds = [
        ("a.rs", "fn f() { log(\"the keys of the peer are gone\") }"),
        ("a.rs", "fn f() { log(\"the keys of \\\n    the peer are gone\") }"),
        ("a.rs", "fn f() { log(\"{n} keys of the peer: {}\") }"),
        ("a.rs", "fn f() { log(\"of {n} keys of the peer: {error:?}\") }"),
        ("a.rs", "fn f() { log(\"keys of the peer are in {{{path}}}\") }"),
        ("a.rs", "fn f() {} // the keys of the peer"),
        ("a.md", "# Title\n\n- the keys of\n  the peer\n"),
        ("a.md", "| a | the keys of the peer |\n"),
        ("a.sh", "#!/bin/sh\n# The keys of\n# the peer\n"),
        ("Makefile", "keys: ## show the keys of the peer\n"),
        ("a.proto", "// The keys of the peer.\n"),
    ];
    for (path, text) in kinds {
        assert_eq!(patterns(path, text), [Pattern::Genitive], "{path}: {text}");
    }
    for (path, text) in [
        ("a.md", "```\nkeys of the peer\n```\n"),
        ("a.md", "text\n\n    keys of the peer\n"),
        ("a.md", "The keys of\n\nthe peer\n"),
        ("a.rs", "fn of_the_peer() {}"),
        ("a.rs", "fn f() { log(\"of the peer\") }"),
        ("a.rs", "fn f() { log(\"struct A { /* of the peer */ }\") }"),
        ("a.rs", "fn f() { log(\"/* of the peer */ fn f() { g() } }\") }"),
        ("a.rs", "fn f() { log(\"/* keys of the peer */ }\") }"),
        ("a.rs", "fn f() { log(\"let keys = of the peer;\") }"),
        ("a.rs", "fn f() { log(\"/* of the peer */ if {\") }"),
        ("a.bin", "keys of the peer"),
    ] {
        assert_eq!(patterns(path, text), [], "{path}: {text}");
    }
}

#[test]
fn a_paragraph_is_one_line_of_words() {
    let text = "//! One `piece of code`\n//! and [a link](https://example.org/a).\n//!\n//! Two.\n";
    let found = paragraphs(&Source::new("a.rs", text)).unwrap();
    let texts: Vec<_> = found.iter().map(|p| (p.line, p.text.as_str())).collect();
    assert_eq!(texts, [(1, "One `_` and [a link]."), (4, "Two.")]);
}

#[test]
fn the_list_only_gets_shorter() {
    let list = |text: &str| wording::read_list(text).unwrap();
    let known = list("2 a.rs\n3 transport/proto/\n");
    assert_eq!(wording::write_list(&known), "2 a.rs\n3 transport/proto/\n");
    assert_eq!(wording::compare(&known, &known), [""; 0]);
    let found = [("a.rs", 1), ("a.rs", 1), ("transport/proto/src/a.rs", 1), ("b.rs", 0)];
    let found = wording::counts(found);
    assert_eq!(found, list("2 a.rs\n1 transport/proto/\n"));
    assert_eq!(wording::compare(&known, &found), [""; 0], "a folder may hold fewer");
    for worse in ["3 a.rs\n", "1 a.rs\n", "2 a.rs\n4 transport/proto/\n", "2 a.rs\n1 b.rs\n"] {
        assert_eq!(wording::compare(&known, &list(worse)).len(), 1, "{worse}");
    }
    assert!(wording::read_list("a.rs 2\n").is_err());
}
