//! With feature `cuda`: compiles every `src/<room>/*.cu` to one fatbin and records what ptxas says of it.

use std::env;
use std::fmt::Write as _;
use std::fs;
use std::path::{Path, PathBuf};
use std::process::{Command, exit};

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
    let nvcc = if env::var_os("CANOPY_TYPECHECK_ONLY").is_some() { None } else { Some(find_nvcc()?) };
    if let Some(version) = nvcc.as_deref().and_then(version) {
        println!("cargo::rustc-env=CANOPY_TOOLKIT={version}");
    }
    // with feature `controls` every source once more, with the contract's faults inside
    let controls = env::var_os("CARGO_FEATURE_CONTROLS").is_some();
    let (mut table, mut planted, mut log) = (String::new(), String::new(), String::new());
    for source in sources()? {
        println!("cargo::rerun-if-changed={}", source.display());
        let name = source.file_stem().and_then(|stem| stem.to_str()).ok_or("a .cu file without a name")?;
        let room = source
            .parent()
            .and_then(Path::file_name)
            .and_then(|room| room.to_str())
            .ok_or("a .cu file without a room")?;
        // a file for Hopper's own instructions
        let only: Vec<&str> =
            archs.iter().copied().filter(|arch| arch.starts_with("90")).map(|_| "90a").take(1).collect();
        let archs = if name.ends_with("_sm90a") { &only } else { &archs };
        if archs.is_empty() {
            continue;
        }
        let image = |prefix: &str, table: &mut String| -> Result<String, String> {
            let fatbin = out.join(format!("{prefix}{room}_{name}.fatbin"));
            let log = match &nvcc {
                Some(nvcc) => compile(nvcc, archs, &source, &fatbin, !prefix.is_empty())?,
                None => fs::write(&fatbin, [])
                    .map(|()| String::new())
                    .map_err(|e| format!("{}: {e}", fatbin.display()))?,
            };
            let _ = writeln!(table, "    (\"{room}/{name}\", include_bytes!({fatbin:?})),");
            Ok(log)
        };
        log.push_str(&image("", &mut table)?);
        // without nvcc there is no list of headers, and no image either
        let headers = fs::read_to_string(out.join(format!("{room}_{name}.d")));
        if controls && headers.map_or(true, |headers| headers.contains("canopy/fault.cuh")) {
            image("controls_", &mut planted)?;
        }
    }
    let list =
        |name: &str, lines: &str| format!("pub(crate) static {name}: &[(&str, &[u8])] = &[\n{lines}];\n");
    let mut table = list("FATBINS", &table);
    if controls {
        table.push_str(&list("CONTROLS", &planted));
    }
    let save = |file: &str, text: &str| fs::write(out.join(file), text).map_err(|e| format!("{file}: {e}"));
    save("fatbins.rs", &table)?;
    save("ptxas.log", &log)?;
    println!("cargo::rustc-env=CANOPY_BUILT_ARCHS={}", archs.join(","));
    println!("cargo::rustc-env=CANOPY_PTXAS_LOG={}", out.join("ptxas.log").display());
    Ok(())
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

fn find_nvcc() -> Result<PathBuf, String> {
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
    tried.iter().find(|path| path.is_file()).cloned().ok_or_else(|| {
        "feature `cuda` needs nvcc (no GPU is needed), and none was found in $CANOPY_NVCC, $CUDA_HOME/bin, $CUDA_PATH/bin or $PATH.\n\
         Build without the feature, or install a CUDA 13 toolkit (tools/cuda-toolkit.sh makes one from PyPI wheels), or set \
         CANOPY_TYPECHECK_ONLY=1 to type-check only."
            .into()
    })
}

/// The toolkit's version as `nvcc --version` ends with it: `13.0.88`.
fn version(nvcc: &Path) -> Option<String> {
    let text = String::from_utf8(Command::new(nvcc).arg("--version").output().ok()?.stdout).ok()?;
    let (_, version) = text.split_once(", V")?;
    version.split_whitespace().next().map(String::from)
}

/// One fatbin: SASS for every architecture, PTX for the newest one without a letter suffix.
fn compile(
    nvcc: &Path,
    archs: &[&str],
    source: &Path,
    fatbin: &Path,
    planted: bool,
) -> Result<String, String> {
    let depfile = fatbin.with_extension("d");
    let mut command = Command::new(nvcc);
    command.args([
        "--fatbin",
        "-std=c++17",
        "-O3",
        "-lineinfo",
        "-Iinclude",
        "-Xptxas",
        "-v,--warn-on-spills",
        "-MD",
        "-MF",
    ]);
    command.arg(&depfile);
    if planted {
        command.arg("-DCANOPY_CONTROLS");
    }
    for arch in archs {
        command.arg(format!("-gencode=arch=compute_{arch},code=sm_{arch}"));
    }
    if let Some(arch) = archs.iter().rev().find(|arch| arch.bytes().all(|b| b.is_ascii_digit())) {
        command.arg(format!("-gencode=arch=compute_{arch},code=compute_{arch}"));
    }
    let run =
        command.arg("-o").arg(fatbin).arg(source).output().map_err(|e| format!("{}: {e}", nvcc.display()))?;
    let log = String::from_utf8_lossy(&run.stderr).into_owned();
    if !run.status.success() {
        return Err(format!("{} failed on {}:\n{log}", nvcc.display(), source.display()));
    }
    let deps = fs::read_to_string(&depfile).unwrap_or_default();
    for header in deps.split_whitespace().filter(|path| path.ends_with(".cuh") && !path.starts_with('/')) {
        println!("cargo::rerun-if-changed={header}");
    }
    Ok(format!("== {}\n{log}", source.display()))
}
