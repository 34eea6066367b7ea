//! Each check finds its violation in made-up sources, and nothing in sound ones.

use tonic_rdma_source_rules::files::Source;
use tonic_rdma_source_rules::modules::Crate;
use tonic_rdma_source_rules::{
    circles, figures, logging, names, pipes, pointers, size, unsafety, width, workflows,
};

/// Lines without a finding.
const NONE: [usize; 0] = [];

/// The imports of a crate with these files below `x/`, whose root is `x/lib.rs`.
fn needs(files: &[(&str, &str)]) -> circles::Needs {
    let made_up = |(path, text): &(&str, &str)| Source::new(&format!("x/{path}"), text);
    let sources: Vec<_> = files.iter().map(made_up).collect();
    circles::needs(&Crate::read(&sources, "x/lib.rs").expect("made-up sources parse"))
}

/// The one group of files in a circle. Empty if no files are in a circle.
fn circle(needs: &circles::Needs) -> Vec<String> {
    let mut groups = circles::groups(needs);
    assert!(groups.len() < 2, "{groups:?}");
    groups.pop().unwrap_or_default()
}

#[test]
fn a_circle_of_imports_is_found_and_told() {
    let needs = needs(&[
        ("lib.rs", "mod a; mod b; mod c; mod d;"),
        ("a.rs", "use crate::b::B; pub struct A(B);"),
        ("b.rs", "use super::c::{self, C}; pub struct B; fn f() -> C { c::make() }"),
        ("c.rs", "pub struct C; pub fn make() -> C { let _: crate::a::A; C }"),
        ("d.rs", "use crate::a::A; pub struct D(A);"),
    ]);
    assert_eq!(circle(&needs), ["x/a.rs", "x/b.rs", "x/c.rs"]);
    let told = circles::describe(&needs).concat();
    assert!(told.contains("x/a.rs\n        needs x/b.rs for B"), "{told}");
    assert!(told.contains("needs x/c.rs for C, make"), "{told}");
}

#[test]
fn imports_that_go_one_way_are_no_circle() {
    let needs = needs(&[
        ("lib.rs", "mod a; mod b; pub use a::A; pub use b::B;"),
        ("a.rs", "use std::fmt; use crate::B; pub struct A(B); use bytes::Bytes;"),
        ("b.rs", "pub struct B; #[cfg(test)] mod tests { use crate::A; }"),
    ]);
    assert_eq!(circle(&needs), Vec::<String>::new());
    assert!(needs["x/a.rs"].contains_key("x/b.rs"));
}

#[test]
fn a_reexport_counts_for_the_file_with_the_definition() {
    // The item is imported through the parent, under another name, or by a glob.
    for (lib, used) in [
        ("pub use b::B;", "use crate::B;"),
        ("pub use b::B as C;", "use crate::C;"),
        ("pub use b::*;", "use super::B;"),
        ("pub use b::*;", "use super::*; type T = B;"),
        ("", "use crate::b; type T = b::B;"),
        ("", "fn f() { println!(\"{}\", 1 + crate::b::B); }"),
        ("", "fn f() { use crate::b::B; }"),
        ("", "mod inline { type T = super::super::b::B; }"),
    ] {
        let lib = format!("{lib} mod a; mod b;");
        let needs = needs(&[
            ("lib.rs", &lib),
            ("a.rs", &format!("{used} pub struct A;")),
            ("b.rs", "use crate::a::A; pub struct B;"),
        ]);
        assert_eq!(circle(&needs), ["x/a.rs", "x/b.rs"], "{lib} {used}");
    }
}

