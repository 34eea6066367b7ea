//! A program whose tonic-prost is patched: its tests are all there is.
