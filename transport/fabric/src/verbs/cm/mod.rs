//! rdma_cm: connection-manager ids, and their events.
//!
//! | module | what |
//! |---|---|
//! | `channel` | an event channel of the library, and what it owns for each id |
//! | `hub` | the channel that the ids of a runtime share, and the task that reads it |
//! | `id` | [`CmId`](id::CmId): an id, with its part of a hub or a channel of its own |
//!
//! # Whose an event is
//!
//! An event names its id by address, and an address is used again. What keeps an event from a later
//! id at the same address is the order of three steps. rdma_destroy_id waits for events that were
//! read and not acknowledged:
//!
//! | who | steps |
//! |---|---|
//! | who reads an event | reads it; puts it into the queue of its id, if the id has one; acknowledges it |
//! | who drops an id | takes the id's queue away; destroys the id |
//!
//! So whoever reads never waits for whoever destroys, and an event that was read before its id was
//! destroyed is in that id's queue, or in none. A connect request comes with an id of its own. It
//! gets its queue before the next event is read, so its events are never missed.
//!
//! Reading an event does more than that in librdmacm: with some events it moves the id's queue
//! pair to another state. So an id forgets its queue pair before that is destroyed, at a time when
//! nobody reads events ([`CmId::forget_queue_pair`](id::CmId::forget_queue_pair)). Destroying the
//! queue pair may take long on Soft-iWARP, and happens afterwards.
//!
//! | state of a hub | events are read by | a wait for an event |
//! |---|---|---|
//! | its reactor runs | the reactor, a task of the runtime | ends with the event |
//! | orphaned: the runtime has ended | whoever polls an id | ends with an error; a link polls on |

pub(super) mod channel;
pub(super) mod hub;
pub(super) mod id;
