//! Room 4: attention of drafted rows over committed keys, then the root-to-row path.
pub mod cpu;
