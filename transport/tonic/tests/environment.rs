//! Tests the environment variables TONIC_RDMA, TONIC_RDMA_DEVICE, TONIC_RDMA_TOS and
//! TONIC_RDMA_POOL of a whole process. Each case runs in a child, which is this program with the
//! variables set. So the program has its own main function.

#![allow(clippy::unwrap_used, reason = "all of it is test code")]

use std::collections::BTreeSet;
use std::process::{Command, ExitCode};

use libtest_mimic::{Arguments, Trial};
use tonic::service::Routes;
use tonic_rdma::{Endpoint, Server};

/// Set in the child's environment.
const CHILD: &str = "TONIC_RDMA_TEST_CHILD";

/// The longest time that a server takes to notice that it cannot serve.
const HANG: std::time::Duration = std::time::Duration::from_secs(60);

fn main() -> ExitCode {
    if std::env::var_os(CHILD).is_some() {
        child();
        return ExitCode::SUCCESS;
    }
    let trial = |name, test: fn()| {
        Trial::test(name, move || {
            test();
            Ok(())
        })
    };
    let trials = vec![
        trial("off_is_off", off_is_off),
        #[cfg(target_os = "linux")]
        trial(
            "no_rdma_library_is_mapped_before_rdma_is_tried",
            no_rdma_library_is_mapped_before_rdma_is_tried,
        ),
        trial("a_fabric_can_be_named", a_fabric_can_be_named),
        trial(
            "a_pool_has_the_size_that_the_operator_sets",
            a_pool_has_the_size_that_the_operator_sets,
        ),
        trial("bad_values_are_errors_at_both_ends", bad_values_are_errors_at_both_ends),
        trial(
            "a_device_that_is_not_there_can_be_required_in_vain",
            a_device_that_is_not_there_can_be_required_in_vain,
        ),
    ];
    libtest_mimic::run(&Arguments::from_args(), trials).exit_code()
}

/// The output of [`child`] with these variables.
fn with(variables: &[(&str, &str)]) -> String {
    let output = Command::new(std::env::current_exe().unwrap())
        .env(CHILD, "1")
        .env_remove("TONIC_RDMA")
        .env_remove("TONIC_RDMA_DEVICE")
        .env_remove("TONIC_RDMA_TOS")
        .env_remove("TONIC_RDMA_POOL")
        .envs(variables.iter().copied())
        .output()
        .unwrap();
    let text = String::from_utf8(output.stdout).unwrap();
    assert!(output.status.success(), "{text}\n{}", String::from_utf8_lossy(&output.stderr));
    text
}

fn child() {
    let runtime = tokio::runtime::Builder::new_current_thread().enable_all().build().unwrap();
    runtime.block_on(async {
        if let Err(error) = tonic_rdma::check_environment() {
            println!("beforehand: {error}");
        }
        let listener = std::net::TcpListener::bind("127.0.0.1:0").unwrap();
        listener.set_nonblocking(true).unwrap();
        // A server that refuses to start must not close the client's TCP connection.
        let _kept = listener.try_clone().unwrap();
        let listener = tokio::net::TcpListener::from_std(listener).unwrap();
        let addr = listener.local_addr().unwrap();
        let incoming = tonic::transport::server::TcpIncoming::from(listener);
        let router = Server::builder().add_routes(Routes::default());
        let endpoint = Endpoint::from_shared(format!("http://{addr}")).unwrap();
        let lazy = endpoint.connect_lazy();
        tokio::task::yield_now().await;
        println!("mapped before: {}", mapped());
        drop(lazy);
        let serving = tokio::spawn(router.serve_with_incoming(incoming));
        let told = |error: tonic_rdma::Error| {
            let cause = tonic_rdma::Cause::of(&error).map(ToString::to_string);
            cause.unwrap_or_else(|| format!("no cause of ours: {error}"))
        };
        match endpoint.connect().await {
            Ok(channel) => {
                println!("client: {}", channel.path());
                println!("pool: {} bytes", channel.pool().config().total);
            }
            Err(error) => {
                println!("client: {}", told(error));
                // The server fails for the same reason, and may take longer to notice.
                match tokio::time::timeout(HANG, serving).await {
                    Ok(ended) => println!("server: {}", told(ended.unwrap().unwrap_err())),
                    Err(_) => println!("server: goes on"),
                }
            }
        }
        println!("mapped after: {}", mapped());
    });
}

/// The files of rdma-core and its dependencies that this process has mapped.
fn mapped() -> String {
    let maps = std::fs::read_to_string("/proc/self/maps").unwrap_or_default();
    let name = |path: &str| path.rsplit_once('/').map(|(_, name)| name.to_owned());
    let of_rdma = |name: &String| {
        ["libibverbs", "librdmacm", "libnl-"].iter().any(|start| name.starts_with(start))
    };
    let names: BTreeSet<String> = maps.lines().filter_map(name).filter(of_rdma).collect();
    names.into_iter().collect::<Vec<_>>().join(" ")
}