#[test]
fn a_parent_that_lists_its_children_does_not_need_them() {
    let listing = needs(&[
        ("lib.rs", "mod outer;"),
        ("outer/mod.rs", "mod inner; pub use inner::Inner; pub struct Shared;"),
        ("outer/inner.rs", "use super::Shared; pub struct Inner(Shared);"),
    ]);
    assert_eq!(circle(&listing), Vec::<String>::new());
    let using = needs(&[
        ("lib.rs", "mod outer;"),
        ("outer/mod.rs", "mod inner; pub use inner::Inner; pub struct Shared(Inner);"),
        ("outer/inner.rs", "use super::Shared; pub struct Inner(Shared);"),
    ]);
    assert_eq!(circle(&using), ["x/outer/inner.rs", "x/outer/mod.rs"]);
    assert_eq!(circle(&circles::without_parents(&using)), Vec::<String>::new());
}

#[test]
fn siblings_are_in_a_circle_without_their_parents_too() {
    let needs = needs(&[
        ("lib.rs", "mod outer;"),
        ("outer.rs", "mod a; mod b;"),
        ("outer/a.rs", "use super::b::B; pub struct A;"),
        ("outer/b.rs", "use super::a::A; pub struct B;"),
    ]);
    assert_eq!(circle(&circles::without_parents(&needs)), ["x/outer/a.rs", "x/outer/b.rs"]);
}

#[test]
fn a_module_without_a_file_is_an_error() {
    let sources = [Source::new("x/lib.rs", "mod absent;")];
    assert!(Crate::read(&sources, "x/lib.rs").is_err());
    assert!(Crate::read(&sources, "x/main.rs").is_err());
    assert!(Crate::read(&[Source::new("x/lib.rs", "mod {")], "x/lib.rs").is_err());
}

/// The numbers of the lines that are too long.
fn wide(path: &str, lines: &[&str]) -> Vec<usize> {
    let source = Source::new(path, &lines.join("\n"));
    width::long_lines(&source).iter().map(|long| long.line).collect()
}

#[test]
fn wide_comments_and_documents_are_found() {
    let words = "word ".repeat(24);
    let comment = |mark: &str| format!("{mark} {words}");
    assert_eq!(wide("a.md", &["short", &words]), [2]);
    for mark in ["//", "///", "//!", "    let x = 1; //", "/*"] {
        assert_eq!(wide("a.rs", &["fn f() {", &comment(mark)]), [2], "{mark}");
    }
    assert_eq!(wide("a.rs", &["/* a comment", &words, "*/", &words]), [2]);
    assert_eq!(wide("a.toml", &["[a]", &comment("#")]), [2]);
    assert_eq!(wide("Makefile", &["a: b ## help", &format!("a: b ## {words}")]), [2]);
    assert_eq!(wide("script", &["#!/bin/bash", &comment("#")]), [2]);
    assert_eq!(wide("a.proto", &["", &comment("//")]), [2]);
    // A line may have 100 columns, but not 101. A character counts as one column, however many
    // bytes it has.
    let dots = "… ".repeat(49);
    assert_eq!(wide("a.md", &[&format!("{dots}…x"), &format!("{dots}…xy")]), [2]);
}

#[test]
fn code_tables_and_links_may_be_wide() {
    let words = "word ".repeat(24);
    let code = format!("let text = \"// {words}\";");
    assert_eq!(wide("a.rs", &[&code, "// short"]), NONE);
    assert_eq!(wide("a.rs", &[&format!("let raw = r#\"\" // {words}\"#;")]), NONE);
    assert_eq!(wide("a.rs", &["let quote = '\"';", &code, "fn f<'a>() {}", &code]), NONE);
    assert_eq!(wide("a.rs", &["// ```", &format!("// {words}"), "// ```"]), NONE);
    assert_eq!(wide("a.rs", &[&format!("/// | {words} |")]), NONE);
    assert_eq!(wide("a.md", &["```", &words, "```", &format!("| {words} |")]), NONE);
    assert_eq!(wide("a.md", &["text", "", &format!("    {words}")]), NONE);
    let link = format!("see [this](https://example.com/{})", "path/".repeat(20));
    assert_eq!(wide("a.md", &[&link, &format!("// {link}")]), NONE);
    assert_eq!(wide("a.toml", &[&format!("a = \"{words}\"")]), NONE);
    assert_eq!(wide("script", &["#!/bin/bash", &format!("echo {words}")]), NONE);
}

