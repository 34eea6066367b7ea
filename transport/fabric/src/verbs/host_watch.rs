//! Watches for the kernel's notices of changes to network interfaces, addresses and RDMA devices of
//! this host.
//!
//! | source | changes |
//! |---|---|
//! | rtnetlink(7): links and addresses | ports (their interface goes down or up), addresses |
//! | uevents of the subsystem infiniband | devices that were added, and removed devices that nobody had open |
//! | the event channel of an open device | the kernel waits for the device to be closed |
//! | asynchronous events of an open device with links | changes of its ports, and its failure |

use std::io;
use std::os::fd::{AsFd, AsRawFd, BorrowedFd, OwnedFd, RawFd};
use std::sync::Arc;

use rustix::buffer::spare_capacity;
use rustix::event::epoll::{self, CreateFlags, EventData, EventFlags};
use rustix::io::Errno;
use rustix::net::netlink::{self, SocketAddrNetlink};
use rustix::net::{self, AddressFamily, Protocol, RecvFlags, SocketFlags, SocketType};
use tokio::io::Interest;
use tokio::io::unix::AsyncFd;

use crate::turn;
use crate::verbs::context::DeviceContext;

/// RTMGRP_LINK, RTMGRP_IPV4_IFADDR and RTMGRP_IPV6_IFADDR of linux/rtnetlink.h.
const LINKS_AND_ADDRESSES: u32 = 1 | 0x10 | 0x100;
/// The group that the kernel sends uevents to. Programs send their uevents to other groups.
const FROM_KERNEL: u32 = 1;
/// The line of a uevent that names the subsystem, terminated by a zero byte.
const INFINIBAND: &[u8] = b"SUBSYSTEM=infiniband\0";
/// Size of the receive buffer in bytes. The buffer is larger than any uevent (UEVENT_BUFFER_SIZE of
/// linux/kobject.h and the header). The contents of rtnetlink messages do not matter.
const MESSAGE: usize = 8192;
/// Maximum number of messages that are read from a socket at a time.
const BATCH: usize = 32;

/// Tokens that distinguish the descriptors in epoll events.
const ROUTE: u64 = 0;
const UEVENT: u64 = 1;
const DEVICE: u64 = 2;

/// The descriptors that report changes.
#[derive(Debug)]
struct Watched {
    epoll: OwnedFd,
    route: OwnedFd,
    uevents: OwnedFd,
}

impl AsRawFd for Watched {
    fn as_raw_fd(&self) -> RawFd {
        self.epoll.as_raw_fd()
    }
}

/// Reports when the contents of a [`HostSnapshot`](crate::HostSnapshot) may have changed, except
/// for RLIMIT_MEMLOCK, whose changes the kernel does not report.
#[derive(Clone, Debug)]
pub struct HostWatch(Arc<Watched>);

impl HostWatch {
    /// Starts to watch. A watch uses three descriptors.
    ///
    /// # Errors
    /// The system refuses a descriptor, for instance because the process has too many descriptors,
    /// or because a filter of system calls forbids netlink.
    pub fn new() -> io::Result<HostWatch> {
        let epoll = epoll::create(CreateFlags::CLOEXEC)?;
        let route = socket(None, LINKS_AND_ADDRESSES)?;
        let uevents = socket(Some(netlink::KOBJECT_UEVENT), FROM_KERNEL)?;
        for (socket, which) in [(&route, ROUTE), (&uevents, UEVENT)] {
            epoll::add(&epoll, socket, EventData::new_u64(which), EventFlags::IN)?;
        }
        Ok(HostWatch(Arc::new(Watched { epoll, route, uevents })))
    }

    /// Also watches a device until it is closed. The watch then also reports that the kernel waits
    /// for the device to be closed, and changes that the device's asynchronous events report.
    pub(super) fn also(&self, device: &DeviceContext) -> io::Result<()> {
        // SAFETY: the channel lives as long as the context. Closing it ends the watch.
        let channel = unsafe { BorrowedFd::borrow_raw(device.own_events()) };
        self.once_for_each(channel)?;
        self.once_for_each(device.changes()?)
    }

    /// Makes the watch report each event of a descriptor once, without reading from the descriptor.
    fn once_for_each(&self, events: BorrowedFd<'_>) -> io::Result<()> {
        let flags = EventFlags::IN | EventFlags::ET;
        Ok(epoll::add(&self.0.epoll, events, EventData::new_u64(DEVICE), flags)?)
    }

    /// Returns the source of change notices for the current runtime.
    ///
    /// # Errors
    /// The runtime refuses the descriptor.
    ///
    /// # Panics
    /// If the function is called outside of a tokio runtime with the I/O driver enabled.
    pub fn events(&self) -> io::Result<HostEvents> {
        // SAFETY: the Arc owns the descriptor and always gives the same one.
        let ready = unsafe { AsyncFd::register_with_interest(self.clone(), Interest::READABLE) }?;
        Ok(HostEvents { ready, changed: false })
    }

    /// Takes the notices that arrived since the last call, and returns whether any notice matters.
    /// Do not use this method together with [`events`](Self::events), which would miss the notices
    /// taken here.
    ///
    /// # Errors
    /// A descriptor fails.
    pub fn has_changed(&self) -> io::Result<bool> {
        let mut changed = false;
        // A process that may change addresses can keep the sockets full. Full sockets count as a
        // change.
        for _ in 0..BATCH {
            match self.take()? {
                None => return Ok(changed),
                Some(matters) => changed |= matters,
            }
        }
        Ok(true)
    }

