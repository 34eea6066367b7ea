//! Layers, limits and tower stacks on both paths.

mod interceptors;
mod limits;
mod stacks;