#[test]
fn the_exceptions_end_where_they_end() {
    let words = "word ".repeat(24);
    assert_eq!(wide("a.md", &["```", "```", &words]), [3]);
    assert_eq!(wide("a.md", &["text", &format!("    {words}")]), [2]);
    // A link that ends before the last column is no excuse for what follows it.
    assert_eq!(wide("a.md", &[&format!("[a](https://example.com) {words}")]), [1]);
    // Quotes in comments, and marks of comments in strings, change nothing.
    assert_eq!(wide("a.rs", &["// it's \"", &format!("// {words}")]), [2]);
    assert_eq!(wide("a.rs", &["/* \" */ let x = \"/*\";", &format!("// {words}")]), [2]);
}

#[test]
fn all_words_of_a_document_count() {
    let words = |text: &str| size::words(&Source::new("a.md", text));
    assert_eq!(words(""), 0);
    assert_eq!(words("# Two words\n\nand  [a link](b.md).\n"), 6);
    // Words of tables and pictures count, together with their bars and arrows.
    assert_eq!(words("| a | b |\n|---|---|\n```text\n a ──> b\n```\n"), 11);
}

#[test]
fn a_file_is_measured_without_its_tests() {
    let code = "fn f() {}\n".repeat(500);
    let tests = format!("#[cfg(test)]\nmod tests {{\n{code}}}\n");
    let source = Source::new("transport/tonic/src/a.rs", &format!("{code}{tests}"));
    assert_eq!(size::lines_without_tests(&source), Ok(500));
    let more = Source::new("transport/tonic/src/a.rs", &format!("{code}fn g() {{}}\n{tests}"));
    assert_eq!(size::lines_without_tests(&more), Ok(501));

    let other = Source::new("memory/src/a.rs", &more.text);
    let longer = Source::new("memory/src/b.rs", &code.repeat(2));
    let all_tests = [
        Source::new("memory/tests/a.rs", &longer.text),
        Source::new("memory/src/tests/a.rs", &longer.text),
        Source::new("memory/src/tests.rs", &longer.text),
    ];
    let manifests = ["memory", "tests"].map(|path| Source::new(&format!("{path}/Cargo.toml"), ""));
    let ordinary = Source::new("tests/src/a.rs", &longer.text);
    let mut sources = vec![source, other, longer.clone(), ordinary];
    sources.extend(all_tests.into_iter().chain(manifests));
    let long = |sources: &[Source]| {
        let paths = size::long_files(sources).unwrap().into_iter().map(|(path, _, _)| path);
        paths.collect::<Vec<_>>()
    };
    assert_eq!(long(&sources), ["memory/src/b.rs", "tests/src/a.rs"]);
    sources[0] = more;
    assert_eq!(long(&sources)[0], "transport/tonic/src/a.rs");
}

#[test]
fn a_full_folder_is_found() {
    let file = |n: usize| Source::new(&format!("transport/tonic/src/a/{n}.rs"), "");
    let mut sources: Vec<_> = (0..12).map(file).collect();
    sources.push(Source::new("transport/tonic/src/a/b/c.rs", ""));
    assert!(size::full_folders(&sources).is_empty());
    sources.push(file(12));
    assert_eq!(size::full_folders(&sources), [("transport/tonic/src/a".to_owned(), 13)]);
}

/// The names that break the rule in sources with these paths and texts, and how many files define
/// them.
fn ambiguous(sources: &[(&str, &str)]) -> Vec<(String, usize)> {
    let made_up = |(path, text): &(&str, &str)| Source::new(path, text);
    let mut sources: Vec<_> = sources.iter().map(made_up).collect();
    sources.push(Source::new("memory/Cargo.toml", ""));
    let types = names::types(&sources).expect("made-up sources parse");
    names::ambiguous(&types).map(|(name, files)| (name.to_owned(), files.len())).collect()
}

