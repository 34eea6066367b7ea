//! The doctor in the guest, as root. Each test breaks something, runs the doctor, executes the
//! proposed commands verbatim, and expects the next run to report RDMA.
//!
//! ```text
//! tests/guest/run --device none --memlock 64 --mem 4G --env TONIC_RDMA_DEBS=DIR -- \
//!     target/.../doctor_guest-HASH --test-threads=1
//! ```
//!
//! DIR contains the Debian packages of rdma-core, which a mirror would otherwise provide. The
//! guest's memlock limit is low, because PAM gives the limit of process 1 to a login without a
//! limit of its own.

#![allow(clippy::unwrap_used)]

#[path = "common/bare.rs"]
mod bare;
#[path = "common/fields.rs"]
mod fields;

use std::fs;
use std::io::{BufRead, BufReader, Write};
use std::os::unix::fs::PermissionsExt;
use std::process::{Child, ChildStdin, ChildStdout, Command, Stdio};

use serde_json::Value;

/// The program, in a place that an ordinary user can access.
const PROGRAM: &str = "/tmp/rpc-demo";
const USER: &str = "1000";
/// The user's memlock limit in bytes, in the tests of this limit and in all other tests.
const TOO_LITTLE: u64 = 64 << 10;
const USUAL: u64 = 8 << 20;

/// Runs a command of the test itself, which must succeed.
fn run(command: &str) -> String {
    let output = Command::new("bash").args(["-euc", command]).output().unwrap();
    let (out, err) =
        (String::from_utf8_lossy(&output.stdout), String::from_utf8_lossy(&output.stderr));
    assert!(output.status.success(), "{command}: {}\n{out}{err}", output.status);
    out.into_owned()
}

