//! Tests the loader with made-up libraries. A C compiler builds them. It is always installed,
//! because Rust needs it for linking.

use std::fmt::Write as _;
use std::fs;
use std::path::{Path, PathBuf};
use std::process::Command;

use tempfile::TempDir;

use super::*;
use crate::functions::DECLARED;
use crate::functions::{Files, Table};

const VERBS: &str = "libibverbs.so.1";
const CM: &str = "librdmacm.so.1";

/// Compiles a shared object.
fn compile(directory: &Path, name: &str, source: &str, arguments: &[&str]) -> PathBuf {
    let (c, library) = (directory.join(format!("{name}.c")), directory.join(name));
    fs::write(&c, source).unwrap();
    let mut cc = Command::new("cc");
    cc.args(["-shared", "-fPIC", "-w", "-o"]).arg(&library).arg(&c).args(arguments);
    let output = cc.current_dir(directory).output().unwrap();
    assert!(output.status.success(), "{}", String::from_utf8_lossy(&output.stderr));
    library
}

/// Returns C source that defines the library's functions as empty, except the functions that are
/// left out.
fn source(library: &str, left_out: impl Fn(&str, bool) -> bool) -> String {
    let mut source = String::new();
    for function in DECLARED.iter().filter(|function| function.library == library) {
        if !left_out(function.name, function.is_optional) {
            writeln!(source, "void {}(void) {{}}", function.name).unwrap();
        }
    }
    source
}

fn load(verbs: &Path, cm: &Path) -> Result<Table, LoadError> {
    let c_string = |path: &Path| CString::new(path.to_str().unwrap()).unwrap();
    let (verbs, cm) = (c_string(verbs), c_string(cm));
    Table::load(&Files { verbs: &verbs, cm: &cm })
}

fn refused(verbs: &Path, cm: &Path) -> LoadError {
    match load(verbs, cm) {
        Ok(_) => panic!("it was loaded"),
        Err(error) => error,
    }
}

#[test]
fn optional_functions_may_be_absent() {
    let directory = TempDir::new().unwrap();
    let old = |library: &str| {
        let source = source(library, |_, is_optional| is_optional);
        compile(directory.path(), &format!("old-{library}"), &source, &[])
    };
    let new = |library| {
        compile(directory.path(), &format!("new-{library}"), &source(library, |_, _| false), &[])
    };
    let table = load(&old(VERBS), &old(CM)).unwrap();
    assert!(table.ibv_reg_mr_iova.is_none() && table.ibv_reg_mr_iova2.is_none());
    assert!(table.ibv_reg_dmabuf_mr.is_none());
    assert!(table.rdma_establish.is_none() && table.rdma_init_qp_attr.is_none());
    let table = load(&new(VERBS), &new(CM)).unwrap();
    assert!(table.ibv_reg_mr_iova.is_some() && table.ibv_reg_mr_iova2.is_some());
    assert!(table.ibv_reg_dmabuf_mr.is_some());
    assert!(table.rdma_establish.is_some() && table.rdma_init_qp_attr.is_some());
}

#[test]
fn a_missing_function_is_named_with_its_library() {
    let directory = TempDir::new().unwrap();
    let whole = |library| compile(directory.path(), library, &source(library, |_, _| false), &[]);
    let without = |library, function: &str| {
        let source = source(library, |name, _| name == function);
        compile(directory.path(), &format!("{function}.so"), &source, &[])
    };
    let (verbs, cm) = (whole(VERBS), whole(CM));
    let error = refused(&without(VERBS, "ibv_wc_status_str"), &cm).to_string();
    assert!(error.starts_with("libibverbs.so.1 has no function ibv_wc_status_str: "), "{error}");
    assert!(error.contains("/ibv_wc_status_str.so: undefined symbol: "), "{error}");
    let error = refused(&verbs, &without(CM, "rdma_migrate_id")).to_string();
    assert!(error.starts_with("librdmacm.so.1 has no function rdma_migrate_id: "), "{error}");
}

/// Other C libraries have no dlvsym.
#[cfg(target_env = "gnu")]
#[test]
fn a_function_in_an_older_version_is_another_function() {
    let directory = TempDir::new().unwrap();
    fs::write(directory.path().join("map"), "IBVERBS_1.0 { global: *; };").unwrap();
    let arguments = ["-Wl,--version-script=map"];
    let old = compile(directory.path(), VERBS, &source(VERBS, |_, _| false), &arguments);
    let cm = compile(directory.path(), CM, &source(CM, |_, _| false), &[]);
    let error = refused(&old, &cm).to_string();
    assert!(error.starts_with("libibverbs.so.1 has no function ibv_get_device_list: "), "{error}");
    assert!(error.contains("version IBVERBS_1.1"), "{error}");
}

#[test]
fn a_library_that_lacks_what_it_needs_is_refused() {
    let directory = TempDir::new().unwrap();
    let verbs = source(VERBS, |_, _| false);
    let needy = format!("{verbs} void absent(void); void f(void) {{ absent(); }}");
    let needy = compile(directory.path(), VERBS, &needy, &[]);
    let error = refused(&needy, Path::new("/no/such/library")).to_string();
    assert!(error.starts_with("libibverbs.so.1 cannot be loaded: "), "{error}");
    assert!(error.contains("undefined symbol: absent"), "{error}");
}

#[test]
fn the_words_of_the_dynamic_linker_are_passed_on() {
    let directory = TempDir::new().unwrap();
    let named = |name: &str| directory.path().join(name);
    let says = |file: &Path, words: &str| {
        let error = refused(file, Path::new("/no/such/library")).to_string();
        assert!(error.starts_with("libibverbs.so.1 cannot be loaded: "), "{error}");
        assert!(error.contains(words), "{error}");
    };
    says(&named("absent"), "No such file");
    fs::write(named("text"), "This is text.\n".repeat(100)).unwrap();
    says(&named("text"), "text");

    let library = compile(directory.path(), VERBS, "void f(void) {}", &[]);
    let elf = fs::read(&library).unwrap();
    let patched = |name: &str, at: usize, bytes: &[u8]| {
        let mut elf = elf.clone();
        elf[at..at + bytes.len()].copy_from_slice(bytes);
        fs::write(named(name), elf).unwrap();
        named(name)
    };
    // In an ELF file, byte 18 is the processor, and byte 4 is the width of its words.
    says(&patched("other", 18, &[22, 0]), "/other is for S/390)");
    says(&patched("unknown", 18, &[0x34, 0x12]), "is for the processor that ELF numbers 4660)");
    says(
        &patched("narrow", 4, &[1, 1, 1, 0, 0, 0, 0, 0, 0, 0, 0, 0, 0, 0, 3, 0]),
        "/narrow is for x86)",
    );
}

#[test]
fn own_libraries_and_other_files_are_not_foreign() {
    assert_eq!(machine(&std::env::current_exe().unwrap()), None);
    assert_eq!(machine(Path::new("/etc/passwd")), None);
    assert_eq!(machine(Path::new("/no/such/file")), None);
    assert_eq!(foreign(c"libno_such_library.so.1"), None);
}
