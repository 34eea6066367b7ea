//! Pairs of connections under a virtual clock.
//!
//! | file | contents |
//! |---|---|
//! | `pair` | both ends, the link between them, and the work of a driver |
//! | `calls` | the kinds of calls, header blocks, limits, windows, credits |
//! | `bulk` | grants on request, standing grants, partial grants, fairness |
//! | `segments` | bodies in several segments |
//! | `alignment` | the offset of messages in landing memory, and peers that state a wrong offset |
//! | `named` | fields that land in memory which the client names |
//! | `recall` | grants that are recalled |
//! | `answer_timeout` | a peer that does not answer RESET or RECALL |
//! | `cancel` | resets, and the frames that cross them |
//! | `shutdown` | GOAWAY, drain, CLOSE, heartbeat |
//! | `breach` | every breach by name |
//! | `model` | random operations against a model of bytes per stream |
//! | `tables` | the transition tables, every state with every event |
//! | `lend` | bytes that are lent, with `loans` |
//! | `resets` | streams that are opened and reset |
//! | `hostile` | random bytes and altered messages |
//! | `long_messages` | messages as long as gRPC can state, without their bytes |
//! | `decline` | streams whose messages come by DATA, because their receiver has no landing memory |

mod alignment;
mod answer_timeout;
mod breach;
mod bulk;
mod calls;
mod cancel;
mod decline;
mod hostile;
mod lend;
mod loans;
mod long_messages;
mod memory;
mod model;
mod named;
mod pair;
mod recall;
mod recvs;
mod resets;
mod segments;
mod shutdown;
mod silence;
mod tables;