    /// Takes the next messages, at most [`BATCH`] from each socket. Returns `None` if no message is
    /// queued, and false if no taken message matters.
    fn take(&self) -> io::Result<Option<bool>> {
        let mut ready = Vec::with_capacity(8);
        epoll::wait(&self.0.epoll, spare_capacity(&mut ready), Some(&Default::default()))?;
        if ready.is_empty() {
            return Ok(None);
        }
        let mut changed = false;
        for event in &ready {
            changed |= match { event.data }.u64() {
                ROUTE => take_messages(&self.0.route, |_| true)?,
                UEVENT => take_messages(&self.0.uevents, is_of_infiniband)?,
                _ => true,
            };
        }
        Ok(Some(changed))
    }
}

impl AsRawFd for HostWatch {
    fn as_raw_fd(&self) -> RawFd {
        self.0.as_raw_fd()
    }
}

/// The changes that a [`HostWatch`] reports, for one task.
#[derive(Debug)]
pub struct HostEvents {
    ready: AsyncFd<HostWatch>,
    /// True if a message that matters was taken and not yet reported.
    changed: bool,
}

impl HostEvents {
    /// Waits for a change. Reports several simultaneous changes as one change, and may report a
    /// change although nothing changed.
    ///
    /// # Errors
    /// A descriptor fails, and no further changes will be reported.
    ///
    /// # Cancel safety
    /// Cancel safe.
    pub async fn next(&mut self) -> io::Result<()> {
        loop {
            let mut guard = self.ready.readable().await?;
            match self.ready.get_ref().take()? {
                None => {
                    guard.clear_ready();
                    if std::mem::take(&mut self.changed) {
                        return Ok(());
                    }
                }
                Some(changed) => {
                    self.changed |= changed;
                    // A process that may change addresses can keep the sockets full (R20).
                    turn::spend(BATCH).await;
                }
            }
        }
    }
}

fn socket(protocol: Option<Protocol>, groups: u32) -> rustix::io::Result<OwnedFd> {
    let flags = SocketFlags::NONBLOCK | SocketFlags::CLOEXEC;
    let socket = net::socket_with(AddressFamily::NETLINK, SocketType::RAW, flags, protocol)?;
    net::bind(&socket, &SocketAddrNetlink::new(0, groups))?;
    Ok(socket)
}

/// Reads up to [`BATCH`] messages from a socket. Returns true if at least one message matters.
fn take_messages(socket: impl AsFd, matters: impl Fn(&[u8]) -> bool) -> io::Result<bool> {
    let mut changed = false;
    let mut message = [0; MESSAGE];
    for _ in 0..BATCH {
        match net::recv(&socket, &mut message, RecvFlags::empty()) {
            // Netlink messages are never empty.
            Ok((0, _)) | Err(Errno::AGAIN) => break,
            Ok((len, _)) => changed |= matters(&message[..len]),
            Err(Errno::INTR) => {}
            // Some messages were lost.
            Err(Errno::NOBUFS) => changed = true,
            Err(error) => return Err(error.into()),
        }
    }
    Ok(changed)
}

fn is_of_infiniband(uevent: &[u8]) -> bool {
    uevent.windows(INFINIBAND.len()).any(|line| line == INFINIBAND)
}

#[cfg(test)]
mod tests {
    use super::*;

    /// An earlier version read messages until the socket was empty (R20).
    #[test]
    fn messages_are_read_in_batches() {
        let (kind, flags) = (net::SocketType::SEQPACKET, SocketFlags::NONBLOCK);
        let (from, to) = net::socketpair(AddressFamily::UNIX, kind, flags, None).unwrap();
        let send = || net::send(&from, b"uevent", net::SendFlags::empty()).unwrap();
        (0..BATCH + 1).for_each(|_| assert_eq!(send(), 6));
        let read = std::cell::Cell::new(0);
        let taken = || {
            read.set(0);
            let count = |_: &[u8]| {
                read.set(read.get() + 1);
                read.get() == BATCH
            };
            (take_messages(&to, count).unwrap(), read.get())
        };
        assert_eq!(taken(), (true, BATCH));
        assert_eq!(taken(), (false, 1));
        assert_eq!(taken(), (false, 0));
    }

    /// Each change of a device wakes a watch, although nobody reads the device's descriptor.
    #[tokio::test]
    async fn a_device_tells_of_each_change() {
        let Ok(watch) = HostWatch::new() else { panic!("netlink is not to be had") };
        let device = rustix::event::eventfd(0, rustix::event::EventfdFlags::NONBLOCK).unwrap();
        watch.once_for_each(device.as_fd()).unwrap();
        for told in 0..3 {
            // The host's own changes, which may come at any time, do not count.
            while watch.take().unwrap().is_some() {}
            rustix::io::write(&device, &1_u64.to_ne_bytes()).unwrap();
            assert_eq!(watch.take().unwrap(), Some(true), "{told}");
            assert_ne!(watch.take().unwrap(), Some(true), "{told}");
        }
        rustix::io::write(&device, &1_u64.to_ne_bytes()).unwrap();
        watch.events().unwrap().next().await.unwrap();
        rustix::io::write(&device, &1_u64.to_ne_bytes()).unwrap();
        assert!(watch.has_changed().unwrap());
    }

    #[test]
    fn uevents_of_other_devices_do_not_matter() {
        let uevent = |subsystem| format!("add@/x\0ACTION=add\0SUBSYSTEM={subsystem}\0SEQNUM=1\0");
        assert!(is_of_infiniband(uevent("infiniband").as_bytes()));
        for other in ["infiniband_verbs", "net", "infiniban"] {
            assert!(!is_of_infiniband(uevent(other).as_bytes()), "{other}");
        }
    }
}
