//! Lending: the peer reads messages in the sender's memory.
//!
//! Send memory that may be lent lies in separate files (memfd), whose size and pages are fixed, and
//! to which only their maker can write. A link offers such a file to its peer when the link first
//! wants to lend bytes in the file:
//!
//! | the file is | on | next |
//! |---|---|---|
//! | unknown to the peer | bytes in it are to be lent | offered: LEND, with the descriptor; the message waits |
//! | offered | TAKEN: the peer has mapped it, read-only | taken: bytes in it are lent |
//! | offered | DECLINED: the peer cannot map it | declined: bytes in it are copied |
//! | any of these | its arena is freed, so nothing in it is lent | unknown: UNLEND, and the peer unmaps it |
//!
//! A lease keeps its bytes until it is returned. If the connection ends first, the reader may still
//! read the bytes. So the first LEND also passes the writing end of a pipe. Each mapping at the
//! reader keeps the pipe open while slices of the mapping exist. The `keeper` keeps the leases
//! until the kernel reports that the pipe has no writing end, because the last slice was dropped or
//! the process has ended.
//!
//! Lent bytes may be lent on, once, to processes that `same_user` confirms. The programs of both
//! the owner and the process in between must allow this (`Lending::SameUserOnward`), because the
//! last reader maps whole files and so sees everything that the owner lends to the process in
//! between. That process registers the file with its pool as a peer's memory, and passes on the
//! file together with the owner's pipe:
//!
//! | ends first | who keeps the memory |
//! |---|---|
//! | the reader | the process in between returns its lease, and the owner has the memory back |
//! | the process in between, or its connection to the owner | the owner, until the reader's mapping, which has the owner's pipe, is gone |
//! | the owner | the mappings, which keep the file |
//!
//! | module | what |
//! |---|---|
//! | `lender` | the leases of a link, and the files that its peer has mapped |
//! | `borrower` | the memory that a link's peer has lent |
//! | `keeper` | leases of links that have ended |
//! | `permit` | decides to which processes memory is lent |

pub(super) mod borrower;
mod keeper;
pub(super) mod lender;
pub(super) mod permit;

/// Maximum number of descriptors that this process keeps for peers that lend: a quarter of the
/// usual limit. Beyond this number, no memory is lent on.
const MAX_KEPT: usize = 256;
