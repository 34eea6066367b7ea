//! The commands ls, stat, rm, bench and completions.

#![allow(clippy::unwrap_used)]

mod common;

use std::fs::{self, File, FileTimes, Permissions};
use std::os::unix::fs::{PermissionsExt, symlink};
use std::process::Stdio;
use std::time::{Duration, UNIX_EPOCH};

use common::*;

#[test]
fn ls_and_stat_tell_sizes_times_and_checksums() {
    let dir = scratch();
    let at = |path: &str| dir.path().join(path);
    fs::create_dir(at("root")).unwrap();
    let server = Server::start(&at("root"));
    let file = at("file");
    fs::write(&file, "123456789").unwrap();
    fs::set_permissions(&file, Permissions::from_mode(0o640)).unwrap();
    let time = UNIX_EPOCH + Duration::new(1_700_000_000, 500_000_000);
    File::open(&file).unwrap().set_times(FileTimes::new().set_modified(time)).unwrap();
    ok(server.client(["put".as_ref(), file.as_os_str(), "dir/a \"name\"\n".as_ref()]));
    symlink("x", at("root/link")).unwrap();
    // A file that was not put: its CRC32C is known only after reading it.
    fs::write(at("root/stranger"), "123456789").unwrap();

    let short = ok(server.client(["ls"]));
    let expected = "               -  dir/\n               9  dir/a \"name\"\\n\n               ?  link (a symbolic link)\n               9  stranger\n";
    assert_eq!(stdout(&short), expected);
    let long = ok(server.client(["ls", "dir", "--long"]));
    let line = stdout(&long).lines().nth(1).unwrap();
    let fields: Vec<_> = line.split_whitespace().take(4).collect();
    assert_eq!(fields, ["-rw-r-----", "9", "2023-11-14", "22:13:20"]);

    let entries = |args: &[&str]| -> Vec<serde_json::Value> {
        stdout(&ok(server.client(args)))
            .lines()
            .map(|line| serde_json::from_str(line).unwrap())
            .collect()
    };
    let listed = entries(&["ls", "--json", "--checksum"]);
    let names: Vec<_> = listed.iter().map(|entry| entry["name"].as_str().unwrap()).collect();
    assert_eq!(names, ["dir", "dir/a \"name\"\n", "link", "stranger"]);
    let kinds: Vec<_> = listed.iter().map(|entry| entry["kind"].as_str().unwrap()).collect();
    assert_eq!(kinds, ["directory", "file", "other", "file"]);
    let object = &listed[1];
    assert_eq!(number(object, "size"), 9);
    assert_eq!((&object["mode"], &object["crc32c"]), (&"0640".into(), &"e3069283".into()));
    assert_eq!(object["modified"], "2023-11-14T22:13:20.5Z");
    assert_eq!(listed[3]["crc32c"], "e3069283");
    assert_eq!(listed[2]["note"], "a symbolic link");
    assert!(entries(&["ls", "--json"])[3].get("crc32c").is_none(), "nobody has read it");

    let stat = json(&ok(server.client(["stat", "stranger", "--json"])));
    assert_eq!((number(&stat, "size"), &stat["crc32c"]), (9, &"e3069283".into()));
    let stat = ok(server.client(["stat", "dir/"]));
    says(
        stdout(&stat),
        &["name      dir\n", "kind      directory\n", "mode      0755 (drwxr-xr-x)\n"],
    );
    says(&failed(server.client(["stat", "missing"]), 1), &["'missing'", "rpc-demo ls"]);
}

#[test]
fn rm_removes_what_it_is_told_to() {
    let dir = scratch();
    let root = dir.path();
    let server = Server::start(root);
    for name in ["a/b/x", "a/b/y", "a/z", "single", "other"] {
        ok(server.client(["put", "/dev/null", name]));
    }
    let line = failed(server.client(["rm", "a"]), 1);
    says(&line, &["cannot remove 'a'", "it is a directory", "--recursive"]);
    says(&failed(server.client(["rm", "missing"]), 1), &["'missing'"]);
    assert_eq!(names(root), [".rpc-demo-tmp", "a", "other", "single"]);
    let rm = ok(server.client(["rm", "single", "a/z"]));
    assert_eq!(stdout(&rm).lines().count(), 2);
    let rm = json(&ok(server.client(["rm", "-r", "--json", "a/", "other"])));
    assert_eq!((number(&rm, "files"), number(&rm, "directories"), number(&rm, "bytes")), (3, 2, 0));
    assert_eq!(names(root), [".rpc-demo-tmp"]);
    assert_eq!(server.unfinished(), 0);
}