#[test]
fn a_name_of_three_types_is_found() {
    let (a, b, c) = ("memory/src/a.rs", "transport/x/src/b.rs", "transport/y/src/c/mod.rs");
    let chunk = "pub struct Chunk(u8);";
    assert_eq!(ambiguous(&[(a, chunk), (b, "enum Chunk {}")]), []);
    for third in ["union Chunk { a: u8 }", "mod inner { pub(crate) struct Chunk<T>(T); }"] {
        assert_eq!(ambiguous(&[(a, chunk), (b, chunk), (c, third)]), [("Chunk".to_owned(), 3)]);
    }
    // One file may define a type for each of several systems, and may use or export others' types.
    let twice = "#[cfg(unix)] struct Chunk; #[cfg(windows)] struct Chunk;";
    let uses = "pub use x::Chunk; impl Chunk {} fn f() -> Chunk { m!(struct Chunk;) }";
    assert_eq!(ambiguous(&[(a, chunk), (b, twice), (c, uses)]), []);
}

#[test]
fn a_bare_name_is_found() {
    let library = "memory/src/a.rs";
    let one = |name: &str, files| vec![(name.to_owned(), files)];
    assert_eq!(ambiguous(&[(library, "enum State { A }")]), one("State", 1));
    assert_eq!(
        ambiguous(&[(library, "struct Next;"), ("transport/x/src/b.rs", "enum Next {}")]),
        { one("Next", 2) }
    );
    assert_eq!(ambiguous(&[(library, "enum SendState {} enum A { State } type State = A;")]), []);
    for program in ["rpc-demo/src/a.rs", "benches/src/a.rs"] {
        assert_eq!(ambiguous(&[(program, "enum Kind {} struct Chunk;")]), one("Kind", 1));
        let chunk = "struct Chunk;";
        assert_eq!(
            ambiguous(&[(library, chunk), ("memory/src/b.rs", chunk), (program, chunk)]),
            []
        );
    }
}

#[test]
fn tests_and_other_crates_may_have_any_names() {
    let library = ("memory/src/a.rs", "#[cfg(test)] mod tests { struct State; enum Kind {} }");
    let other = [
        "memory/tests/a.rs",
        "memory/src/tests/a.rs",
        "memory/src/b/tests.rs",
        "memory/src/test_util.rs",
        "memory/examples/a.rs",
        "rpc-demo/tests/a.rs",
    ];
    let mut sources = vec![library];
    sources.extend(other.map(|path| (path, "struct State; struct Chunk;")));
    assert_eq!(ambiguous(&sources), []);
}

#[test]
fn the_word_unsafe_is_found_in_code_only() {
    let lines = |text: &str| unsafety::lines(&Source::new("a.rs", text)).unwrap();
    assert_eq!(lines("fn f() {\n    unsafe { g() }\n}\nunsafe impl S for T {}"), [2, 4]);
    assert_eq!(lines("m! {\n    (unsafe { g() })\n}\n#[unsafe(no_mangle)] fn f() {}"), [2, 4]);
    assert_eq!(lines("// unsafe\n/// unsafe\nconst A: &str = \"unsafe\"; fn is_unsafe() {}"), NONE);
}

#[test]
fn a_lint_that_is_off_is_found() {
    let root = "[workspace]\nmembers = [\n    \"a\",\n]\n[workspace.lints.clippy]\n\
                undocumented_unsafe_blocks = \"deny\"\n";
    let member = "[package]\nname = \"a\"\n\n[lints]\nworkspace = true\n";
    let found = |root: &str, member: &str, source: &str| {
        unsafety::lint_is_off(&[
            Source::new("Cargo.toml", root),
            Source::new("a/Cargo.toml", member),
            Source::new("a/src/lib.rs", source),
        ])
    };
    assert_eq!(found(root, member, ""), Vec::<String>::new());
    assert_eq!(found(&root.replace("deny", "warn"), member, "").len(), 1);
    assert_eq!(found(root, "[package]\n", "").len(), 1);
    assert_eq!(found(root, member, "#![allow(clippy::undocumented_unsafe_blocks)]").len(), 1);
}

