//! Behaviour like tonic's, over TCP and over the fast path, and the effects of the Offer.

#![allow(clippy::unwrap_used, reason = "a failed unwrap is a failed test")]

mod balance_with_dead_endpoints;
mod balanced_paths;
mod incoming_ends;
mod into_tonic;
mod offer_in_layers;
mod served_directly;
mod taken_over;
mod unpolled_calls;
