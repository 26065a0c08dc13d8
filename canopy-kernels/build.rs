//! With feature `cuda`: compiles every `src/<room>/*.cu` to one fatbin and records what ptxas says of it.

use std::env;
use std::fmt::Write as _;
use std::fs;
use std::hash::{DefaultHasher, Hash, Hasher};
use std::path::{Path, PathBuf};
use std::process::{Command, exit};
use std::sync::{Mutex, PoisonError};
use std::{iter, thread};

const ARCHS: &str = "80,86,89,90,100,120,121";

fn main() {
    println!("cargo::rerun-if-changed=build.rs");
    if env::var_os("CARGO_FEATURE_CUDA").is_none() {
        return;
    }
    for name in ["CANOPY_NVCC", "CUDA_HOME", "CUDA_PATH", "CANOPY_CUDA_ARCHS", "CANOPY_TYPECHECK_ONLY"] {
        println!("cargo::rerun-if-env-changed={name}");
    }
    if let Err(lines) = build() {
        for line in lines.lines() {
            println!("cargo::error={line}");
        }
        exit(1);
    }
}

fn build() -> Result<(), String> {
    let out = PathBuf::from(env::var("OUT_DIR").map_err(|e| format!("OUT_DIR: {e}"))?);
    let archs = env::var("CANOPY_CUDA_ARCHS").unwrap_or_else(|_| ARCHS.into());
    let archs: Vec<&str> = archs.split(',').map(str::trim).filter(|arch| !arch.is_empty()).collect();
    let nvcc = if env::var_os("CANOPY_TYPECHECK_ONLY").is_some() { None } else { Some(Nvcc::find()?) };
    if let Some(Nvcc { version: Some(version), .. }) = &nvcc {
        println!("cargo::rustc-env=CANOPY_TOOLKIT={version}");
    }
    // a file for Hopper's own instructions
    let only: Vec<&str> =
        archs.iter().copied().filter(|arch| arch.starts_with("90")).map(|_| "90a").take(1).collect();
    let mut images = Vec::new();
    for source in sources()? {
        println!("cargo::rerun-if-changed={}", source.display());
        let name = source.file_stem().and_then(|stem| stem.to_str()).ok_or("a .cu file without a name")?;
        let room = source
            .parent()
            .and_then(Path::file_name)
            .and_then(|room| room.to_str())
            .ok_or("a .cu file without a room")?;
        let archs = if name.ends_with("_sm90a") { &only } else { &archs };
        if !archs.is_empty() {
            let fatbin = out.join(format!("{room}_{name}.fatbin"));
            images.push(Image { key: format!("{room}/{name}"), archs, fatbin, source, planted: false });
        }
    }
    let logs = compile_all(nvcc.as_ref(), &images)?;
    let log: String =
        images.iter().zip(logs).map(|(image, log)| format!("== {}\n{log}", image.source.display())).collect();
    let mut table = list("FATBINS", &images);
    // with feature `controls` every source once more, with the contract's faults inside
    if env::var_os("CARGO_FEATURE_CONTROLS").is_some() {
        for image in &mut images {
            // without nvcc there is no list of headers, and no image either
            let headers = fs::read_to_string(image.fatbin.with_extension("d"));
            image.planted = headers.map_or(true, |headers| headers.contains("canopy/fault.cuh"));
            image.fatbin = out.join(format!("controls_{}.fatbin", image.key.replace('/', "_")));
        }
        images.retain(|image| image.planted);
        compile_all(nvcc.as_ref(), &images)?;
        table.push_str(&list("CONTROLS", &images));
    }
    let save = |file: &str, text: &str| fs::write(out.join(file), text).map_err(|e| format!("{file}: {e}"));
    save("fatbins.rs", &table)?;
    save("ptxas.log", &log)?;
    println!("cargo::rustc-env=CANOPY_BUILT_ARCHS={}", archs.join(","));
    println!("cargo::rustc-env=CANOPY_PTXAS_LOG={}", out.join("ptxas.log").display());
    Ok(())
}

struct Image<'a> {
    /// `room/file`, by which a launcher asks for it.
    key: String,
    source: PathBuf,
    fatbin: PathBuf,
    archs: &'a [&'a str],
    /// With the contract's faults inside.
    planted: bool,
}

fn list(name: &str, images: &[Image]) -> String {
    let lines = images.iter().fold(String::new(), |mut lines, Image { key, fatbin, .. }| {
        let _ = writeln!(lines, "    ({key:?}, include_bytes!({fatbin:?})),");
        lines
    });
    format!("pub(crate) static {name}: &[(&str, &[u8])] = &[\n{lines}];\n")
}

fn sources() -> Result<Vec<PathBuf>, String> {
    let read = |dir: &Path| -> Result<Vec<PathBuf>, String> {
        let entries = fs::read_dir(dir).map_err(|e| format!("{}: {e}", dir.display()))?;
        Ok(entries.filter_map(Result::ok).map(|entry| entry.path()).collect())
    };
    let mut found = Vec::new();
    for room in read(Path::new("src"))?.into_iter().filter(|path| path.is_dir()) {
        found.extend(read(&room)?.into_iter().filter(|path| path.extension().is_some_and(|ext| ext == "cu")));
    }
    found.sort();
    Ok(found)
}

struct Nvcc {
    path: PathBuf,
    /// As `nvcc --version` ends with it: `13.0.88`.
    version: Option<String>,
}