/// A Makefile with eight targets, four of them tests and three of them checks.
const MAKEFILE: &str = "\
CARGO ?= cargo
.PHONY: build test test-a \\
    test-b test-c test-d
build: packages ## compile
\t$(CARGO) build: not a target
TESTS := test-a \\
    test-b
TESTS_BESIDE := test-d
MORE_TESTS = test-c
CHECKS := lint links
CHECKS_BESIDE := package
test-a test-b: build ## two of them
test-c test-d:
lint: ; true
links package:
";

fn workflow(text: &str) -> [Source; 1] {
    [Source::new("ci.yml", text)]
}

#[test]
fn targets_and_lists_of_a_makefile_are_read() {
    let targets: Vec<_> = workflows::targets(MAKEFILE).into_iter().collect();
    let expected = ["build", "links", "lint", "package", "test-a", "test-b", "test-c", "test-d"];
    assert_eq!(targets, expected);
    let list = |name| workflows::variable(MAKEFILE, name);
    assert_eq!(list("TESTS"), Some(vec!["test-a", "test-b"]));
    assert_eq!(list("TESTS_BESIDE"), Some(vec!["test-d"]));
    assert_eq!(list("MORE_TESTS"), Some(vec!["test-c"]));
    assert_eq!(list("CHECKS"), Some(vec!["lint", "links"]));
    assert_eq!(list("MORE"), None);
}

#[test]
fn pipes_whose_reader_ends_early_are_found() {
    let script = "\
#!/bin/bash
# ldd x | grep -q y
ldd x | grep -q y || exit 1
ldd x | sort | grep -xqF y
ldd x | grep -x y >/dev/null || grep -q z file
grep -q x file || head file
first=$(ldd x | head -n 1)
ldd x | grep -e '-q' --quota | sed -n 1p
";
    assert_eq!(pipes::cut_short(script), [3, 4, 7]);
    let is_script = |path| pipes::is_script(&Source::new(path, script));
    assert!(is_script("scripts/x") && is_script(".ci/run") && !is_script("x.md"));
}

#[test]
fn calls_of_make_are_found_in_every_form() {
    let text = "\
jobs:
  x:
    # run: make commented
    steps:
      - run: make one two # and three
      - name: make named
        run: sudo apt-get install make gcc && CI=true make --no-print-directory four A=b
      - run: |
          # make five
          if timeout -k 5 60 make six; then
              echo make seven

              make eight || (make nine)
          fi
      - uses: make/ten@v1
        with:
          run: 'make eleven'
";
    let found: Vec<_> = workflows::calls(text).into_iter().map(|c| (c.line, c.target)).collect();
    let expected = [
        (5, "one"),
        (5, "two"),
        (7, "four"),
        (10, "six"),
        (13, "eight"),
        (13, "nine"),
        (17, "eleven"),
    ];
    assert_eq!(found, expected.map(|(line, target)| (line, target.to_owned())));
}

#[test]
fn a_workflow_that_runs_all_tests_and_checks_is_sound() {
    let sound = workflow(
        "- run: make test-a test-b links\n- run: |\n    make test-c test-d package\n    make lint\n",
    );
    assert_eq!(workflows::wrong(MAKEFILE, &sound), Ok(vec![]));
}

#[test]
fn a_target_that_does_not_exist_is_found_in_a_workflow() {
    let all = "- run: make test-a test-b test-c test-d lint links package\n";
    for wrong in ["- run: make test-e\n", "- run: |\n    make test-e\n"] {
        let found = workflows::wrong(MAKEFILE, &workflow(&format!("{all}{wrong}"))).unwrap();
        let line = wrong.lines().count() + 1;
        assert_eq!(found, [format!("ci.yml:{line}: the Makefile has no target test-e")]);
    }
    let matrix = workflow(&format!("{all}- run: make ${{{{ matrix.target }}}}\n"));
    let found = workflows::wrong(MAKEFILE, &matrix).unwrap();
    assert!(found[0].starts_with("ci.yml:2: the Makefile has no target ${{"), "{found:?}");
}

