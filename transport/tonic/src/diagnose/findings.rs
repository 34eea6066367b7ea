//! Derives findings and cures from facts. This module inspects nothing itself, and gets all facts
//! as arguments.

use crate::diagnose::cures::{self, advice, quoted, root, user};
use crate::diagnose::host::check::Facts;
use crate::diagnose::host::kernel::{DRIVERS, Loadable};
use crate::diagnose::host::sysfs::Interface;
use crate::diagnose::report::{
    Cure, Device, Diagnosis, Finding, Module, ModuleState, Port, RunsIn,
};
use crate::path::reason::{Reason, ReasonCode, Side};
use crate::server::{DESCRIPTORS, MAX_CONNECTIONS};

/// Network drivers of RDMA-capable adapters, each with the module that provides its RDMA device.
const MODULE_OF: [(&str, &str); 10] = [
    ("mlx5_core", "mlx5_ib"),
    ("mlx4_core", "mlx4_ib"),
    ("mlx4_en", "mlx4_ib"),
    ("ice", "irdma"),
    ("i40e", "irdma"),
    ("bnxt_en", "bnxt_re"),
    ("cxgb4", "iw_cxgb4"),
    ("qede", "qedr"),
    ("hns3", "hns_roce_hw_v2"),
    ("ionic", "ionic_rdma"),
];

/// Software devices: module, name in `rdma link add`, device name and description.
const SOFT: [(&str, &str, &str, &str); 2] = [
    ("rdma_rxe", "rxe", "rxe0", "without an adapter: Soft-RoCE"),
    ("siw", "siw", "siw0", "or Soft-iWARP"),
];

/// Returns all findings. `diagnosis.reason` says why RDMA would not be used, and a device's reason
/// says why the device cannot be used.
pub(super) fn findings(diagnosis: &Diagnosis, facts: &Facts) -> Vec<Finding> {
    let this = Explain { d: diagnosis, facts };
    let mut found: Vec<Finding> = Vec::new();
    let blocked =
        diagnosis.reason.as_ref().filter(|reason| reason.side() == Side::Local).map(Reason::code);
    let allowed = |name: &str| diagnosis.settings.device.as_deref().is_none_or(|only| only == name);
    for device in &diagnosis.devices {
        let Some(reason) = &device.reason else { continue };
        // A device's problem keeps calls on TCP if the transport names the problem as the reason.
        let blocks = blocked == Some(reason.code()) && allowed(&device.name);
        found.push(this.device(device, reason, blocks));
    }
    if let Some(reason) = &diagnosis.reason
        && !found.iter().any(|finding| finding.blocks)
    {
        found.push(this.host(reason));
    }
    if let Some(memlock) = diagnosis.memlock.as_ref().filter(|_| diagnosis.rdma)
        && let Some(gets) = memlock.pool_gets.filter(|gets| *gets < memlock.pool_configured)
    {
        found.push(Finding {
            code: ReasonCode::Memlock,
            blocks: false,
            device: None,
            what: format!(
                "the pool gets {gets} of {} bytes: a limit of {} bytes gives it all, and more calls run without a copy",
                memlock.pool_configured, memlock.wanted
            ),
            cures: this.memlock(),
        });
    }
    if let Some(limit) = &diagnosis.descriptors
        && let Some(soft) = limit.soft.filter(|soft| *soft < limit.wanted)
    {
        found.push(Finding {
            code: ReasonCode::LimitReached,
            blocks: false,
            device: None,
            what: format!(
                "a process may have {soft} descriptors, and this one uses {}: at three for each \
                 connection, a server has room for {} of the {MAX_CONNECTIONS} connections that \
                 it allows by default",
                limit.in_use,
                soft.saturating_sub(limit.in_use) / DESCRIPTORS as u64
            ),
            cures: cures::descriptors(&diagnosis.host, limit, facts.parent),
        });
    }
    // Report the memlock limit only once, because it applies to the process, not to one device.
    let mut memlock = false;
    found.retain(|finding| {
        finding.code != ReasonCode::Memlock || !std::mem::replace(&mut memlock, true)
    });
    found.sort_by_key(|finding| !finding.blocks);
    found
}

/// The finding if both ends run on this host, and one end refuses the other end's user.
fn other_user(reason: &Reason) -> (String, Vec<Cure>) {
    let end = match reason.side() {
        Side::Peer => "at the server",
        Side::Local => "in this program",
    };
    let what = format!("the server runs on this host as another user: {}", reason.detail());
    let cures = vec![
        advice("run this program and the server as the same user"),
        advice(format!(
            "or allow the other user {end}: ContextBuilder::shm_access(ShmAccess::Users(vec![UID]))"
        )),
    ];
    (what, cures)
}

