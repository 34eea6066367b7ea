//! The doctor's report on SENDs and WRITEs without calls, over a device.

use serde_json::Value;

/// Checks that SENDs and WRITEs were measured in addition to calls, in each direction, and prints
/// them.
pub(crate) fn was_measured(peer: &Value) {
    assert_eq!(peer["not_bare"], Value::Null, "{peer}");
    let bare = &peer["bare"];
    assert!(bare["latency_median_us"].as_f64().unwrap() > 0.0, "{bare}");
    assert_eq!(bare["device"].as_str().map(str::is_empty), Some(false), "{bare}");
    println!("{bare}");
    let rates = peer["rates"].as_array().unwrap();
    for direction in ["both", "up", "down"] {
        let of = |rates: &&Value| rates["direction"] == direction && rates["bare_per_s"].is_f64();
        let measured = rates.iter().find(of).unwrap_or_else(|| panic!("no {direction}: {peer}"));
        for way in ["bare_per_s", "fast_per_s", "tcp_per_s"] {
            assert!(measured[way].as_f64().unwrap() > 0.0, "{measured}");
        }
    }
    for rates in rates {
        println!("{rates}");
    }
}
