//! Device counters of lost packets.

use std::collections::BTreeMap;

use crate::diagnose::cures::{advice, quoted, user};
use crate::diagnose::host::{SystemFiles, number};
use crate::diagnose::report::{Cure, Device, Hint};

/// The counters of lost, repeated or marked packets, of all ports.
#[derive(Debug, Default, PartialEq, Eq)]
pub(in crate::diagnose) struct Losses(BTreeMap<(String, String), u64>);

/// Names of the counters. The first list has the counters of InfiniBand's ports. Each further list
/// has the counters of one driver in the kernel's source, without the names of earlier lists.
const LOSSES: [&[&str]; 6] = [
    &["port_rcv_errors", "port_xmit_discards"],
    // mlx5
    &[
        "duplicate_request",
        "implied_nak_seq_err",
        "local_ack_timeout_err",
        "np_cnp_sent",
        "np_ecn_marked_roce_packets",
        "out_of_sequence",
        "packet_seq_err",
        "rnr_nak_retry_err",
        "roce_adp_retrans",
        "rp_cnp_handled",
        "rx_icrc_encapsulated",
    ],
    // rdma_rxe
    &["completer_retry_err", "out_of_seq_request", "rcvd_seq_err", "retry_exceeded_err"],
    // bnxt_re
    &[
        "dup_req",
        "max_retry_exceeded",
        "missing_resp",
        "oos_drop_count",
        "rx_cnp_pkts",
        "rx_ecn_marked_pkts",
        "seq_err_naks_rcvd",
        "to_retransmits",
    ],
    // irdma: the names for adapters of the third generation, those for earlier adapters, and those
    // before Linux 6.18.
    &[
        "CRC errors",
        "InProtoErrors",
        "Nak Sequence Error",
        "Nak Sequence Error Implied",
        "RTO",
        "Rcvd Out of order packets",
        "RetransSegs",
        "RxECNMrkd",
        "cnpHandled",
        "cnpSent",
        "ip4InDiscards",
        "ip6InDiscards",
        "tcpInProtoErrors",
        "tcpRetransSegs",
    ],
    // iw_cxgb4
    &["ip4RetransSegs", "ip6RetransSegs"],
];

impl Losses {
    pub(in crate::diagnose) fn read(files: &SystemFiles, devices: &[Device]) -> Losses {
        let mut counters = BTreeMap::new();
        for device in devices {
            let class = format!("/sys/class/infiniband/{}", device.name);
            let ports = device.ports.iter().flat_map(|port| {
                ["hw_counters", "counters"].map(|kind| format!("ports/{}/{kind}", port.number))
            });
            // iw_cxgb4 counts per device.
            for place in ports.chain(["hw_counters".to_owned()]) {
                for name in LOSSES.into_iter().flatten() {
                    let count = files.read(&format!("{class}/{place}/{name}"));
                    if let Some(count) = count.as_deref().and_then(number) {
                        *counters.entry((device.name.clone(), (*name).to_owned())).or_default() +=
                            count;
                    }
                }
            }
        }
        Losses(counters)
    }

    /// A hint for each device with a counter that is greater in `now` than in `self`.
    pub(in crate::diagnose) fn grown(&self, now: &Losses, devices: &[Device]) -> Vec<Hint> {
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
            cures: cures(devices.iter().find(|known| known.name == device)),
        };
        grown.into_iter().map(hint).collect()
    }
}

/// The cures for lost packets of this device. The command `dcb` shows the interface's traffic
/// classes, because the kernel has no files for them.
fn cures(device: Option<&Device>) -> Vec<Cure> {
    let mut cures = vec![advice(
        "check that the switch ports treat RoCE as lossless (PFC), or that ECN keeps queues \
         short; also check the cable",
    )];
    if let Some(interface) =
        device.filter(|device| device.transport == "RoCE").and_then(|at| at.interfaces.first())
    {
        let dev = quoted(interface);
        cures.push(user(
            "show which priorities are lossless at this end, and which one each DSCP has",
            format!("dcb pfc show dev {dev}; dcb app show dev {dev}"),
        ));
    }
    cures
}

#[cfg(test)]
#[cfg(unix)]
mod tests {
    use super::*;
    use crate::diagnose::hints::test_util::System;

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
        let devices = system.devices(4096);
        let read = || Losses::read(&system.files(), &devices);
        let before = read();
        assert_eq!(before.grown(&read(), &devices), []);
        counter("hw_counters/rp_cnp_handled", 19);
        counter("counters/port_xmit_discards", 1);
        let hints = before.grown(&read(), &devices);
        assert_eq!((hints.len(), hints[0].name), (1, "losses"));
        assert!(
            hints[0].what.ends_with("port_xmit_discards by 1, rp_cnp_handled by 12"),
            "{hints:?}"
        );
        let command = hints[0].cures[1].command.as_deref();
        assert_eq!(command, Some("dcb pfc show dev eth0; dcb app show dev eth0"));
    }

    /// Covers the names that each driver gives to repeated packets, and a name that proves nothing.
    #[test]
    fn counters_of_other_drivers() {
        let system = System::new();
        for (pci, name) in ["irdma", "irdma3", "bnxt_re", "cxgb4", "quiet"].iter().enumerate() {
            system.adapter(name, &format!("0000:0{pci}:00.0"), name, &format!("on{pci}"));
        }
        let all = [
            ("irdma/ports/1/hw_counters/tcpRetransSegs", "tcpRetransSegs by 5"),
            ("irdma3/ports/1/hw_counters/Rcvd Out of order packets", "order packets by 5"),
            ("bnxt_re/ports/1/hw_counters/to_retransmits", "to_retransmits by 5"),
            ("cxgb4/hw_counters/ip4RetransSegs", "ip4RetransSegs by 5"),
            ("quiet/ports/1/hw_counters/iwInRdmaWrites", ""),
        ];
        let count = |count: &str| {
            for (file, _) in all {
                system.file(&format!("sys/class/infiniband/{file}"), count);
            }
            Losses::read(&system.files(), &system.devices(4096))
        };
        let hints = count("3\n").grown(&count("8\n"), &[]);
        assert_eq!(hints.len(), all.len() - 1, "{hints:?}");
        for hint in hints {
            let name = hint.device.as_deref().unwrap();
            let (_, told) =
                all.iter().find(|(file, _)| file.split('/').next() == Some(name)).unwrap();
            assert!(hint.what.ends_with(told), "{hint:?}");
        }
    }
}
