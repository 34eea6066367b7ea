//! Conformance, interop, fault and guest tests.
