//! The repository keeps its rules, except for the exceptions that `known` lists.

use std::sync::OnceLock;

use tonic_rdma_source_rules::{
    CRATES, Finding, Findings, figures, files, pipes, pointers, size, wording, workflows,
};

mod known;

const PRINT: &str = "cargo run -q -p tonic-rdma-source-rules -- --known \
                    > tests/source-rules/tests/known/mod.rs";

fn findings() -> &'static Findings {
    static FINDINGS: OnceLock<Findings> = OnceLock::new();
    FINDINGS.get_or_init(|| {
        let sources = files::read(&files::root()).expect("the repository can be read");
        Findings::of(&sources).expect("all sources parse")
    })
}

/// Fails when something new is found, and when something listed is not there any more.
fn compare(list: &str, known: &[&str], found: &[Finding]) {
    let new: Vec<_> = found
        .iter()
        .filter(|finding| !known.contains(&finding.path.as_str()))
        .map(|finding| format!("    {}\n", finding.what))
        .collect();
    let gone: Vec<_> = known
        .iter()
        .filter(|path| !found.iter().any(|finding| finding.path == **path))
        .map(|path| format!("    {path}\n"))
        .collect();
    assert!(new.is_empty(), "breaks the rule, and is not in known::{list}:\n{}", new.concat());
    assert!(
        gone.is_empty(),
        "keeps the rule now, take it out of known::{list}, or print the lists again ({PRINT}):\n{}",
        gone.concat()
    );
}

#[test]
fn files_do_not_need_each_other() {
    // These four crates have many files and imports. Lower numbers would mean that the search has
    // missed some.
    for (root, (files, imports)) in CRATES.iter().zip(&findings().crates).take(4) {
        assert!(*files >= 15 && *imports >= 15, "{root}: {files} files, {imports} imports");
    }
    compare("CIRCLES", known::CIRCLES, &findings().circles);
}

#[test]
fn modules_do_not_need_their_parents_in_a_circle() {
    compare("PARENTS", known::PARENTS, &findings().parents);
}

#[test]
fn comments_and_documents_end_at_column_100() {
    let lines = findings().prose_lines;
    assert!(lines > 5_000, "only {lines} lines of prose were looked at");
    compare("WIDE", known::WIDE, &findings().wide);
}

#[test]
fn architecture_md_is_read_in_ten_minutes() {
    let path = "ARCHITECTURE.md";
    let text = std::fs::read_to_string(files::root().join(path)).unwrap();
    let words = size::words(&files::Source::new(path, &text));
    let most = size::MAX_WORDS;
    assert!(words > 1_000, "only {words} words were counted where there are many");
    assert!(words <= most, "{path}: {words} words, at most {most}: move details to their modules");
}

#[test]
fn files_are_short() {
    compare("LONG", known::LONG, &findings().long);
}

#[test]
fn folders_of_transport_tonic_have_few_files() {
    compare("FULL", known::FULL, &findings().full);
}

#[test]
fn names_of_types_mean_one_thing() {
    let types = findings().types;
    assert!(types > 500, "only {types} names were looked at");
    compare("NAMES", known::NAMES, &findings().names);
}

#[test]
fn unsafe_is_in_its_places_only() {
    let lines = findings().unsafe_lines;
    assert!(lines > 50, "only {lines} lines with unsafe were looked at where there are many");
    compare("UNSAFE", known::UNSAFE, &findings().unsafe_files);
}

#[test]
fn clippy_asks_for_safety_comments_everywhere() {
    assert_eq!(findings().lint_is_off, Vec::<String>::new());
}

#[test]
fn wordings_to_avoid_get_fewer() {
    const LIST: &str = include_str!("known/wording.txt");
    let known = wording::read_list(LIST).expect("the list has a number and a path to a line");
    let wrong = wording::compare(&known, &findings().wording_counts());
    assert!(
        wrong.is_empty(),
        "tests/source-rules/src/wording.rs says what to write, `cargo run -q -p \
         tonic-rdma-source-rules -- PATH` shows the places, and with `--wording > \
         tests/source-rules/tests/known/wording.txt` it brings the list down:\n{}",
        wrong.join("\n")
    );
}

#[test]
fn workflows_run_every_test_and_check_by_a_target_that_exists() {
    let root = files::root();
    let makefile = std::fs::read_to_string(root.join("Makefile")).unwrap();
    let mut sources = files::read(&root.join(".github/workflows")).unwrap();
    sources.retain(|source| source.path.ends_with(".yml") || source.path.ends_with(".yaml"));
    let calls: usize = sources.iter().map(|source| workflows::calls(&source.text).len()).sum();
    assert!(calls >= 15, "only {calls} calls of make were found where there are many");
    assert_eq!(workflows::wrong(&makefile, &sources), Ok(Vec::new()));
}

#[test]
fn scripts_read_each_pipe_to_its_end() {
    let mut sources = files::read(&files::root()).unwrap();
    sources.retain(pipes::is_script);
    assert!(sources.len() > 40, "only {} scripts were looked at of many", sources.len());
    for script in sources {
        assert_eq!(pipes::cut_short(&script.text), [0; 0], "lines of {}", script.path);
    }
}

#[test]
fn documents_point_at_what_exists() {
    let sources = files::read(&files::root()).unwrap();
    let tree = pointers::Tree::of(&sources, |path| files::root().join(path).exists());
    let current = |path: &str| path.ends_with(".md") && !pointers::HISTORY.contains(&path);
    let (mut wrong, mut all) = (String::new(), 0);
    for document in sources.iter().filter(|source| current(&source.path)) {
        let (found, pointers) = tree.wrong(document);
        all += pointers;
        for pointer in found {
            wrong += &format!("    {}:{}: {}\n", document.path, pointer.line, pointer.what);
        }
    }
    assert!(all > 500, "only {all} pointers were looked at where there are many");
    assert!(wrong.is_empty(), "nothing is there:\n{wrong}");
}

