//! Draft-tree builders.
