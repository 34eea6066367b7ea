//! What other transports fail at, and TCP carries: messages of any length, and clients that connect
//! at once.

#![cfg(target_os = "linux")]
#![allow(clippy::unwrap_used, reason = "a failed unwrap is a failed test")]

#[path = "../common/mod.rs"]
mod common;
mod long_messages;
mod many_clients;
