//! Room 6: accepted rows to the front of the appended window.
pub mod cpu;
pub mod oracle;
