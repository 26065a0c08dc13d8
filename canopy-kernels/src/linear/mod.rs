//! The product over a model's weights, `y = x W^T`, whose row bits do not depend on the number of rows.
pub mod cpu;
