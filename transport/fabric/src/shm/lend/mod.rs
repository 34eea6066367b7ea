//! Lending: a peer reads messages where their sender has them.
//!
//! Memory for sending that may be lent lies in files of its own (memfd), which keep their size and
//! their pages, and to which only their maker can write. A link offers such a file to its peer when
//! something in it is first to be lent:
//!
//! | the file is | on | next |
//! |---|---|---|
//! | unknown to the peer | something in it is to be lent | offered: LEND, with the descriptor; the message waits |
//! | offered | TAKEN: the peer has mapped it, read-only | taken: what lies in it is lent |
//! | offered | DECLINED: the peer cannot map it | declined: what lies in it is copied |
//! | any of these | its arena is freed, so nothing in it is lent | unknown: UNLEND, and the peer unmaps it |
//!
//! A lease keeps its bytes until it is returned. Where the connection ends first, its reader may
//! still read them: with the first LEND goes the writing end of a pipe, of which each mapping holds
//! a share, however long slices of it are kept. The `keeper` holds what is lent until the kernel
//! tells that the pipe has no writing end: the last slice was dropped, or the process has ended.
//!
//! What was lent may be lent on, once, to processes that `same_user` finds, where the programs of
//! both the owner and the process between them asked for that (`Lending::SameUserOnward`): the last
//! reader maps whole files, and so sees all that the owner lends to the process between. That
//! process keeps the file, registered with its pool as what it is, memory of a peer, and passes
//! with it the pipe of the owner:
//!
//! | ends first | who keeps the memory |
//! |---|---|
//! | the reader | the process between returns its lease, and the owner has the memory back |
//! | the process between, or its connection to the owner | the owner, until the reader's mapping is gone: it has the owner's pipe |
//! | the owner | the mappings, which keep the file |
//!
//! | module | what |
//! |---|---|
//! | `lender` | the leases of a link, and what its peer has mapped |
//! | `borrower` | what a link's peer has lent |
//! | `keeper` | leases of links that have ended |
//! | `permit` | to which processes memory is lent |

pub(super) mod borrower;
mod keeper;
pub(super) mod lender;
pub(super) mod permit;

/// Descriptors that this process keeps for peers that lend, at most: a quarter of the usual limit.
/// Beyond it nothing is lent on.
const MAX_KEPT: usize = 256;
