//! Integration tests of the bench crate and of the workspace as a whole, one binary.

/// What a CUDA build says where there is no nvcc.
mod build_script;
/// Which crate may use which: the table of the style guide, held by `cargo metadata`.
mod layering;
/// Files in, files out: outputs against the oracles, and every refusal.
mod op;
/// The vectors that the page's tests compare its trees with.
mod page_shapes;
