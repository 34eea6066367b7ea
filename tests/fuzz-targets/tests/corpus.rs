//! Runs the fuzz targets on their corpora and on variants of these, without the fuzzer.

use std::path::{Path, PathBuf};

use tonic_rdma_fuzz_targets::TARGETS;

fn corpus(target: &str) -> Vec<(PathBuf, Vec<u8>)> {
    let folder = Path::new(env!("CARGO_MANIFEST_DIR")).join("../fuzz/corpus").join(target);
    let entries =
        std::fs::read_dir(&folder).unwrap_or_else(|error| panic!("{}: {error}", folder.display()));
    let mut inputs: Vec<(PathBuf, Vec<u8>)> = entries
        .map(|entry| {
            let path = entry.expect("an entry of the folder").path();
            let data = std::fs::read(&path).expect("a file of the corpus");
            (path, data)
        })
        .collect();
    inputs.sort();
    inputs
}

#[test]
fn every_corpus_is_well() {
    for (name, target) in TARGETS {
        let inputs = corpus(name);
        assert!(inputs.len() >= 15, "{name}: {} inputs", inputs.len());
        for (path, data) in inputs {
            println!("{}", path.display());
            target(&data);
        }
    }
}

/// Number of variants of each corpus.
const NEIGHBOURS: usize = 3000;

/// Variants of the corpus: a byte changed, the input truncated, or two inputs joined.
#[test]
fn neighbours_of_every_corpus_are_well() {
    let mut state = 0x2545_f491_4f6c_dd1d_u64;
    let mut next = |below: usize| {
        state ^= state << 13;
        state ^= state >> 7;
        state ^= state << 17;
        (state % below.max(1) as u64) as usize
    };
    let mut executions = 0;
    for (name, target) in TARGETS {
        let inputs: Vec<Vec<u8>> = corpus(name).into_iter().map(|(_, data)| data).collect();
        for _ in 0..NEIGHBOURS {
            let mut data = inputs[next(inputs.len())].clone();
            match next(3) {
                0 if !data.is_empty() => {
                    let at = next(data.len());
                    data[at] = next(256) as u8;
                }
                1 => data.truncate(next(data.len() + 1)),
                _ => {
                    let other = &inputs[next(inputs.len())];
                    data.truncate(next(data.len() + 1));
                    data.extend_from_slice(&other[next(other.len() + 1)..]);
                }
            }
            target(&data);
        }
        executions += inputs.len() + NEIGHBOURS;
    }
    tell(executions);
}

/// Records the number of executions of both tests for `tests/figures`.
fn tell(executions: usize) {
    // The directory that cargo provides for tests is in the target directory.
    let folder = Path::new(env!("CARGO_TARGET_TMPDIR")).join("../figures");
    std::fs::create_dir_all(&folder).expect("a directory for figures");
    std::fs::write(folder.join("fuzz"), format!("{executions}\n")).expect("the file of figures");
}

/// Each target has a corpus, a file for the fuzzer, and an entry in the manifest.
#[test]
fn every_target_is_complete() {
    let here = Path::new(env!("CARGO_MANIFEST_DIR")).join("../fuzz");
    let manifest = std::fs::read_to_string(here.join("Cargo.toml")).expect("the fuzzer's manifest");
    for (name, _) in TARGETS {
        assert!(here.join("fuzz_targets").join(format!("{name}.rs")).exists(), "{name}");
        assert!(manifest.contains(&format!("name = \"{name}\"")), "{name}");
    }
    let folders = std::fs::read_dir(here.join("corpus")).expect("corpora").count();
    assert_eq!(folders, TARGETS.len());
}
