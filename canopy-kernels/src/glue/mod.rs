//! The small row-wise steps between the kernels: norms, rotary embedding, gates, SwiGLU.
pub mod cpu;
mod rotary;