/// Prepares a test: no RDMA device, two interfaces that could have one, and device files as
/// rdma-core configures them.
fn guest() {
    assert!(
        std::env::var_os("TONIC_RDMA_GUEST").is_some(),
        "this test is for the guest: tests/guest/run"
    );
    if !fs::exists(PROGRAM).unwrap() {
        fs::copy(env!("CARGO_BIN_EXE_rpc-demo"), PROGRAM).unwrap();
        fs::set_permissions(PROGRAM, PermissionsExt::from_mode(0o755)).unwrap();
    }
    run("for device in $(ls /sys/class/infiniband 2>/dev/null); do rdma link del $device; done
         for interface in d0 d1; do ip link del $interface 2>/dev/null || true; done
         ip link add d0 type dummy && ip addr add 10.9.0.1/24 dev d0 && ip link set d0 mtu 9000 up
         chmod 0666 /dev/infiniband/rdma_cm");
}

fn add(kind: &str) {
    run(&format!("rdma link add {kind}0 type {kind} netdev d0"));
}

/// An interactive shell with the doctor's environment.
struct Shell {
    child: Child,
    stdin: ChildStdin,
    stdout: BufReader<ChildStdout>,
}

impl Shell {
    fn root() -> Shell {
        Shell::start("exec bash", USUAL)
    }

    fn user(memlock: u64) -> Shell {
        let drop = format!(
            "--reuid={USER} --regid={USER} --clear-groups --inh-caps=-all --bounding-set=-all"
        );
        Shell::start(&format!("exec setpriv {drop} bash"), memlock)
    }

    fn start(command: &str, memlock: u64) -> Shell {
        let command = format!("ulimit -l {}; {command}", memlock / 1024);
        let mut child = Command::new("bash")
            .args(["-euc", &command])
            .env_remove("TONIC_RDMA")
            .env_remove("TONIC_RDMA_DEVICE")
            .stdin(Stdio::piped())
            .stdout(Stdio::piped())
            .spawn()
            .unwrap();
        let (stdin, stdout) =
            (child.stdin.take().unwrap(), BufReader::new(child.stdout.take().unwrap()));
        Shell { child, stdin, stdout }
    }

    /// Runs a command, and waits for its end.
    fn types(&mut self, command: &str) {
        writeln!(self.stdin, "{command}\necho done 0").unwrap();
        self.finish();
    }

    /// The output until a command has ended, and its exit code.
    fn finish(&mut self) -> (i32, String) {
        let mut text = String::new();
        loop {
            let mut line = String::new();
            assert!(self.stdout.read_line(&mut line).unwrap() > 0, "the shell ended: {text}");
            if let Some(code) = line.strip_prefix("done ") {
                return (code.trim().parse().unwrap(), text);
            }
            text.push_str(&line);
        }
    }

    /// Runs the doctor, and checks that exit code and output agree.
    fn doctor(&mut self, args: &str) -> Value {
        let command = format!("{PROGRAM} doctor --json {args}; code=$?; (exit $code)");
        writeln!(self.stdin, "{command}; echo \"done $?\"").unwrap();
        let (code, text) = self.finish();
        let found: Value =
            serde_json::from_str(text.trim()).unwrap_or_else(|e| panic!("{e}: {code} {text}"));
        assert_eq!(code, if found["rdma"] == true { 0 } else { 1 }, "{found}");
        assert_eq!(found["reason"].is_null(), found["rdma"] == true, "{found}");
        fields::are_documented(&found);
        found
    }

    /// Checks that the verdict is RDMA, and that every step on every device succeeded.
    #[track_caller]
    fn is_well(&mut self) -> Value {
        let found = self.doctor("");
        assert_eq!(found["rdma"], true, "{found}");
        for device in found["devices"].as_array().unwrap() {
            assert_eq!(device["usable"], true, "{device}");
            let steps = device["steps"].as_array().unwrap();
            assert!(steps.iter().all(|step| step["reason"].is_null()), "{device}");
            let names: Vec<&str> =
                steps.iter().map(|step| step["name"].as_str().unwrap()).collect();
            for wanted in [
                "protection domain",
                "memory registration",
                "completion queue",
                "queue pair",
                "connection to",
                "SEND",
                "RDMA WRITE",
            ] {
                assert!(
                    names.iter().any(|name| name.starts_with(wanted)),
                    "no {wanted}: {names:?}"
                );
            }
        }
        found
    }

    /// Checks that the verdict is TCP for this reason. Returns the cures of the first finding,
    /// which must have that reason.
    #[track_caller]
    fn is_ill(&mut self, code: &str) -> Vec<Cure> {
        let found = self.doctor("");
        assert_eq!(found["reason"]["code"], code, "{found}");
        let first = &found["findings"][0];
        assert_eq!(
            (&first["code"], &first["blocks"]),
            (&Value::from(code), &Value::from(true)),
            "{found}"
        );
        let cures = first["cures"].as_array().unwrap().iter();
        let cures: Vec<Cure> = cures
            .filter_map(|cure| {
                Some(Cure {
                    command: cure["command"].as_str()?.to_owned(),
                    root: cure["root"] == true,
                })
            })
            .collect();
        assert!(!cures.is_empty(), "{found}");
        cures
    }
}

impl Drop for Shell {
    fn drop(&mut self) {
        let _ = self.child.kill();
        let _ = self.child.wait();
    }
}

#[derive(Debug, Clone)]
struct Cure {
    command: String,
    root: bool,
}

impl Cure {
    /// Runs the command as root. The cure must say that it needs root.
    #[track_caller]
    fn follow(&self) {
        assert!(self.root, "{self:?}");
        run(&self.command);
    }
}

#[test]
fn rxe_up() {
    guest();
    add("rxe");
    for mut shell in [Shell::root(), Shell::user(USUAL)] {
        let found = shell.is_well();
        let device = &found["devices"][0];
        assert_eq!((&device["name"], &device["transport"]), (&"rxe0".into(), &"RoCE".into()));
        assert_eq!(device["addresses"], serde_json::json!(["10.9.0.1"]));
        assert_eq!(device["interfaces"], serde_json::json!(["d0"]));
        let port = &device["ports"][0];
        assert_eq!((&port["state"], &port["link_layer"]), (&"ACTIVE".into(), &"Ethernet".into()));
        assert_eq!(port["mtu"], 4096, "{port}");
        let gids = port["gids"].as_array().unwrap();
        let mapped = gids.iter().find(|gid| gid["gid"] == "::ffff:10.9.0.1").unwrap();
        assert_eq!((&mapped["kind"], &mapped["interface"]), (&"RoCE v2".into(), &"d0".into()));
        assert!(found["library"]["version"].as_str().is_some_and(|version| version.contains('.')));
        let states = found["modules"].as_array().unwrap().iter().map(|module| &module["state"]);
        assert!(states.into_iter().all(|state| state != "missing"), "{found}");
        assert!(
            found["files"].as_array().unwrap().iter().all(|file| file["usable"] == true),
            "{found}"
        );
    }
}

#[test]
fn siw_up() {
    guest();
    add("siw");
    for mut shell in [Shell::root(), Shell::user(USUAL)] {
        let found = shell.is_well();
        let device = &found["devices"][0];
        assert_eq!((&device["name"], &device["transport"]), (&"siw0".into(), &"iWARP".into()));
        assert_eq!(device["addresses"], serde_json::json!(["10.9.0.1"]));
        assert_eq!(device["interfaces"], serde_json::json!(["d0"]));
    }
}

#[test]
fn rxe_down_and_siw_down() {
    for kind in ["rxe", "siw"] {
        guest();
        add(kind);
        run("ip link set d0 down");
        let mut shell = Shell::user(USUAL);
        let cures = shell.is_ill("no-active-port");
        assert_eq!(cures[0].command, "ip link set d0 up");
        cures[0].follow();
        shell.is_well();
    }
}

#[test]
fn no_device() {
    // Follows each of the proposed alternatives in turn.
    for way in 0..2 {
        guest();
        let mut shell = Shell::user(USUAL);
        let cures = shell.is_ill("no-device");
        assert_eq!(cures.len(), 2, "{cures:?}");
        cures[way].follow();
        shell.is_well();
    }
}

#[test]
fn no_address() {
    guest();
    add("rxe");
    run("ip addr flush dev d0 scope global");
    let mut shell = Shell::user(USUAL);
    let cure = shell.is_ill("not-on-rdma-device").remove(0);
    let command = cure.command.replace("ADDRESS/LENGTH", "10.9.0.1/24");
    assert_ne!(command, cure.command);
    Cure { command, ..cure }.follow();
    shell.is_well();
}

#[test]
fn memlock_of_64_kib_raised_for_the_shell() {
    for kind in ["rxe", "siw"] {
        guest();
        add(kind);
        let mut shell = Shell::user(TOO_LITTLE);
        let found = shell.doctor("");
        assert_eq!(
            (&found["memlock"]["soft"], &found["memlock"]["hard"]),
            (&TOO_LITTLE.into(), &TOO_LITTLE.into())
        );
        assert!(
            found["memlock"]["pool_gets"].is_null()
                && found["memlock"]["needed"].as_u64() > Some(2 << 20)
        );
        let cures = shell.is_ill("memlock");
        let now = &cures[0];
        assert!(now.command.starts_with("prlimit --pid "), "{cures:?}");
        now.follow();
        let found = shell.is_well();
        assert_eq!(found["memlock"]["pool_gets"], found["memlock"]["pool_configured"], "{found}");
    }
}

#[test]
fn memlock_of_64_kib_raised_for_the_next_login() {
    guest();
    add("rxe");
    run("mount -t tmpfs none /etc/security/limits.d");
    // A login as an ordinary user through PAM, from a shell with the low limit.
    let login = || Shell::start("exec su -s /bin/bash nobody -c 'exec bash'", TOO_LITTLE);
    let cures = login().is_ill("memlock");
    let lasting =
        cures.iter().find(|cure| cure.command.contains("/etc/security/limits.d/")).unwrap();
    lasting.follow();
    login().is_well();
    run("umount /etc/security/limits.d");
}

#[test]
fn device_files_that_are_closed_to_the_user() {
    for file in ["uverbs0", "rdma_cm"] {
        guest();
        add("rxe");
        run(&format!("chmod 0600 /dev/infiniband/{file}"));
        let mut shell = Shell::user(USUAL);
        let found = shell.doctor("");
        let code = found["reason"]["code"].as_str().unwrap_or_else(|| panic!("{found}")).to_owned();
        let cures = shell.is_ill(&code);
        assert!(cures[0].command.starts_with("chmod 0666 "), "{cures:?}");
        cures[0].follow();
        shell.is_well();
    }
}

#[test]
fn the_environment_keeps_rdma_off() {
    guest();
    add("rxe");
    for (set, code) in [
        ("export TONIC_RDMA=off", "policy"),
        ("export TONIC_RDMA=shm", "policy"),
        ("export TONIC_RDMA_DEVICE=nope0", "no-device"),
    ] {
        let mut shell = Shell::user(USUAL);
        shell.types(set);
        for cure in shell.is_ill(code) {
            assert!(!cure.root);
            shell.types(&cure.command);
            shell.is_well();
            shell.types(set);
        }
    }
}

#[test]
fn a_peer_is_reached_and_measured_over_rdma_and_tcp() {
    for kind in ["rxe", "siw"] {
        guest();
        add(kind);
        fs::create_dir_all("/tmp/root").unwrap();
        let serve = "serve --addr 10.9.0.1:0 --root /tmp/root --until-eof";
        let mut server = Command::new("bash")
            .args(["-euc", &format!("ulimit -l {}; exec {PROGRAM} {serve}", USUAL / 1024)])
            .env("TONIC_RDMA", "verbs")
            .stdin(Stdio::piped())
            .stdout(Stdio::piped())
            .spawn();
        let server = server.as_mut().unwrap();
        let mut line = String::new();
        BufReader::new(server.stdout.take().unwrap()).read_line(&mut line).unwrap();
        let addr = line.strip_prefix("rpc-demo: listening on ").unwrap().split(',').next().unwrap();
        let mut shell = Shell::user(USUAL);
        shell.types("export TONIC_RDMA=verbs");
        let found = shell.doctor(&format!("--peer http://{addr}"));
        let peer = &found["peer"];
        assert_eq!(peer["path"], "verbs", "{peer}");
        assert_eq!(peer["offered"][0]["path"], "verbs");
        let steps = peer["steps"].as_array().unwrap();
        assert!(steps.len() >= 4 && steps.iter().all(|step| step["reason"].is_null()), "{peer}");
        for path in ["tcp", "fast"] {
            assert!(peer[path]["latency_median_us"].as_f64().unwrap() > 0.0, "{peer}");
            assert!(peer[path]["download_mib_s"].as_f64().unwrap() > 0.0, "{peer}");
        }
        println!("{kind}: tcp {} fast {}", peer["tcp"], peer["fast"]);
        bare::was_measured(peer);
        drop(server.stdin.take());
        server.wait().unwrap();
    }
}

/// Creates a root directory under /tmp/bare from this system, in which packages can be removed and
/// installed.
const BARE: &str = r#"
root=/tmp/bare libraries=/usr/lib/x86_64-linux-gnu
mkdir $root && mount -t tmpfs none $root && mkdir $root/{usr,etc,var,proc,sys,dev,tmp,run,original,root,home,opt,srv}
for entry in /bin /sbin /lib /lib64; do cp -a $entry $root; done
mount --bind /usr $root/usr && mount --bind $libraries $root/original
# What the packages' files go to; the libraries that stay are links to where they are.
for directory in $libraries /usr/share/doc /usr/share/lintian /usr/share/man; do
    [ ! -d $directory ] || mount -t tmpfs none $root$directory
done
for file in $libraries/*; do ln -s /original/${file##*/} $root$libraries/; done
for directory in $libraries/libibverbs $libraries/rsocket; do
    rm $root$directory && cp -a $directory $root$directory
