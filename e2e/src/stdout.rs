//! Standard output of the command line tools: a reader that has gone, or a full disk, ends the program without a panic.

use std::fmt::Arguments;
use std::io::{ErrorKind, Write as _};

/// Exit status of a program whose reader has gone, as a shell reports one that SIGPIPE ended.
pub const READER_GONE: u8 = 141;

/// Writes a line; where that fails the process ends, silently with [`READER_GONE`] when the reader has gone, otherwise
/// with the reason and status 1.
pub fn line(text: Arguments<'_>) {
    let mut out = std::io::stdout().lock();
    if let Err(error) = writeln!(out, "{text}").and_then(|()| out.flush()) {
        if error.kind() == ErrorKind::BrokenPipe {
            std::process::exit(READER_GONE.into());
        }
        eprintln!("error: standard output: {error}");
        std::process::exit(1);
    }
}

/// True for the error of a write whose reader has gone.
pub fn is_reader_gone(error: &(dyn std::error::Error + 'static)) -> bool {
    error.downcast_ref::<std::io::Error>().is_some_and(|error| error.kind() == ErrorKind::BrokenPipe)
}

/// `println!` by [`line()`].
#[macro_export]
macro_rules! say {
    ($($argument:tt)*) => { $crate::stdout::line(format_args!($($argument)*)) };
}
