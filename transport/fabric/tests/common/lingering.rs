//! Sockets whose close blocks, which show whether anybody waits for it.

use std::io::Write;
use std::net::{TcpListener, TcpStream};
use std::os::fd::OwnedFd;
use std::sync::atomic::{AtomicBool, Ordering};
use std::sync::{Arc, Mutex, mpsc};
use std::thread;
use std::time::Duration;

use rustix::net::sockopt;

use super::TIMEOUT;

/// TCP sockets whose close blocks for far longer than any test, and the means to release them.
pub struct Lingering {
    release: mpsc::Sender<()>,
    late: Arc<AtomicBool>,
    peers: Arc<Mutex<Vec<TcpStream>>>,
}

impl Lingering {
    pub fn new() -> Lingering {
        let (release, released) = mpsc::channel();
        let late = Arc::new(AtomicBool::new(false));
        let peers = Arc::new(Mutex::new(Vec::<TcpStream>::new()));
        let (overdue, all) = (late.clone(), peers.clone());
        // Releases the sockets if something waits for a close. The test has failed in this case.
        thread::spawn(move || {
            let timed_out = released.recv_timeout(TIMEOUT) == Err(mpsc::RecvTimeoutError::Timeout);
            overdue.store(timed_out, Ordering::Relaxed);
            all.lock().unwrap().clear();
        });
        Lingering { release, late, peers }
    }

    /// A socket with unsent data, whose peer does not read.
    pub fn socket(&self) -> OwnedFd {
        // After the release, nothing would end a wait for this socket.
        assert!(!self.late.load(Ordering::Relaxed), "somebody waited for a socket to close");
        let listener = TcpListener::bind("127.0.0.1:0").unwrap();
        let mut stream = TcpStream::connect(listener.local_addr().unwrap()).unwrap();
        let peer = listener.accept().unwrap().0;
        stream.set_nonblocking(true).unwrap();
        while Write::write(&mut stream, &[0; 1 << 16]).is_ok() {}
        sockopt::set_socket_linger(&stream, Some(Duration::from_secs(3600))).unwrap();
        self.peers.lock().unwrap().push(peer);
        stream.into()
    }

    /// Asserts that nothing has waited for a close.
    pub fn end(self) {
        assert!(!self.late.load(Ordering::Relaxed), "somebody waited for a socket to close");
        self.release.send(()).unwrap();
    }
}
