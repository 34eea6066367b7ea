//! Counters of devices that tell of packets that were lost.

use std::collections::BTreeMap;

use crate::diagnose::cures::advice;
use crate::diagnose::host::system_files::{SystemFiles, number};
use crate::diagnose::report::{Device, Hint};

/// Counters of packets that were lost, repeated or marked, of all ports.
#[derive(Debug, Default, PartialEq, Eq)]
pub(in crate::diagnose) struct Losses(BTreeMap<(String, String), u64>);

/// Names of such counters, of the drivers of the kernel: mlx5, bnxt_re, irdma, rdma_rxe.
const LOSSES: [&str; 14] = [
    "duplicate_request",
    "local_ack_timeout_err",
    "np_cnp_sent",
    "out_of_seq_request",
    "out_of_sequence",
    "packet_seq_err",
    "port_rcv_errors",
    "port_xmit_discards",
    "rcvd_seq_err",
    "retry_exceeded_err",
    "rnr_nak_retry_err",
    "roce_adp_retrans",
    "rp_cnp_handled",
    "rx_icrc_encapsulated",
];

impl Losses {
    pub(in crate::diagnose) fn read(files: &SystemFiles, devices: &[Device]) -> Losses {
        let mut counters = BTreeMap::new();
        for device in devices {
            for port in &device.ports {
                let dir = format!("/sys/class/infiniband/{}/ports/{}", device.name, port.number);
                for (kind, name) in ["hw_counters", "counters"]
                    .iter()
                    .flat_map(|kind| LOSSES.iter().map(move |name| (kind, name)))
                {
                    let count = files.read(&format!("{dir}/{kind}/{name}"));
                    if let Some(count) = count.as_deref().and_then(number) {
                        *counters.entry((device.name.clone(), (*name).to_owned())).or_default() +=
                            count;
                    }
                }
            }
        }
        Losses(counters)
    }

    /// A hint for each device of which some have grown since.
    pub(in crate::diagnose) fn grown(&self, now: &Losses) -> Vec<Hint> {
        let mut grown: BTreeMap<&str, Vec<String>> = BTreeMap::new();
        for ((device, name), count) in &now.0 {
            let before = self.0.get(&(device.clone(), name.clone())).copied().unwrap_or(0);
            if *count > before {
                grown.entry(device).or_default().push(format!("{name} by {}", count - before));
            }
        }
        let hint = |(device, counters): (&str, Vec<String>)| Hint {
            name: "losses",
            device: Some(device.to_owned()),
            what: format!(
                "while the peer was measured, packets were lost, repeated or marked: {}",
                counters.join(", ")
            ),
            cures: vec![advice(
                "see that the ports of the switches treat RoCE as lossless (PFC), or that ECN \
                 keeps queues short; and look at the cable",
            )],
        };
        grown.into_iter().map(hint).collect()
    }
}

#[cfg(test)]
#[cfg(unix)]
mod tests {
    use super::*;
    use crate::diagnose::hints::made_up::System;

    #[test]
    fn counters_that_grow() {
        let system = System::new();
        let counter = |name: &str, count: u64| {
            system.file(
                &format!("sys/class/infiniband/mlx5_0/ports/1/{name}"),
                &format!("{count}\n"),
            );
        };
        counter("hw_counters/out_of_sequence", 7);
        counter("hw_counters/rp_cnp_handled", 7);
        counter("counters/port_xmit_discards", 0);
        let read = || Losses::read(&system.files(), &system.devices(4096));
        let before = read();
        assert_eq!(before.grown(&read()), []);
        counter("hw_counters/rp_cnp_handled", 19);
        counter("counters/port_xmit_discards", 1);
        let hints = before.grown(&read());
        assert_eq!((hints.len(), hints[0].name), (1, "losses"));
        assert!(
            hints[0].what.ends_with("port_xmit_discards by 1, rp_cnp_handled by 12"),
            "{hints:?}"
        );
    }
}
