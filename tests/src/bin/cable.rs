//! `cable FOLDER` is a network cable between two guests, which connect to its ends as `FOLDER/a`
//! and `FOLDER/b` (`tests/guest/run --cable`). `tests/guest/between` starts it. With several
//! folders, all ends are joined as by a hub: a frame from one end goes to all other ends.
//!
//! The cable carries frames in both directions, in order, and loses none by itself. While a file
//! `FOLDER/cut` exists, it carries none. While a file `FOLDER/rtu` exists, it drops the messages
//! that tell the passive end of an InfiniBand connection that it is established (READY TO USE), and
//! writes a byte to the file for each.

#![allow(clippy::unwrap_used, reason = "a program of tests")]

use std::fs::OpenOptions;
use std::io::Write as _;
use std::os::fd::{AsFd, OwnedFd};
use std::path::{Path, PathBuf};
use std::sync::mpsc::{Receiver, SyncSender, sync_channel};
use std::thread;

use rustix::net::{
    AddressFamily, RecvFlags, SendFlags, SocketAddrUnix, SocketType, accept, bind, listen, recv,
    send, socket,
};

/// Maximum number of frames that wait for a guest. Guests read and write on one thread, so a cable
/// that stopped reading could block both for ever. Frames beyond this number are lost.
const QUEUE: usize = 8192;

fn main() {
    let folders: Vec<_> = std::env::args_os().skip(1).map(PathBuf::from).collect();
    assert!(!folders.is_empty(), "cable FOLDER...");
    let ends = folders.iter().flat_map(|folder| ["a", "b"].map(|end| (folder, end)));
    let listeners = ends.map(|(folder, end)| {
        let listener = socket(AddressFamily::UNIX, SocketType::SEQPACKET, None).unwrap();
        bind(&listener, &SocketAddrUnix::new(folder.join(end)).unwrap()).unwrap();
        listen(&listener, 1).unwrap();
        (folder, listener)
    });
    // All guests can connect from here on.
    let listeners: Vec<_> = listeners.collect();
    let accepted = listeners.into_iter().map(|(folder, end)| (folder, accept(end).unwrap()));
    let ends: Vec<_> = accepted.collect();
    let (queues, frames): (Vec<_>, Vec<_>) = ends.iter().map(|_| sync_channel(QUEUE)).unzip();
    thread::scope(|scope| {
        for (n, ((folder, end), frames)) in ends.iter().zip(frames).enumerate() {
            let mut others = queues.clone();
            others.remove(n);
            scope.spawn(move || take(end, &others, folder));
            scope.spawn(move || give(&frames, end));
        }
        drop(queues);
    });
}

/// Takes frames from a guest until it ends.
fn take(from: &OwnedFd, others: &[SyncSender<Box<[u8]>>], folder: &Path) {
    let (cut, rtu) = (folder.join("cut"), folder.join("rtu"));
    let mut frame = [0; 65_536];
    while let Ok((len, _)) = recv(from.as_fd(), &mut frame[..], RecvFlags::empty())
        && len > 0
    {
        let frame = &frame[..len];
        if is_ready_to_use(frame)
            && let Ok(mut lost) = OpenOptions::new().append(true).open(&rtu)
        {
            lost.write_all(b"x").unwrap();
            continue;
        }
        if !cut.exists() {
            for queue in others {
                let _ = queue.try_send(frame.into());
            }
        }
    }
}

/// Passes frames to a guest, which may be slow.
fn give(frames: &Receiver<Box<[u8]>>, to: &OwnedFd) {
    for frame in frames {
        if send(to.as_fd(), &frame, SendFlags::NOSIGNAL).is_err() {
            return;
        }
    }
}

/// Whether a frame contains a READY TO USE datagram of the connection manager (sections 12.6.9 and
/// 16.7 of the InfiniBand Architecture Specification 1.3). RoCE v2 carries it in UDP to port 4791.
fn is_ready_to_use(frame: &[u8]) -> bool {
    /// Number of bytes within which the UDP header begins, whatever headers come before.
    const HEADERS: usize = 64;
    /// Opcode of an unreliable datagram's SEND, and the management queue pair.
    const UD_SEND: u8 = 0x64;
    const MANAGEMENT: [u8; 3] = [0, 0, 1];
    const CONNECTION_MANAGER: u8 = 7;
    const READY_TO_USE: [u8; 2] = 0x14_u16.to_be_bytes();
    let port = 4791_u16.to_be_bytes();
    let headers = &frame[..frame.len().min(HEADERS)];
    headers.windows(2).enumerate().filter(|(_, bytes)| *bytes == port).any(|(at, _)| {
        // UDP has its length and checksum after the port. A header of 12 bytes and one of 8 follow.
        let Some(packet) = frame.get(at + 6..at + 6 + 20 + 24) else { return false };
        let (head, datagram) = packet.split_at(20);
        head[0] == UD_SEND
            && head[5..8] == MANAGEMENT
            && datagram[1] == CONNECTION_MANAGER
            && datagram[16..18] == READY_TO_USE
    })
}
