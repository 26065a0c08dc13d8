//! Room 3: log gates and write strengths from the a and b projections.
pub mod cpu;
pub mod oracle;
