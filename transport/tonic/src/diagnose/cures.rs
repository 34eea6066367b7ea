//! Commands that fix problems. This module also describes the problem of a device without an IP
//! address, because the commands then depend on the network interface. A command can be used
//! unchanged, except for parts in capitals, which its description explains.

use crate::diagnose::host::sysfs::Interface;
use crate::diagnose::report::{
    Cure, DescriptorsReport, Device, Host, MemlockReport, RdmaNamespaces, RunsIn,
};
use crate::path::reason::Reason;

const MIB: u64 = 1 << 20;

/// A command for root, in a shell.
pub(super) fn root(what: impl Into<String>, command: impl Into<String>) -> Cure {
    Cure { what: what.into(), command: Some(command.into()), root: true }
}

/// A command for the user, in the shell that starts the program.
pub(super) fn user(what: impl Into<String>, command: impl Into<String>) -> Cure {
    Cure { what: what.into(), command: Some(command.into()), root: false }
}

/// A cure that needs no shell command.
pub(super) fn advice(what: impl Into<String>) -> Cure {
    Cure { what: what.into(), command: None, root: false }
}

/// Quotes `word`, so that a shell reads it as one word.
pub(super) fn quoted(word: &str) -> String {
    let plain = |b: u8| b.is_ascii_alphanumeric() || b"@%+=:,./_-".contains(&b);
    match !word.is_empty() && word.bytes().all(plain) {
        true => word.to_owned(),
        false => format!("'{}'", word.replace('\'', r"'\''")),
    }
}

/// The packages of rdma-core's libraries and tools, by family of distributions.
const PACKAGES: [(&[&str], &str, &str); 4] = [
    (
        &["debian", "ubuntu"],
        "Debian, Ubuntu",
        "apt-get install -y libibverbs1 librdmacm1 ibverbs-providers",
    ),
    (&["fedora", "rhel", "centos", "amzn"], "Fedora, RHEL", "dnf install -y libibverbs librdmacm"),
    (&["suse", "opensuse"], "SUSE", "zypper --non-interactive install libibverbs librdmacm1"),
    (&["arch"], "Arch", "pacman -S --noconfirm rdma-core"),
];

/// The cures that install rdma-core: the command for this distribution, or all commands if the
/// distribution is unknown.
pub(super) fn install_rdma_core(families: &[String]) -> Vec<Cure> {
    let all = || {
        PACKAGES
            .iter()
            .map(|(_, where_, command)| root(format!("install rdma-core ({where_})"), *command))
    };
    let is_known = |(names, _, _): &&(&[&str], &str, &str)| {
        families.iter().any(|f| names.contains(&f.as_str()))
    };
    match PACKAGES.iter().find(is_known) {
        Some((_, _, command)) => vec![root("install rdma-core", *command)],
        None => all().collect(),
    }
}

/// The cures that start a subnet manager.
pub(super) fn opensm(families: &[String]) -> Vec<Cure> {
    let what = "run a subnet manager on one host of the InfiniBand network, unless a switch does";
    let is = |names: &[&str]| families.iter().any(|family| names.contains(&family.as_str()));
    let start = "systemctl enable --now opensm";
    let run = match is(&["debian", "ubuntu"]) {
        true => root(what, format!("apt-get install -y opensm && {start}")),
        false if is(&["fedora", "rhel", "centos", "amzn"]) => {
            root(what, format!("dnf install -y opensm && {start}"))
        }
        false if is(&["suse", "opensuse"]) => {
            root(what, format!("zypper --non-interactive install opensm && {start}"))
        }
        false => root(format!("{what} (install opensm first)"), start),
    };
    vec![run, advice("or switch on the subnet manager of a managed switch")]
}

/// The cures that raise RLIMIT_MEMLOCK so that the whole pool fits.
pub(super) fn memlock(
    host: &Host,
    memlock: Option<&MemlockReport>,
    parent: Option<u32>,
) -> Vec<Cure> {
    // Round up, and ask for no less than the transport needs.
    let wanted =
        memlock.map_or(128 * MIB, |m| m.wanted.max(m.needed)).div_ceil(MIB).saturating_mul(MIB);
    let raised = Raised {
        name: "memlock",
        directive: "LimitMEMLOCK",
        value: wanted,
        per_user: wanted / 1024,
        container: "--device /dev/infiniband ",
    };
    raised.cures(host, parent)
}