/// A peer must not fill the log.
#[test]
fn log_lines_that_a_peer_can_cause_go_through_the_throttle() {
    let lines = findings().throttled_lines;
    assert!(lines > 50, "only {lines} log lines go through the throttle where there are many");
    compare("UNTHROTTLED", known::UNTHROTTLED, &findings().unthrottled);
}

/// Whether a link in Markdown, [`name`](path) relative to `base`, names a test of that file.
fn links_a_test(link: &str, base: &std::path::Path) -> bool {
    let Some((test, place)) = link.split_once("`](") else { return false };
    let (test, place) = (test.trim_start_matches("[`"), place.trim_end_matches(')'));
    let source = std::fs::read_to_string(base.join(place)).unwrap_or_default();
    source.contains(&format!("fn {test}("))
}

/// Each row of docs/adopting.md names a test, and the file that has it.
#[test]
fn rows_of_adopting_have_their_tests() {
    let docs = files::root().join("docs");
    let text = std::fs::read_to_string(docs.join("adopting.md")).unwrap();
    let rows: Vec<_> = text.lines().filter(|line| line.starts_with("| ")).skip(1).collect();
    assert!(rows.len() >= 12, "{} rows", rows.len());
    for row in rows {
        let last = row.trim_end_matches(" |").rsplit(" | ").next().unwrap();
        assert!(links_a_test(last, &docs), "no such test: {row}");
    }
}

/// Each attack that SECURITY.md names is carried out by the tests of its row.
#[test]
fn attacks_of_security_md_have_their_tests() {
    let root = files::root();
    let text = std::fs::read_to_string(root.join("SECURITY.md")).unwrap();
    let (_, section) = text.split_once("## Attacks that are tests").unwrap();
    let section = section.split_once("\n## ").unwrap().0;
    let rows: Vec<_> = section.lines().filter(|line| line.starts_with("| ")).skip(1).collect();
    assert!(rows.len() >= 15, "{} rows", rows.len());
    for row in rows {
        let last = row.trim_end_matches(" |").rsplit(" | ").next().unwrap();
        for link in last.split(", ") {
            assert!(links_a_test(link, &root), "no such test: {link}");
        }
    }
}

/// R19: each resource that a peer can make this process spend has a row in SECURITY.md, with a
/// limit that is the code's, and a test.
#[test]
fn what_a_peer_can_spend_is_limited_as_security_md_says() {
    const RESOURCES: [&str; 11] = [
        "heap",
        "pages of own files",
        "pages of foreign files",
        "mappings",
        "address space",
        "descriptors",
        "threads",
        "processor time of helper threads",
        "log lines",
        "tickets",
        "Offers",
    ];
    let root = files::root();
    let sources = files::read(&root).unwrap();
    let text = std::fs::read_to_string(root.join("SECURITY.md")).unwrap();
    let (_, section) = text.split_once("## What a peer can make this process spend").unwrap();
    let section = section.split_once("\n## ").unwrap().0;
    let rows = section.lines().filter_map(|line| line.strip_prefix("| ")?.strip_suffix(" |"));
    let rows: Vec<Vec<_>> = rows.skip(1).map(|row| row.split(" | ").collect()).collect();
    for resource in RESOURCES {
        assert!(rows.iter().any(|row| row[0].starts_with(resource)), "no row: {resource}");
    }
    let mut wrong = Vec::new();
    let mut held = 0;
    for row in &rows {
        let [what, charged, limit, beyond, test] = row[..] else { panic!("{row:?}") };
        assert!(!charged.is_empty() && !beyond.is_empty(), "{what}");
        for link in test.split(", ").filter(|link| !links_a_test(link, &root)) {
            wrong.push(format!("{what}: no such test: {link}"));
        }
        match figures::of_cell(limit) {
            Ok(figures) => {
                held += figures.len();
                wrong.extend(figures.iter().filter_map(|f| figures::check(f, &sources).err()));
            }
            Err(error) => wrong.push(error),
        }
    }
    assert!(wrong.is_empty(), "{}", wrong.join("\n"));
    assert!(held >= 30, "only {held} figures were looked at where there are many");
}

/// A package holds only files below its own folder, so each published crate has the licences there.
#[test]
fn published_crates_have_the_licences() {
    let root = files::root();
    let published = std::process::Command::new(root.join("scripts/published")).output().unwrap();
    let published = String::from_utf8(published.stdout).unwrap();
    let sources = files::read(&root).unwrap();
    let mut wrong = Vec::new();
    for package in published.lines() {
        let name = format!("name = \"{package}\"");
        let is_its = |text: &str| text.lines().any(|line| line == name);
        let manifest = sources
            .iter()
            .find(|source| source.path.ends_with("/Cargo.toml") && is_its(&source.text))
            .unwrap_or_else(|| panic!("scripts/published names {package}, which has no manifest"));
        let folder = root.join(&manifest.path).with_file_name("");
        for licence in ["LICENSE-APACHE", "LICENSE-MIT"] {
            let text = std::fs::read(root.join(licence)).unwrap();
            if std::fs::read(folder.join(licence)).ok() != Some(text) {
                wrong.push(format!("{}: make a link to {licence} beside it", manifest.path));
            }
        }
    }
    assert!(published.lines().count() >= 9, "only these are published: {published}");
    assert!(wrong.is_empty(), "{}", wrong.join("\n"));
}
