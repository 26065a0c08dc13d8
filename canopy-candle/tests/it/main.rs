//! Integration tests of the ops, one binary.

/// The kinds of failure of other software that reach up to the ops: padding, long decoding, read-only pools.
mod cases;
/// The text of every refusal.
mod errors;
/// In-place ops write the slots they name and nothing else.
mod in_place;
/// Every op against the float64 oracle or its kernel, and the same bits from every layout of its arguments.
mod ops;
/// Passes that run again and again.
mod passes;
/// Qwen3 of candle-transformers, rebuilt from the ops and verifying trees.
mod qwen3;
/// Seeded tensors, layouts of one tensor, comparisons.
mod support;