done
cp -a /etc/. $root/etc
mkdir -p $root/var/lib/apt $root/var/cache/apt/archives/partial $root/var/log/apt $root/var/tmp
cp -a /var/lib/dpkg $root/var/lib && cp -a /var/lib/apt/. $root/var/lib/apt
for directory in proc sys dev; do mount --rbind /$directory $root/$directory; done
cp "$TONIC_RDMA_DEBS"/*.deb $root/var/cache/apt/archives
cp /tmp/rpc-demo $root/rpc-demo
chroot $root dpkg --remove --force-depends libibverbs1 librdmacm1 ibverbs-providers
"#;

#[test]
fn no_library() {
    guest();
    add("rxe");
    run(BARE);
    let doctor = || {
        let command =
            "ulimit -l 8192; exec env -u TONIC_RDMA chroot /tmp/bare /rpc-demo doctor --json";
        let output = Command::new("bash").args(["-euc", command]).output().unwrap();
        let text = String::from_utf8(output.stdout).unwrap();
        let found: Value = serde_json::from_str(&text).unwrap_or_else(|e| panic!("{e}: {text}"));
        assert_eq!(
            output.status.code(),
            Some(if found["rdma"] == true { 0 } else { 1 }),
            "{found}"
        );
        found
    };
    let found = doctor();
    assert_eq!(found["reason"]["code"], "no-rdma-core", "{found}");
    assert_eq!(found["library"]["found"], false);
    // The device is found even without the library.
    assert_eq!(found["devices"][0]["name"], "rxe0");
    let cure = &found["findings"][0]["cures"][0];
    assert_eq!(cure["root"], true);
    let command = cure["command"].as_str().unwrap();
    let output =
        Command::new("chroot").args(["/tmp/bare", "bash", "-euc", command]).output().unwrap();
    let said = String::from_utf8_lossy(&output.stdout).into_owned()
        + &String::from_utf8_lossy(&output.stderr);
    assert!(output.status.success(), "{command}: {said}");
    let found = doctor();
    assert_eq!(found["rdma"], true, "{found}\n{said}");
    assert_eq!(found["library"]["found"], true);
}
