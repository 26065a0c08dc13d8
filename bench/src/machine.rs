//! What a measurement ran on.

use std::process::Command;
use std::time::{Duration, Instant};

use anyhow::Result;
use serde::Serialize;
use serde_json::Value;

/// One machine and one build; a field is null where it cannot be found out.
#[derive(Clone, Debug, Serialize)]
pub struct Record {
    /// Version of this record's fields.
    pub schema: u32,
    /// The processor's own name.
    pub cpu: Option<String>,
    /// Cores that this process may use.
    pub cores: usize,
    /// Vector extensions that the kernels choose by.
    pub simd: Vec<&'static str>,
    /// Main memory.
    pub memory_bytes: Option<u64>,
    /// Bytes read plus bytes written per second, two threads copying buffers far larger than the caches: the median.
    pub copy_bytes_per_s: f64,
    /// Name, compute capability, driver, clocks, temperature and power of the first CUDA device, as its driver's tool prints them.
    pub gpu: Option<Value>,
    /// Operating system and architecture.
    pub platform: String,
    /// The compiler on this machine.
    pub rustc: Option<String>,
    /// The commit of the working directory.
    pub commit: Option<String>,
    /// Whether the working directory differs from that commit.
    pub dirty: Option<bool>,
    /// True for a build with optimisation.
    pub optimised: bool,
}

impl Record {
    /// Asks the machine, and measures its copy rate (about a second).
    ///
    /// # Errors
    /// When the number of cores cannot be found out.
    pub fn take() -> Result<Self> {
        Ok(Self {
            schema: 1,
            cpu: proc_field("/proc/cpuinfo", "model name"),
            cores: std::thread::available_parallelism()?.get(),
            simd: simd(),
            memory_bytes: proc_field("/proc/meminfo", "MemTotal").and_then(|text| kibibytes(&text)),
            copy_bytes_per_s: copy_rate(64 << 20, Duration::from_secs(1)),
            gpu: gpu(),
            platform: format!("{}-{}", std::env::consts::OS, std::env::consts::ARCH),
            rustc: output("rustc", &["--version"]),
            commit: commit(),
            dirty: dirty(),
            optimised: !cfg!(debug_assertions),
        })
    }
}

/// The first CUDA device as it is now; `None` without the driver's tool.
pub fn gpu() -> Option<Value> {
    let fields = "name,compute_cap,driver_version,clocks.sm,clocks.mem,temperature.gpu,power.draw";
    let text = output("nvidia-smi", &[&format!("--query-gpu={fields}"), "--format=csv,noheader"])?;
    let values = text.lines().next()?.split(", ").map(|value| Value::String(value.into()));
    Some(Value::Object(fields.split(',').map(String::from).zip(values).collect()))
}

/// The commit of the working directory; what `CANOPY_COMMIT` names on a machine that has the files without their repository.
pub fn commit() -> Option<String> {
    output("git", &["rev-parse", "HEAD"]).or_else(|| std::env::var("CANOPY_COMMIT").ok())
}

/// Whether the working directory differs from its commit.
pub fn dirty() -> Option<bool> {
    output("git", &["status", "--porcelain"]).map(|changes| !changes.is_empty())
}

fn output(program: &str, args: &[&str]) -> Option<String> {
    let output = Command::new(program).args(args).output().ok()?;
    output.status.success().then(|| String::from_utf8_lossy(&output.stdout).trim().to_string())
}

/// The first `name : value` line of a file in /proc.
fn proc_field(path: &str, name: &str) -> Option<String> {
    let text = std::fs::read_to_string(path).ok()?;
    let line = text.lines().find(|line| line.starts_with(name))?;
    Some(line.split_once(':')?.1.trim().to_string())
}

fn kibibytes(text: &str) -> Option<u64> {
    Some(text.strip_suffix("kB")?.trim().parse::<u64>().ok()? * 1024)
}

#[cfg(target_arch = "x86_64")]
fn simd() -> Vec<&'static str> {
    let found = [
        ("avx2", is_x86_feature_detected!("avx2")),
        ("fma", is_x86_feature_detected!("fma")),
        ("avx512f", is_x86_feature_detected!("avx512f")),
    ];
    found.into_iter().filter_map(|(name, has)| has.then_some(name)).collect()
}

#[cfg(not(target_arch = "x86_64"))]
fn simd() -> Vec<&'static str> {
    Vec::new()
}

/// Median rate over rounds in which two threads each copy `len` bytes, repeated for `time`.
fn copy_rate(len: usize, time: Duration) -> f64 {
    let mut buffers = [(vec![1u8; len], vec![0u8; len]), (vec![2u8; len], vec![0u8; len])];
    let start = Instant::now();
    let mut rates = Vec::new();
    while rates.len() < 5 || start.elapsed() < time {
        let round = Instant::now();
        std::thread::scope(|scope| {
            for (source, destination) in &mut buffers {
                scope.spawn(|| destination.copy_from_slice(source));
            }
        });
        rates.push((4 * len) as f64 / round.elapsed().as_secs_f64());
        std::hint::black_box(&mut buffers);
    }
    rates.sort_by(f64::total_cmp);
    rates[rates.len() / 2]
}