#[test]
fn a_step_of_each_list_that_no_workflow_runs_is_found() {
    let found = workflows::wrong(MAKEFILE, &workflow("- run: make test-b build lint\n"));
    let expected = [
        "no workflow runs make test-a, a step of TESTS",
        "no workflow runs make test-d, a step of TESTS_BESIDE",
        "no workflow runs make test-c, a step of MORE_TESTS",
        "no workflow runs make links, a step of CHECKS",
        "no workflow runs make package, a step of CHECKS_BESIDE",
    ];
    assert_eq!(found, Ok(expected.map(str::to_owned).to_vec()));
}

/// A list that got another name must not escape the rule.
#[test]
fn a_list_that_the_makefile_does_not_have_is_an_error() {
    let makefile = "TESTS := build\nMORE_TESTS :=\nCHECKS :=\nSTEPS := build\nbuild:\n";
    let found = workflows::wrong(makefile, &workflow("- run: make build\n"));
    let error = "the Makefile does not assign to TESTS_BESIDE, CHECKS_BESIDE: \
                 correct LISTS in workflows.rs";
    assert_eq!(found, Err(error.to_owned()));
}

#[test]
fn a_log_line_without_the_throttle_is_found() {
    let lines = |text: &str| logging::lines(&Source::new("a.rs", text)).unwrap();
    for name in ["warn", "error", "info", "event"] {
        for (text, line) in [
            (format!("fn f() {{\n if true {{\n  tracing::{name}!(%peer, \"hello\");\n }}\n}}"), 3),
            (format!("fn f() {{ x(|| {name}![7]) }}"), 1),
            (format!("use tracing::{name} as tell;"), 1),
            (format!("use tracing::{{Level, {name}}};"), 1),
        ] {
            assert_eq!(lines(&text), (vec![line], 0), "{text}");
        }
        let throttled = format!("fn f() {{ throttled!(in THROTTLE, {name}, peer, \"hello\"); }}");
        assert_eq!(lines(&throttled), (vec![], 1));
    }
    let sound =
        "use tracing::{Span, debug}; fn f() { debug!(\"{}\", 7); let error = !warn; info(error) }";
    assert_eq!(lines(sound), (vec![], 0));
    let holds = |path: &str| logging::holds(&Source::new(path, ""));
    assert!(
        holds("transport/fabric/src/verbs/listener.rs") && holds("transport/codec/src/sink.rs")
    );
    for other in
        ["memory/src/log_throttle.rs", "transport/tonic/src/tests/a.rs", "rpc-demo/src/a.rs"]
    {
        assert!(!holds(other), "{other}");
    }
}

#[test]
fn figures_that_are_not_those_of_the_code_are_found() {
    let code = "const MOST: u64 = 4 << 30; const WAIT: Duration = Duration::from_millis(50);
        impl A { pub const HALF: usize = SIZE as usize / 2; } const SIZE: u32 = 64 * (1 << 10);
        impl Default for B { fn default() -> B { B { window: 2 << 20, other } } }
        #[cfg(test)] mod tests { const MOST: u64 = 1; }";
    let sources = [
        Source::new("a/x/src/map.rs", code),
        Source::new("a/y/src/map.rs", "const MOST: u8 = 1; const BAD: f64 = 1.0;"),
        Source::new("a/y/src/lock/mod.rs", "const MOST: u8 = 1_0;"),
    ];
    let wrong = |cell: &str| match figures::of_cell(cell) {
        Ok(found) => {
            found.iter().filter(|figure| figures::check(figure, &sources).is_err()).count()
        }
        Err(_) => usize::MAX,
    };
    for (cell, expected) in [
        ("as many as there are; `its_setting`", 0),
        ("4 GiB (`x::map::MOST`), 50 ms (`map::WAIT`) each, then 32 KiB (`map::HALF`)", 0),
        ("2 MiB of payload (`map::window`), of 1/10 (`lock::MOST`)", 0),
        ("65,536 (`map::SIZE`)", 0),
        ("2 GiB (`x::map::MOST`), 4 (`x::map::MOST`)", 2),
        ("50 s (`map::WAIT`)", 1),
        ("1 MiB (`map::window`)", 1),
        // Two such constants, no such constant, a value that is not an integer, and a path without
        // a module.
        ("1 (`map::MOST`), 1 (`map::OTHER`), 1 (`map::BAD`), 10 (`MOST`)", 4),
        ("4 GiB", usize::MAX),
        ("5 in 4 GiB (`x::map::MOST`)", usize::MAX),
        ("as many (`lock::MOST`)", usize::MAX),
    ] {
        assert_eq!(wrong(cell), expected, "{cell}");
    }
}

