//! Pairs of connections under a virtual clock.
