//! rdma_cm: connection-manager ids, and their events.
//!
//! | module | what |
//! |---|---|
//! | `channel` | an event channel of the library, and the library's object for each id |
//! | `hub` | the channel that the ids of a runtime share, and the task that reads it |
//! | `id` | [`CmId`](id::CmId): an id, with its subscription to a hub or with a separate channel |
//!
//! # How an event finds its id
//!
//! An event names its id by address, and a later id may have the same address. The order of the
//! steps below ensures that the later id gets no event of the earlier id, because rdma_destroy_id
//! waits until all events of the id that were read are acknowledged:
//!
//! | task | steps |
//! |---|---|
//! | reading an event | read it; put it into the queue of its id, if the id has one; acknowledge it |
//! | dropping an id | remove the id's queue; destroy the id |
//!
//! So a reader never waits for a destroyer, and an event that was read before its id was destroyed
//! is either in that id's queue or in no queue. A connect request comes with a new id. The new id
//! gets its queue before the next event is read, so its events are never missed.
//!
//! Reading some events also moves the id's queue pair to another state in librdmacm. So an id
//! forgets its queue pair before the queue pair is destroyed, while nobody reads events
//! ([`CmId::forget_queue_pair`](id::CmId::forget_queue_pair)). The queue pair is destroyed
//! afterwards, which may take long on Soft-iWARP.
//!
//! | state of a hub | events are read by | a wait for an event |
//! |---|---|---|
//! | its reactor runs | the reactor, a task of the runtime | ends with the event |
//! | orphaned: the runtime has ended | any task that polls an id | ends with an error; a link continues to poll |

pub(super) mod channel;
pub(super) mod hub;
pub(super) mod id;
