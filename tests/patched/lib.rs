//! A program whose tonic-prost is patched. It consists only of its tests.