impl Nvcc {
    fn find() -> Result<Self, String> {
        let mut tried = Vec::new();
        if let Some(path) = env::var_os("CANOPY_NVCC") {
            tried.push(PathBuf::from(path));
        }
        for home in ["CUDA_HOME", "CUDA_PATH"] {
            tried.extend(env::var_os(home).map(|home| PathBuf::from(home).join("bin/nvcc")));
        }
        if let Some(path) = env::var_os("PATH") {
            tried.extend(env::split_paths(&path).map(|dir| dir.join("nvcc")));
        }
        let path = tried.into_iter().find(|path| path.is_file()).ok_or(
            "feature `cuda` needs nvcc (no GPU is needed), and none was found in $CANOPY_NVCC, $CUDA_HOME/bin, $CUDA_PATH/bin or $PATH.\n\
             Build without the feature, or install a CUDA 13 toolkit (tools/cuda-toolkit.sh makes one from PyPI wheels), or set \
             CANOPY_TYPECHECK_ONLY=1 to type-check only.",
        )?;
        let said = Command::new(&path).arg("--version").output().ok();
        let said = said.and_then(|output| String::from_utf8(output.stdout).ok()).unwrap_or_default();
        let version = said.split_once(", V").and_then(|(_, version)| version.split_whitespace().next());
        Ok(Self { version: version.map(String::from), path })
    }
}

/// What ptxas says of each image; empty images without nvcc. As many at once as cargo allows jobs.
fn compile_all(nvcc: Option<&Nvcc>, images: &[Image]) -> Result<Vec<String>, String> {
    let Some(nvcc) = nvcc else {
        let empty = |image: &Image| {
            let _ = fs::remove_file(stamp_of(&image.fatbin));
            fs::write(&image.fatbin, []).map_err(|e| format!("{}: {e}", image.fatbin.display()))
        };
        return images.iter().map(|image| empty(image).map(|()| String::new())).collect();
    };
    let jobs = env::var("NUM_JOBS").ok().and_then(|jobs| jobs.parse().ok()).unwrap_or(1);
    let waiting = Mutex::new(images.iter().enumerate());
    let take = || waiting.lock().unwrap_or_else(PoisonError::into_inner).next();
    let work = || iter::from_fn(take).map(|(at, image)| (at, compile(nvcc, image))).collect::<Vec<_>>();
    let mut logs: Vec<_> = thread::scope(|scope| {
        let workers: Vec<_> = (0..images.len().min(jobs)).map(|_| scope.spawn(work)).collect();
        workers.into_iter().flat_map(|worker| worker.join().unwrap_or_default()).collect()
    });
    logs.sort_by_key(|(at, _)| *at);
    for header in images.iter().flat_map(|image| headers(&image.fatbin)) {
        println!("cargo::rerun-if-changed={header}");
    }
    logs.into_iter().map(|(_, log)| log).collect()
}

/// The project's own headers that an image was made from.
fn headers(fatbin: &Path) -> Vec<String> {
    let listed = fs::read_to_string(fatbin.with_extension("d")).unwrap_or_default();
    let own = |path: &&str| path.ends_with(".cuh") && !path.starts_with('/');
    listed.split_whitespace().filter(own).map(String::from).collect()
}

/// One fatbin: SASS for every architecture, PTX for the newest one without a letter suffix. An image stays if the same
/// compiler made it with the same arguments from the same texts.
fn compile(nvcc: &Nvcc, image: &Image) -> Result<String, String> {
    let Image { source, fatbin, archs, planted, .. } = image;
    let mut command = Command::new(&nvcc.path);
    command.args(["--fatbin", "-std=c++17", "-O3", "-lineinfo", "-Iinclude"]);
    command.args(["-Xptxas", "-v,--warn-on-spills", "-MD", "-MF"]).arg(fatbin.with_extension("d"));
    if *planted {
        command.arg("-DCANOPY_CONTROLS");
    }
    for arch in *archs {
        command.arg(format!("-gencode=arch=compute_{arch},code=sm_{arch}"));
    }
    if let Some(arch) = archs.iter().rev().find(|arch| arch.bytes().all(|b| b.is_ascii_digit())) {
        command.arg(format!("-gencode=arch=compute_{arch},code=compute_{arch}"));
    }
    command.arg("-o").arg(fatbin).arg(source);
    let asked = format!("{:?} {command:?}", nvcc.version);
    let made = || format!("{asked}\n{:016x}\n", texts_of(source, fatbin));
    let stamp = stamp_of(fatbin);
    if let Ok(last) = fs::read_to_string(&stamp)
        && let Some(log) = last.strip_prefix(&made())
        && fatbin.is_file()
    {
        return Ok(log.into());
    }
    let _ = fs::remove_file(&stamp);
    let run = command.output().map_err(|e| format!("{}: {e}", nvcc.path.display()))?;
    let log = String::from_utf8_lossy(&run.stderr).into_owned();
    if !run.status.success() {
        return Err(format!("{} failed on {}:\n{log}", nvcc.path.display(), source.display()));
    }
    fs::write(&stamp, made() + &log).map_err(|e| format!("{}: {e}", stamp.display()))?;
    Ok(log)
}

/// Says what an image was made from, and what ptxas said of it.
fn stamp_of(fatbin: &Path) -> PathBuf {
    fatbin.with_extension("made")
}

/// Of the source and its headers, not of their times: another checkout may share the target directory.
fn texts_of(source: &Path, fatbin: &Path) -> u64 {
    let mut hasher = DefaultHasher::new();
    for path in headers(fatbin).iter().map(Path::new).chain([source]) {
        (path, fs::read(path).ok()).hash(&mut hasher);
    }
    hasher.finish()
}