/// The cures that raise the limit of descriptors so that a server has room for its connections.
pub(super) fn descriptors(
    host: &Host,
    limit: &DescriptorsReport,
    parent: Option<u32>,
) -> Vec<Cure> {
    let value = limit.wanted.next_multiple_of(1024);
    let raised =
        Raised { name: "nofile", directive: "LimitNOFILE", value, per_user: value, container: "" };
    // Within the hard limit, every user may raise the soft limit.
    let own = limit.hard.is_none_or(|hard| value <= hard).then(|| {
        user("at once, in the shell that starts the server", format!("ulimit -n {value}"))
    });
    own.into_iter().chain(raised.cures(host, parent)).collect()
}

/// A process limit that is too low.
struct Raised<'a> {
    /// The limit's name for prlimit, pam_limits and Docker.
    name: &'a str,
    /// The limit's name for systemd.
    directive: &'a str,
    value: u64,
    /// The value in the unit of pam_limits.
    per_user: u64,
    /// Further options for Docker, each followed by a space.
    container: &'a str,
}

impl Raised<'_> {
    fn cures(&self, host: &Host, parent: Option<u32>) -> Vec<Cure> {
        let Raised { name, directive, value, per_user, container } = self;
        let unit = host.unit.as_deref().unwrap_or("UNIT.service");
        let drop_in = |unit: &str| {
            let dir = quoted(&format!("/etc/systemd/system/{unit}.d"));
            format!(
                "mkdir -p {dir} && printf '[Service]\\n{directive}={value}\\n' > {dir}/{name}.conf && systemctl \
                 daemon-reload && systemctl restart {}",
                quoted(unit)
            )
        };
        let now = parent.map(|pid| {
            root(
                format!(
                    "at once, for process {pid}, which started this one (for example a shell), \
                     and for processes that it starts from now on"
                ),
                format!("prlimit --pid {pid} --{name}={value}:{value}"),
            )
        });
        let lasting = root(
            "permanently, for users: applies from the next login",
            format!("echo '* - {name} {per_user}' > /etc/security/limits.d/90-{name}.conf"),
        );
        let service = root("for a systemd service", drop_in(unit));
        let docker = root(
            "for a container: start it with this option",
            format!("docker run --ulimit {name}={value}:{value} {container}IMAGE"),
        );
        let kubernetes = root(
            "for Kubernetes, which has no setting for it: on the node, for all containers; \
             restart the pod afterwards",
            drop_in("containerd.service"),
        );
        match host.runs_in {
            RunsIn::Session => now.into_iter().chain([lasting, service, docker]).collect(),
            RunsIn::Service => vec![service, docker, lasting],
            RunsIn::Container => vec![docker, service, kubernetes],
            RunsIn::Kubernetes => vec![kubernetes, docker],
        }
    }
}

/// The cures for a host without a device, if each device belongs to one network namespace.
pub(super) fn other_namespace(host: &Host) -> Vec<Cure> {
    if host.rdma_namespaces != Some(RdmaNamespaces::Exclusive) {
        return Vec::new();
    }
    vec![
        root(
            "give this network namespace a device of the host, if the host has one: each device \
             belongs to one namespace (`rdma system show`)",
            "rdma dev set DEVICE netns NAMESPACE",
        ),
        root(
            "or make all devices visible in all namespaces, before a second namespace is created",
            "rdma system set netns shared",
        ),
    ]
}

