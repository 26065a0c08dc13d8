//! Room 2: causal depthwise convolution over each node's root path, then SiLU.
pub mod cpu;
pub mod oracle;