#[test]
fn bench_measures_and_cleans_up() {
    let dir = scratch();
    let server = Server::start(dir.path());
    let bench = |more: &[&str]| {
        let mut command = server.client_command([
            "bench",
            "--sizes",
            "8KiB,1MiB",
            "--jobs",
            "3",
            "--amount",
            "2MiB",
        ]);
        ok(command.args(more).output().unwrap())
    };
    let report = json(&bench(&["--json"]));
    let figures = report["figures"].as_array().unwrap();
    let passes: Vec<_> = figures
        .iter()
        .map(|row| {
            (
                row["operation"].as_str().unwrap(),
                row["order"].as_str().unwrap(),
                number(row, "object_bytes"),
            )
        })
        .collect();
    let of = |size| {
        [("write", "sequential"), ("read", "sequential"), ("read", "random"), ("write", "random")]
            .map(|(operation, order)| (operation, order, size))
    };
    assert_eq!(passes, [of(8 << 10), of(1 << 20)].concat());
    for row in figures {
        let objects = number(row, "objects");
        assert_eq!(objects, if number(row, "object_bytes") == 8 << 10 { 256 } else { 3 });
        for figure in ["seconds", "bytes_per_second", "objects_per_second", "p50_ms", "p99_ms"] {
            assert!(row[figure].as_f64().unwrap() > 0.0, "{figure} of {row}");
        }
        assert!(row["p50_ms"].as_f64() <= row["p99_ms"].as_f64());
    }
    assert_eq!(names(dir.path()), [".rpc-demo-tmp"]);
    let table = bench(&[]);
    says(
        stdout(&table),
        &["operation", "sequential", "random", "8 KiB", "1 MiB", "MB/s", "jobs: 3", &path()],
    );

    // An interrupted bench also removes the objects that it has written.
    let mut command = server.client_command(["bench", "--sizes", "4KiB,8MiB", "--amount", "64GiB"]);
    let client = command.stdout(Stdio::piped()).stderr(Stdio::piped()).spawn().unwrap();
    until("it writes", dir.path(), || names(dir.path()).len() == 2);
    signal(&client, rustix::process::Signal::INT);
    says(&failed(client.wait_with_output().unwrap(), 1), &["interrupted", "SIGINT"]);
    assert_eq!(names(dir.path()), [".rpc-demo-tmp"]);
}

#[test]
fn completions_for_the_usual_shells() {
    for (shell, word) in [
        ("bash", "complete -F"),
        ("zsh", "#compdef rpc-demo"),
        ("fish", "complete -c rpc-demo"),
        ("elvish", "edit:completion"),
        ("powershell", "Register-ArgumentCompleter"),
    ] {
        let script = ok(program().args(["completions", shell]).output().unwrap());
        says(stdout(&script), &[word, "bench", "range-size", "require-rdma"]);
    }
    // bash accepts the script.
    let script = ok(program().args(["completions", "bash"]).output().unwrap());
    let check =
        std::process::Command::new("bash").args(["-n", "-c", stdout(&script)]).output().unwrap();
    assert!(check.status.success() && check.stderr.is_empty());
}