/// The pointers in a document `docs/a.md` with this text that lead nowhere.
fn wrong_pointers(text: &str) -> Vec<(usize, String)> {
    let sources = [
        Source::new("docs/a.md", text),
        Source::new("docs/b.md", "# On `this` and that\n\n## Twice\n\n## Twice\n"),
        Source::new("Makefile", "test: all ## run\nall:\n\ttrue\nX := y\n"),
        Source::new(
            "memory/Cargo.toml",
            "[package]\nname = \"m\"\n[dependencies]\nother-one = \"1\"\n",
        ),
        Source::new(
            "memory/src/lib.rs",
            "mod arena; pub struct Pool { pub len: usize } pub fn make() {}",
        ),
        Source::new(
            "memory/src/arena/mod.rs",
            "mod piece; struct Arena; impl Arena { fn cut() {} }",
        ),
        Source::new("memory/src/arena/piece.rs", "enum Piece {}"),
    ];
    let tree = pointers::Tree::of(&sources, |path| path == "docs/image.png");
    let (wrong, all) = tree.wrong(&sources[0]);
    assert!(all >= wrong.len());
    wrong.into_iter().map(|wrong| (wrong.line, wrong.what)).collect()
}

#[test]
fn documents_that_point_at_nothing_are_found() {
    let sound = "[b](b.md#on-this-and-that), [t](./b.md#twice-1), [root](../Makefile) and [i](image.png),\n\
                 [far](https://example.com/b.md#none), `memory/src/arena/`, `arena/piece.rs`, `piece.rs`,\n\
                 `memory::arena::piece`, `arena::Arena::cut`, `memory::make`, `memory::len`, `other_one::Thing`,\n\
                 `std::io::Error`, `make test all`, `make test X=1`, `/proc/self`, `a/b`, `tests/NAME.rs`\n\
                 \n```sh\nmake test\n[x](none.md)\n```\n\n[ref]: b.md\n";
    assert_eq!(wrong_pointers(sound), []);
    for wrong in [
        "b.md#off-this",
        "c.md",
        "../docs/c.md",
        "`memory/src/none/`",
        "`none.rs`",
        "`arena/none.rs`",
        "`memory::none`",
        "`memory::arena::none`",
        "`none::Thing`",
        "`memory::arena::None`",
        "`arena::Arena::none`",
        "`make none`",
        "`make test none`",
    ] {
        let pointer = wrong.trim_matches('`').to_owned();
        let text = match wrong.starts_with('`') {
            true => format!("# A\n\nwith {wrong} in it"),
            false => format!("# A\n\nwith [a `link`]({wrong}) in it"),
        };
        assert_eq!(wrong_pointers(&text), [(3, pointer)], "{wrong}");
    }
    let block = "a\n\n    $ make none\n\n```sh\nmake nothing\n```\n";
    let lines: Vec<_> = wrong_pointers(block).into_iter().map(|(line, _)| line).collect();
    assert_eq!(lines, [3, 6]);
}
