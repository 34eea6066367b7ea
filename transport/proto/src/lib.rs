//! The connection as a sans-IO state machine: frames, credits, streams, bulk transfers, timers.
