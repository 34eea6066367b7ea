//! Pairs of connections under a virtual clock.
//!
//! | file | what |
//! |---|---|
//! | `pair` | both ends, the link between them, what a driver does |
//! | `calls` | the shapes of calls, header blocks, limits, windows, credits |
//! | `bulk` | grants: on request, standing, partial; taking turns |
//! | `segments` | pieces in several segments |
//! | `phase` | where messages begin in landing memory, and peers that say they begin elsewhere |
//! | `recall` | grants that are asked back |
//! | `answer_timeout` | a peer that does not answer RESET or RECALL |
//! | `cancel` | resets, and what crosses them |
//! | `shutdown` | GOAWAY, drain, CLOSE, heartbeat |
//! | `breach` | every breach by name |
//! | `model` | random operations against a model of bytes per stream |
//! | `tables` | the transition tables, every state with every event |
//! | `resets` | streams that are opened and reset |
//! | `hostile` | random bytes and changed messages |

mod answer_timeout;
mod breach;
mod bulk;
mod calls;
mod cancel;
mod hostile;
mod model;
mod pair;
mod phase;
mod recall;
mod recvs;
mod resets;
mod segments;
mod shutdown;
mod tables;
