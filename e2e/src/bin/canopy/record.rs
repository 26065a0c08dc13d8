//! Who measured: machine, commit, command, for records that are read later.

use std::process::Command;

use serde_json::{Value, json};

/// This machine.
pub fn machine() -> Value {
    let cpuinfo = std::fs::read_to_string("/proc/cpuinfo").unwrap_or_default();
    let field = |name: &str| {
        let line = cpuinfo.lines().find(|line| line.starts_with(name))?;
        Some(line.split_once(':')?.1.trim().to_owned())
    };
    json!({
        "cpu": field("model name").unwrap_or_else(|| std::env::consts::ARCH.into()),
        "cores": canopy_e2e::threads::physical_cores(),
        "cache": field("cache size"),
        "simd": simd(),
        "os": std::env::consts::OS,
    })
}

fn simd() -> &'static str {
    #[cfg(target_arch = "x86_64")]
    {
        if is_x86_feature_detected!("avx512f") {
            return "avx512f";
        }
        if is_x86_feature_detected!("avx2") && is_x86_feature_detected!("fma") {
            return "avx2+fma";
        }
    }
    "portable"
}

/// The commit of the working directory and whether tracked files differ from it; `null` outside a checkout.
pub fn commit() -> (Value, Value) {
    let git = |arguments: &[&str]| {
        let output = Command::new("git").args(arguments).output().ok()?;
        output.status.success().then(|| String::from_utf8_lossy(&output.stdout).trim().to_owned())
    };
    let dirty = git(&["status", "--porcelain", "--untracked-files=no"]).map(|changes| !changes.is_empty());
    (json!(git(&["rev-parse", "--short=12", "HEAD"])), json!(dirty))
}

/// Bytes of this process in memory, where the system tells.
pub fn resident_bytes() -> Option<usize> {
    let status = std::fs::read_to_string("/proc/self/status").ok()?;
    let line = status.lines().find_map(|line| line.strip_prefix("VmRSS:"))?;
    Some(1024 * line.split_whitespace().next()?.parse::<usize>().ok()?)
}

/// The command line as typed, the program by its name alone.
pub fn command() -> String {
    let rest = std::env::args().skip(1).map(|argument| match argument.contains(char::is_whitespace) {
        true => format!("{argument:?}"),
        false => argument,
    });
    std::iter::once("canopy".to_owned()).chain(rest).collect::<Vec<_>>().join(" ")
}

/// Seconds since 1970.
pub fn unix_time() -> u64 {
    std::time::SystemTime::now().duration_since(std::time::UNIX_EPOCH).map_or(0, |since| since.as_secs())
}

/// The file that lines are appended to, made when it is not there.
pub fn open(path: &std::path::Path) -> std::io::Result<std::fs::File> {
    std::fs::OpenOptions::new().create(true).append(true).open(path)
}