/// Fake libraries are found first, whether rdma-core is installed or not.
#[cfg(target_os = "linux")]
fn no_rdma_library_is_mapped_before_rdma_is_tried() {
    let directory = tempfile::TempDir::new().unwrap();
    let source = directory.path().join("library.c");
    std::fs::write(&source, "int nothing;\n").unwrap();
    for library in ["libibverbs.so.1", "librdmacm.so.1"] {
        let mut cc = Command::new("cc");
        cc.args(["-shared", "-fPIC", "-o"]).arg(directory.path().join(library)).arg(&source);
        assert!(cc.status().unwrap().success());
    }
    let path = ("LD_LIBRARY_PATH", directory.path().to_str().unwrap());

    let told = with(&[path, ("TONIC_RDMA", "off")]);
    assert!(told.contains("client: tcp (policy: TONIC_RDMA=off)"), "{told}");
    assert!(told.contains("mapped before: \n") && told.contains("mapped after: \n"), "{told}");

    let told = with(&[path, ("TONIC_RDMA", "shm")]);
    assert!(told.contains("mapped before: \n") && told.contains("mapped after: \n"), "{told}");

    let told = with(&[path, ("TONIC_RDMA", "verbs")]);
    assert!(told.contains("mapped before: \n"), "{told}");
    assert!(told.contains("mapped after: libibverbs.so.1 librdmacm.so.1\n"), "{told}");
    let reason = "client: tcp (no-rdma-core: libibverbs.so.1 has no function ibv_get_device_list: ";
    assert!(told.contains(reason), "{told}");
}

fn off_is_off() {
    let told = with(&[("TONIC_RDMA", "off")]);
    assert!(told.contains("client: tcp (policy: TONIC_RDMA=off)"), "{told}");
    assert!(!told.contains("server:") && !told.contains("beforehand:"), "{told}");
}

fn a_fabric_can_be_named() {
    let told = with(&[("TONIC_RDMA", "shm")]);
    assert!(told.contains("client: shm (process "), "{told}");
    let told = with(&[("TONIC_RDMA", "verbs"), ("TONIC_RDMA_DEVICE", "no_such_device")]);
    assert!(told.contains("client: tcp ("), "{told}");
}

fn bad_values_are_errors_at_both_ends() {
    let told = with(&[("TONIC_RDMA", "yes")]);
    for end in ["client", "server"] {
        let error = "bad environment: environment variable TONIC_RDMA=\"yes\": unknown policy or fabric; \
                     allowed: `auto`, `off`, `require` or `require-verbs`, and `shm`, \
                     `verbs` in order of preference, separated by commas";
        assert!(told.contains(&format!("{end}: {error}")), "{told}");
    }
    assert!(told.contains("beforehand: environment variable TONIC_RDMA=\"yes\": "), "{told}");
    let told = with(&[("TONIC_RDMA_DEVICE", "../x")]);
    for end in ["client", "server"] {
        let error =
            "bad environment: environment variable TONIC_RDMA_DEVICE=\"../x\": not a device name";
        assert!(told.contains(&format!("{end}: {error}")), "{told}");
    }
    let told = with(&[("TONIC_RDMA_TOS", "af41")]);
    for end in ["client", "server"] {
        let error = "bad environment: environment variable TONIC_RDMA_TOS=\"af41\": not a type of service; \
                     allowed: a number from 0 to 255";
        assert!(told.contains(&format!("{end}: {error}")), "{told}");
    }
    let told = with(&[("TONIC_RDMA_POOL", "shm=plenty")]);
    for end in ["client", "server"] {
        let error = "bad environment: environment variable TONIC_RDMA_POOL=\"shm=plenty\": not a size; \
                     allowed: a number of bytes with a unit, such as 512MiB";
        assert!(told.contains(&format!("{end}: {error}")), "{told}");
    }
}

fn a_pool_has_the_size_that_the_operator_sets() {
    let size = |pool| {
        let told = with(&[("TONIC_RDMA", "shm"), ("TONIC_RDMA_POOL", pool)]);
        let line = told.lines().find_map(|line| line.strip_prefix("pool: "));
        line.unwrap_or_else(|| panic!("{told}")).to_owned()
    };
    assert_eq!(size("8MiB"), "8388608 bytes");
    assert_eq!(size("verbs=4MiB,shm=16MiB"), "16777216 bytes");
    // The variable does not set this pool's size.
    assert_eq!(size("verbs=4MiB"), size(""));
    assert_ne!(size("verbs=4MiB"), "4194304 bytes");
}

fn a_device_that_is_not_there_can_be_required_in_vain() {
    let device = ("TONIC_RDMA_DEVICE", "no_such_device");
    for required in ["require,verbs", "require-verbs"] {
        let told = with(&[("TONIC_RDMA", required), device]);
        for end in ["client", "server"] {
            let failed = format!("{end}: a fast path is required: ");
            assert!(told.contains(&failed), "{told}");
        }
    }
    // Shared memory is a fast path at the server as well as at the client.
    let told = with(&[("TONIC_RDMA", "require"), device]);
    assert!(told.contains("client: shm (process "), "{told}");
    assert!(!told.contains("server: "), "{told}");
}
