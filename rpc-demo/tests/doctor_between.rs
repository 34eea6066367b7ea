//! The doctor with a server in another guest, at the other end of two cables in one network.
//! `tests/guest/suite "doctor between"` runs these tests.

#![allow(clippy::unwrap_used)]

#[path = "common/bare.rs"]
mod bare;
#[path = "common/fields.rs"]
mod fields;

use std::net::TcpStream;
use std::process::Command;
use std::time::{Duration, Instant};

use serde_json::Value;

fn variable(name: &str) -> String {
    std::env::var(name).unwrap_or_else(|_| panic!("{name} is not set: run this by the guest suite"))
}

#[test]
fn both_rails_to_a_peer_are_walked_and_one_is_measured() {
    let at = format!("{}:{}", variable("CABLE_SERVER"), variable("CABLE_PORT"));
    let started = Instant::now();
    while TcpStream::connect(&at).is_err() {
        assert!(started.elapsed() < Duration::from_secs(60), "the other guest does not come up");
        std::thread::sleep(Duration::from_millis(50));
    }
    let doctor = Command::new(env!("CARGO_BIN_EXE_rpc-demo"))
        .args(["doctor", "--json", "--peer", &format!("http://{at}")])
        .env_remove("TONIC_RDMA")
        .output()
        .unwrap();
    let text = String::from_utf8(doctor.stdout).unwrap();
    let found: Value = serde_json::from_str(&text).unwrap_or_else(|e| panic!("{e}: {text}"));
    assert!(doctor.status.success(), "{found}");
    fields::are_documented(&found);

    let peer = &found["peer"];
    assert_eq!(peer["path"], "verbs", "{peer}");
    let steps = peer["steps"].as_array().unwrap();
    assert!(steps.iter().all(|step| step["reason"].is_null()), "{peer}");
    for (place, source) in [("10.30.0.1:", "10.30.0.2"), ("10.30.0.3:", "10.30.0.4")] {
        let offered = peer["offered"].as_array().unwrap();
        assert!(
            offered.iter().any(|place_of| place_of["place"].as_str().unwrap().starts_with(place)),
            "{peer}"
        );
        let of = |what: &str| {
            let name = format!("verbs: {what} {place}");
            let step = steps.iter().find(|step| step["name"].as_str().unwrap().starts_with(&name));
            step.unwrap_or_else(|| panic!("no step {name}: {peer}")).clone()
        };
        of("connection to");
        let way = of("device and pool for");
        assert!(way["detail"].as_str().unwrap().ends_with(&format!(" from {source}")), "{way}");
    }
    for path in ["tcp", "fast"] {
        assert!(peer[path]["latency_median_us"].as_f64().unwrap() > 0.0, "{peer}");
        assert!(peer[path]["download_mib_s"].as_f64().unwrap() > 0.0, "{peer}");
    }
    bare::was_measured(peer);
    println!("{}: tcp {} fast {}", variable("CABLE_DEVICE"), peer["tcp"], peer["fast"]);
}
