//! What the operating system says of this process; nothing where it has no `/proc`.

use std::fs;

/// Clock ticks a second in `/proc`, fixed by Linux's interface to programs.
const TICKS: f64 = 100.0;

/// Bytes of memory in use.
pub(super) fn resident_bytes() -> Option<f64> {
    let status = fs::read_to_string("/proc/self/status").ok()?;
    let line = status.lines().find_map(|line| line.strip_prefix("VmRSS:"))?;
    line.trim().strip_suffix("kB")?.trim().parse::<f64>().ok().map(|kib| kib * 1024.0)
}

/// Seconds of CPU time used.
pub(super) fn cpu_seconds() -> Option<f64> {
    let stat = fs::read_to_string("/proc/self/stat").ok()?;
    // The name before the last parenthesis may hold anything.
    let (_, fields) = stat.rsplit_once(") ")?;
    let mut fields = fields.split(' ').skip(11);
    let mut ticks = || fields.next()?.parse::<f64>().ok();
    Some((ticks()? + ticks()?) / TICKS)
}

/// Open files, sockets included.
pub(super) fn open_files() -> Option<f64> {
    Some(fs::read_dir("/proc/self/fd").ok()?.count() as f64)
}

#[cfg(all(test, target_os = "linux"))]
mod tests {
    use super::*;
    use std::time::{Duration, Instant};

    #[test]
    fn a_process_has_memory_time_and_files() {
        let before = cpu_seconds().unwrap();
        assert!(resident_bytes().unwrap() > 1e6 && open_files().unwrap() >= 3.0);
        // Work until a tick has passed: a count that stood still would never let the test end.
        let given_up = Instant::now() + Duration::from_secs(60);
        while cpu_seconds().unwrap() <= before {
            assert!(Instant::now() < given_up, "60 s of work left the CPU time at {before} s");
            std::hint::black_box((0..100_000u64).map(std::hint::black_box).sum::<u64>());
        }
    }
}