/// The completions that bash offers for the last word of `line`.
fn bash_offers(script: &str, line: &[&str]) -> Vec<String> {
    // The arguments with which bash calls the function: command, current word, previous word.
    let ask = r#"
        eval "$1"
        shift
        function=$(complete -p rpc-demo | sed -n 's/.* -F \([^ ]*\) .*/\1/p')
        COMP_WORDS=("$@")
        COMP_CWORD=$(($# - 1))
        "$function" "$1" "${COMP_WORDS[COMP_CWORD]}" "${COMP_WORDS[COMP_CWORD - 1]}"
        printf '%s\n' "${COMPREPLY[@]}"
    "#;
    let mut bash = std::process::Command::new("bash");
    let output = bash.args(["--norc", "-c", ask, "bash", script]).args(line).output().unwrap();
    assert!(output.status.success() && output.stderr.is_empty(), "{output:?}");
    stdout(&output).lines().map(str::to_owned).collect()
}

#[test]
fn bash_completes_behind_a_subcommand() {
    let script = ok(program().args(["completions", "bash"]).output().unwrap());
    let script = stdout(&script);
    assert_eq!(bash_offers(script, &["rpc-demo", "pu"]), ["put"]);
    assert_eq!(bash_offers(script, &["rpc-demo", "put", "--chunk"]), ["--chunk-size"]);
    assert_eq!(bash_offers(script, &["rpc-demo", "serve", "--no"]), ["--no-sync", "--no-direct"]);
    assert_eq!(bash_offers(script, &["target/release/rpc-demo", "doctor", "--pe"]), ["--peer"]);
    // bash also offers global flags, and the values of an argument.
    assert!(bash_offers(script, &["rpc-demo", "ls", "--"]).contains(&"--verbose".to_owned()));
    assert_eq!(bash_offers(script, &["rpc-demo", "completions", "fi"]), ["fish"]);
}

#[test]
fn failures_say_once_what_could_not_be_done() {
    let dir = scratch();
    fs::create_dir(dir.path().join("d")).unwrap();
    let server = Server::start(dir.path());
    for (args, what) in [(["ls", "x"], "cannot list 'x': "), (["rm", "x"], "cannot remove 'x': ")] {
        let line = failed(server.client(args), 1);
        says(&line, &[what, "No such file"]);
        assert_eq!(line.matches("cannot").count(), 1, "{line}");
    }
    let line = failed(server.client(["rm", "d"]), 1);
    says(
        &line,
        &["cannot remove 'd': it is a directory; --recursive removes it with everything below it"],
    );
    ok(server.client(["rm", "d", "--recursive"]));
    assert!(!dir.path().join("d").exists());
}

#[test]
fn host_names_will_do_for_addresses() {
    let dir = scratch();
    let mut serve = program();
    serve.arg("serve").arg("--addr").arg("localhost:0").arg("--root").arg(dir.path());
    let server = Server::spawn(serve, dir.path());
    let port = server.url.rsplit(':').next().unwrap();
    ok(program().args(["ls", "--server", &format!("localhost:{port}")]).output().unwrap());

    // RFC 6761: no name below `invalid` exists.
    let line =
        failed(program().args(["ls", "--server", "no-such-host.invalid:1"]).output().unwrap(), 1);
    says(
        &line,
        &["the host name 'no-such-host.invalid' cannot be resolved: ", "/etc/hosts and DNS"],
    );
    assert!(!line.contains("start one"), "{line}");
    let mut serve = program();
    serve.args(["serve", "--addr", "no-such-host.invalid:1", "--root", "/"]);
    says(
        &failed(serve.output().unwrap(), 2),
        &["--addr", "'no-such-host.invalid' cannot be resolved"],
    );
}

#[test]
fn help_teaches() {
    let help = ok(program().arg("--help").output().unwrap());
    says(stdout(&help), &["Try it:", "rpc-demo serve --root", "Exit codes", "TONIC_RDMA="]);
    let commands =
        ["serve", "put", "get", "ls", "stat", "rm", "cp", "bench", "demo", "doctor", "completions"];
    for command in commands {
        says(stdout(&help), &[&format!("\n  {command}")]);
        let help = ok(program().args([command, "--help"]).output().unwrap());
        says(stdout(&help), &[&format!("Usage: rpc-demo {command}")]);
        assert!(stdout(&help).lines().all(|line| line.chars().count() <= 120), "{}", stdout(&help));
        if !["ls", "stat", "rm", "bench", "demo"].contains(&command) {
            says(stdout(&help), &[&format!("\nExamples:\n  rpc-demo {command} ")]);
        }
    }
    let serve = ok(program().args(["serve", "--help"]).output().unwrap());
    says(
        stdout(&serve),
        &["RPC_DEMO_ROOT", "RPC_DEMO_ADDR", "RPC_DEMO_MAX_WRITES", "--no-sync", "SIGTERM"],
    );
}

#[test]
fn the_environment_configures_both_ends() {
    let dir = scratch();
    let mut serve = by_path(program());
    let addr = std::env::var("GUEST_ADDR").unwrap_or("127.0.0.1".into());
    serve.arg("serve").env("RPC_DEMO_ROOT", dir.path()).env("RPC_DEMO_ADDR", format!("{addr}:0"));
    serve
        .env("RPC_DEMO_NO_SYNC", "1")
        .env("RPC_DEMO_MAX_WRITES", "1")
        .env("RPC_DEMO_MAX_READS", "1");
    let mut server = Server::spawn(serve, dir.path());
    // These are more transfers than the server's limit, so they queue.
    let tree = scratch();
    for n in 0..20 {
        fs::write(tree.path().join(n.to_string()), content(100_000, n)).unwrap();
    }
    let mut put = server.client_command(["put".as_ref(), tree.path().as_os_str(), "t".as_ref()]);
    put.env("RPC_DEMO_JOBS", "20")
        .env("RPC_DEMO_CHUNK_SIZE", "8KiB")
        .env("RPC_DEMO_RANGE_SIZE", "64KiB");
    ok(put.output().unwrap());
    same(tree.path(), &dir.path().join("t"));
    server.signal(rustix::process::Signal::TERM);
    let (status, log) = server.wait();
    assert!(status.success());
    says(&log, &["--no-sync"]);

    let mut wrong = program();
    let line =
        failed(wrong.args(["get", "a", "b"]).env("RPC_DEMO_JOBS", "many").output().unwrap(), 2);
    says(&line, &["invalid value 'many'", "--jobs"]);
}