struct Explain<'a> {
    d: &'a Diagnosis,
    facts: &'a Facts,
}

impl Explain<'_> {
    /// The finding for the reason that keeps this host from RDMA.
    fn host(&self, reason: &Reason) -> Finding {
        if reason.code() == ReasonCode::OtherUser {
            let (what, cures) = other_user(reason);
            return Finding { code: reason.code(), blocks: true, device: None, what, cures };
        }
        if reason.side() == Side::Peer {
            let cures = match reason.code() {
                // The server reports this reason, and the cause is on neither host.
                ReasonCode::ThroughGateway => vec![
                    advice(
                        "connect to the server's own address, past gateways and address translation",
                    ),
                    advice(
                        "or, on the server: Server::offer_through_gateways, if no handler relies \
                         on its callers' address or certificate",
                    ),
                ],
                _ => vec![
                    advice(format!("on the server: {}", reason.cure())),
                    advice("diagnose the server's host too"),
                ],
            };
            let what = format!("the server says: {}", reason.detail());
            return Finding { code: reason.code(), blocks: true, device: None, what, cures };
        }
        let (what, cures) = match reason.code() {
            ReasonCode::Policy => self.policy(reason),
            ReasonCode::NoRdmaCore => self.no_rdma_core(reason),
            ReasonCode::NoDevice => self.no_device(reason),
            ReasonCode::Memlock => (reason.detail().to_owned(), self.memlock()),
            ReasonCode::HandshakeTimeout | ReasonCode::NoRoute => {
                (reason.detail().to_owned(), self.unheard(reason))
            }
            // The path was up, and failed during the measurement.
            ReasonCode::LinkLost => {
                let cures = vec![
                    advice(
                        "if short calls pass, compare the MTU of both ends and of the switches \
                         between",
                    ),
                    advice("look at the cable, and at the counters of the hint losses"),
                ];
                (reason.detail().to_owned(), cures)
            }
            _ => (reason.detail().to_owned(), vec![advice(reason.cure())]),
        };
        Finding { code: reason.code(), blocks: true, device: None, what, cures }
    }

    /// The cures if no answer arrives over RDMA, although the server answers over TCP.
    fn unheard(&self, reason: &Reason) -> Vec<Cure> {
        let has = |transport| self.d.devices.iter().any(|device| device.transport == transport);
        let mut cures = vec![advice(reason.cure())];
        if has("RoCE") {
            cures.push(advice(
                "let UDP port 4791 pass between the two hosts, in both directions: RoCE v2 uses it",
            ));
            cures.push(root(
                "check whether this host drops them: Soft-RoCE's packets pass its firewall",
                "nft list ruleset | grep -wE 'drop|reject|4791'",
            ));
            cures.push(advice(
                "look for the hint roce-v1 at both ends: with different versions, neither \
                 receives the other's packets",
            ));
        }
        if has("iWARP") {
            cures.push(advice(
                "let the TCP port that the server offers for RDMA pass: it differs from the \
                 service's port",
            ));
        }
        cures
    }

    /// The finding for the reason that makes a device unusable.
    fn device(&self, device: &Device, reason: &Reason, blocks: bool) -> Finding {
        let (what, cures) = match (self.file_of(device), reason.code()) {
            (Some(file), _) => file,
            (None, ReasonCode::Memlock) => (reason.detail().to_owned(), self.memlock()),
            (None, ReasonCode::NoActivePort) => self.no_active_port(device, reason),
            (None, ReasonCode::NotOnRdmaDevice) => {
                let on: Vec<&Interface> = self.interfaces(device).collect();
                cures::no_address(device, reason, &on)
            }
            (None, ReasonCode::QueuePairRefused) if cures::is_unconnected(device) => {
                (reason.detail().to_owned(), cures::other_adapter())
            }
            (None, ReasonCode::NoDevice) => self.not_listed(device),
            (None, ReasonCode::NoRdmaCore) => self.no_rdma_core(reason),
            _ => (reason.detail().to_owned(), vec![advice(reason.cure())]),
        };
        let device = (reason.code() != ReasonCode::Memlock).then(|| device.name.clone());
        Finding { code: reason.code(), blocks, device, what, cures }
    }

    fn memlock(&self) -> Vec<Cure> {
        cures::memlock(&self.d.host, self.d.memlock.as_ref(), self.facts.parent)
    }

    fn policy(&self, reason: &Reason) -> (String, Vec<Cure>) {
        let cures = match self.facts.policy_from_env {
            true => vec![user("let the transport choose", "unset TONIC_RDMA")],
            false => vec![advice("use Policy::Auto, and allow FabricKind::Verbs")],
        };
        (reason.detail().to_owned(), cures)
    }

    fn module(&self, name: &str) -> Option<&Module> {
        self.d.modules.iter().find(|module| module.name == name)
    }

    /// Returns the first of the modules `names` that is missing.
    fn missing<'a>(&self, names: &[&'a str]) -> Option<&'a str> {
        let is_missing =
            |name: &&&str| self.module(name).is_some_and(|m| m.state == ModuleState::Missing);
        names.iter().find(is_missing).copied()
    }

    fn no_rdma_core(&self, reason: &Reason) -> (String, Vec<Cure>) {
        if !self.d.library.found {
            return (reason.detail().to_owned(), cures::install_rdma_core(&self.facts.families));
        }
        let path = "/dev/infiniband/rdma_cm";
        match self.d.files.iter().find(|file| file.path == path) {
            Some(file) if file.exists && !file.usable => self.closed(path, file.error.as_deref()),
            Some(file) if !file.exists => {
                let module = self.missing(&["rdma_ucm", "rdma_cm"]);
                let why = if module.is_some() {
                    "the module rdma_ucm is not loaded"
                } else {
                    "this process does not see it"
                };
                (
                    format!("{path} does not exist: {why}"),
                    cures::device_files(&self.d.host, module.map(|_| "rdma_ucm")),
                )
            }
            _ => (reason.detail().to_owned(), vec![advice(reason.cure())]),
        }
    }

    /// The problem that this process cannot open a device file, and the cures.
    fn closed(&self, path: &str, error: Option<&str>) -> (String, Vec<Cure>) {
        let error = error.unwrap_or("it cannot be opened");
        let rule = r#"KERNEL=="uverbs*|rdma_cm", MODE="0666""#;
        (
            format!("{path}: {error}"),
            vec![
                root(
                    "open it to all users, as rdma-core's udev rules do",
                    "chmod 0666 /dev/infiniband/uverbs* /dev/infiniband/rdma_cm",
                ),
                root(
                    "the same for good",
                    format!(
                        "echo '{rule}' > /etc/udev/rules.d/90-rdma.rules && udevadm control --reload"
                    ),
                ),
            ],
        )
    }

    /// Returns what is wrong with the device's file in /dev/infiniband, and the cures. `None` if
    /// the file is usable.
    fn file_of(&self, device: &Device) -> Option<(String, Vec<Cure>)> {
        if !self.d.library.found {
            return None;
        }
        let file = self.d.files.iter().find(|file| file.device.as_deref() == Some(&device.name));
        match file {
            None => {
                let module = self.missing(&["ib_uverbs"])?;
                Some((
                    format!("the module {module} is not loaded"),
                    cures::device_files(&self.d.host, Some(module)),
                ))
            }
            Some(file) if !file.exists => Some((
                format!("{} does not exist, although the kernel has the device", file.path),
                cures::device_files(&self.d.host, None),
            )),
            Some(file) if !file.usable => Some(self.closed(&file.path, file.error.as_deref())),
            Some(_) => None,
        }
    }

    fn no_device(&self, reason: &Reason) -> (String, Vec<Cure>) {
        let names: Vec<&str> = self.d.devices.iter().map(|device| device.name.as_str()).collect();
        if let Some(only) = &self.d.settings.device
            && let Some(first) = names.first()
        {
            let what = format!("no RDMA device is called {only}; there is {}", names.join(", "));
            let cures = match self.facts.device_from_env {
                true => vec![
                    user("use any device", "unset TONIC_RDMA_DEVICE"),
                    user(
                        "or name an existing one",
                        format!("export TONIC_RDMA_DEVICE={}", quoted(first)),
                    ),
                ],
                false => {
                    vec![advice("name an existing device with ContextBuilder::device, or none")]
                }
            };
            return (what, cures);
        }
        let mut cures = Vec::new();
        let loaded = |module: &str| self.is_loaded(module);
        for interface in &self.facts.interfaces {
            let driver = interface.driver.as_deref();
            if let Some((_, module)) = MODULE_OF.iter().find(|(net, _)| driver == Some(net))
                && !loaded(module)
                && DRIVERS.contains(module)
                && self.may_have(module)
            {
                let what = format!("make an RDMA device of {}, if its adapter can", interface.name);
                cures.push(root(what, format!("modprobe {module}")));
            }
        }
        cures.extend(cures::other_namespace(&self.d.host));
        let soft: Vec<_> = SOFT.iter().filter(|(module, ..)| self.may_have(module)).collect();
        if soft.is_empty() && cures.is_empty() {
            return self.no_rdma_in_the_kernel();
        }
        match self.soft_interface() {
            _ if soft.is_empty() => {}
            Some(on) => {
                let up = if on.up {
                    String::new()
                } else {
                    format!("ip link set {} up && ", quoted(&on.name))
                };
                for (_, kind, name, what) in soft {
                    let netdev = quoted(&on.name);
                    let command = format!("{up}rdma link add {name} type {kind} netdev {netdev}");
                    cures.push(root(format!("{what}; here on {}", on.name), command));
                }
            }
            None => {
                cures.push(advice("add a network interface: this system has none but loopback"))
            }
        }
        let detail = match reason.detail() {
            "" => "no RDMA device on this host",
            detail => detail,
        };
        (detail.to_owned(), cures)
    }

    fn is_loaded(&self, module: &str) -> bool {
        self.module(module).is_some_and(|m| m.state != ModuleState::Missing)
    }

    /// Whether a device driver is or can be loaded. If the modules are not visible, as in a
    /// container, a kernel with the RDMA core is assumed to have the drivers.
    fn may_have(&self, driver: &str) -> bool {
        let Loadable { known, drivers } = &self.facts.loadable;
        self.is_loaded(driver) || drivers.contains(&driver) || (!known && self.is_loaded("ib_core"))
    }

    /// The finding for a kernel without drivers for RDMA devices. No command on this host can
    /// create a device.
    fn no_rdma_in_the_kernel(&self) -> (String, Vec<Cure>) {
        let release = self.d.host.kernel.as_deref().unwrap_or("of this system");
        let what = match self.facts.loadable.known {
            true => format!(
                "no RDMA device on this host, and its kernel {release} has no driver for one: none is built in, and \
                 none is in /lib/modules/{release}"
            ),
            false => format!(
                "no RDMA device on this host, and its kernel {release} has no RDMA (there is no /sys/class/infiniband) and \
                 no modules that could be loaded here (there is no /lib/modules/{release})"
            ),
        };
        let mut cures = Vec::new();
        if matches!(self.d.host.runs_in, RunsIn::Container | RunsIn::Kubernetes) {
            cures.push(advice(
                "the kernel is the host's: run the doctor there, and load the RDMA driver there",
            ));
        } else if self.facts.families.iter().any(|family| family == "ubuntu")
            && self.facts.loadable.known
        {
            let package = quoted(&format!("linux-modules-extra-{release}"));
            cures.push(root(
                "install the other modules of this kernel",
                format!("apt-get install -y {package}"),
            ));
        }
        cures.push(advice(
            "run a kernel that has RDMA: the adapter's driver or CONFIG_RDMA_RXE, with CONFIG_INFINIBAND_USER_ACCESS; \
             until then calls go over TCP, and by shared memory within this host",
        ));
        (what, cures)
    }

    /// The Ethernet interface to use for a software device. An interface is better if it is up, has
    /// the default route, has any route, has a carrier, or has a PCI device's driver, in this order
    /// of importance.
    fn soft_interface(&self) -> Option<&Interface> {
        let good = |i: &&Interface| i.ethernet;
        let worth = |i: &&Interface| (i.up, i.default, i.routed, i.carrier, i.driver.is_some());
        // Among equally good interfaces, this selects the first.
        self.facts.interfaces.iter().rev().filter(good).max_by_key(worth)
    }

    /// The finding for a device that the kernel has and rdma-core does not list.
    fn not_listed(&self, device: &Device) -> (String, Vec<Cure>) {
        let what = format!(
            "the kernel has {}, but rdma-core does not list it: its provider is not installed",
            device.name
        );
        let mut cures = cures::install_rdma_core(&self.facts.families);
        cures
            .push(advice("a driver from the adapter's vendor may need the vendor's own rdma-core"));
        (what, cures)
    }

    fn no_active_port(&self, device: &Device, reason: &Reason) -> (String, Vec<Cure>) {
        let is_waiting = |port: &&Port| matches!(port.state.as_str(), "INIT" | "ARMED");
        if let Some(port) =
            device.ports.iter().filter(|p| p.link_layer == "InfiniBand").find(is_waiting)
        {
            let what = format!(
                "port {} of {} is in state {}: no subnet manager has configured it",
                port.number, device.name, port.state
            );
            return (what, cures::opensm(&self.facts.families));
        }
        let on: Vec<&Interface> = self.interfaces(device).collect();
        if let Some(down) = on.iter().find(|interface| !interface.up) {
            return cures::interface_down(device, down);
        }
        let what = match on.first() {
            Some(interface) if !interface.carrier => {
                format!(
                    "no port of {} is active: {} is up and has no carrier",
                    device.name, interface.name
                )
            }
            _ => reason.detail().to_owned(),
        };
        (what, vec![advice("check cable, transceiver and switch port")])
    }

    fn interfaces(&self, device: &Device) -> impl Iterator<Item = &Interface> {
        let names = device.interfaces.clone();
        self.facts.interfaces.iter().filter(move |interface| names.contains(&interface.name))
    }
}