/// The cures that create the files of /dev/infiniband.
pub(super) fn device_files(host: &Host, module: Option<&str>) -> Vec<Cure> {
    if let Some(module) = module {
        return vec![root("load the kernel module", format!("modprobe {module}"))];
    }
    let container = root(
        "give the container access to the devices: start it with this option",
        "docker run --device /dev/infiniband --ulimit memlock=-1:-1 IMAGE",
    );
    let udev = root(
        "let udev create the device files",
        "udevadm trigger --subsystem-match=infiniband_verbs --subsystem-match=misc",
    );
    match host.runs_in {
        RunsIn::Container => vec![container],
        RunsIn::Kubernetes => vec![advice(
            "have a device plugin give the pod its RDMA device (a resource such as rdma/hca), or mount /dev/infiniband",
        )],
        _ => vec![udev, container],
    }
}

/// The problem of a device without an address. `on` lists its network interfaces.
pub(super) fn no_address(
    device: &Device,
    reason: &Reason,
    on: &[&Interface],
) -> (String, Vec<Cure>) {
    let cures = |interface: &str| {
        vec![root(
            "give the interface an address of your network, and the length of its prefix",
            format!("ip addr add ADDRESS/LENGTH dev {interface}"),
        )]
    };
    if let Some(down) = on.iter().find(|interface| !interface.up) {
        return interface_down(device, down);
    }
    match on.first() {
        Some(interface) => {
            let what = format!(
                "{} is on network interface {}, which has no address that other hosts can use",
                device.name, interface.name
            );
            (what, cures(&quoted(&interface.name)))
        }
        None if device.transport == "InfiniBand" => {
            let what = format!(
                "{} has no network interface here to hold addresses: IPoIB creates one",
                device.name
            );
            let load = root("load IPoIB", "modprobe ib_ipoib");
            (what, std::iter::once(load).chain(cures("INTERFACE")).collect())
        }
        None => (reason.detail().to_owned(), vec![advice(reason.cure())]),
    }
}

pub(super) fn interface_down(device: &Device, down: &Interface) -> (String, Vec<Cure>) {
    let what = format!("{} is on network interface {}, which is down", device.name, down.name);
    (what, vec![root("bring the interface up", format!("ip link set {} up", quoted(&down.name)))])
}

/// Whether the kernel says that the device is neither InfiniBand, RoCE nor iWARP. Only these three
/// support connections.
pub(super) fn is_unconnected(device: &Device) -> bool {
    device.transport == "unknown transport" && !device.ports.is_empty()
}

/// The cure for a device that can never be used.
pub(super) fn other_adapter() -> Vec<Cure> {
    vec![advice(
        "nothing on this host: use an adapter or a machine with RoCE, InfiniBand or iWARP; until \
         then calls go over TCP, and by shared memory within this host",
    )]
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_shell_takes_a_quoted_word_for_one() {
        assert_eq!(quoted("store@1.service"), "store@1.service");
        assert_eq!(quoted("a b;'c"), r"'a b;'\''c'");
        assert_eq!(quoted(""), "''");
    }

    #[test]
    fn each_family_of_distributions_has_its_command() {
        let of = |names: &[&str]| {
            let names: Vec<String> = names.iter().map(|n| (*n).to_owned()).collect();
            install_rdma_core(&names)
                .into_iter()
                .filter_map(|cure| cure.command)
                .collect::<Vec<_>>()
        };
        assert_eq!(
            of(&["debian"]),
            ["apt-get install -y libibverbs1 librdmacm1 ibverbs-providers"]
        );
        assert_eq!(of(&["pop", "ubuntu", "debian"]).len(), 1);
        assert_eq!(
            of(&["rocky", "rhel", "centos", "fedora"]),
            ["dnf install -y libibverbs librdmacm"]
        );
        assert_eq!(of(&["plan9"]).len(), PACKAGES.len());
        assert_eq!(of(&[]).len(), PACKAGES.len());
    }

    #[test]
    fn a_subnet_manager_comes_from_the_distribution_or_is_there() {
        let of = |name: &str| opensm(&[name.to_owned()]).remove(0).command.unwrap();
        assert!(of("ubuntu").starts_with("apt-get install -y opensm && "));
        assert!(of("rhel").starts_with("dnf install -y opensm && "));
        assert!(of("suse").starts_with("zypper --non-interactive install opensm && "));
        assert_eq!(of("arch"), "systemctl enable --now opensm");
    }
}
