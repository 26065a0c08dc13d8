//! Room 5: the DFlash drafter's block attention.
pub mod cpu;
pub mod oracle;
