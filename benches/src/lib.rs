//! Benchmarks and side-by-side comparisons.
