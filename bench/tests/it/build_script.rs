//! canopy-kernels's build script, run as cargo runs it, on a machine that has no nvcc: an empty `PATH` and no `CUDA_HOME`.

use std::io::Write as _;
use std::path::{Path, PathBuf};
use std::process::{Command, Output, Stdio};

use anyhow::{Context as _, Result, ensure};

const KERNELS: &str = concat!(env!("CARGO_MANIFEST_DIR"), "/../canopy-kernels");

fn compiled(dir: &Path) -> Result<PathBuf> {
    let script = dir.join("script");
    let rustc = std::env::var_os("RUSTC").unwrap_or_else(|| "rustc".into());
    let mut build = Command::new(rustc);
    build.args(["--edition", "2024", "-o"]).arg(&script).arg(Path::new(KERNELS).join("build.rs"));
    let output = build.output()?;
    ensure!(output.status.success(), "{}", String::from_utf8_lossy(&output.stderr));
    Ok(script)
}

fn run(script: &Path, dir: &Path, env: &[(&str, &str)]) -> Result<(Output, Vec<String>)> {
    run_in(Path::new(KERNELS), script, dir, env)
}

fn run_in(sources: &Path, script: &Path, dir: &Path, env: &[(&str, &str)]) -> Result<(Output, Vec<String>)> {
    let mut command = Command::new(script);
    command.current_dir(sources).env_clear().env("PATH", "").env("OUT_DIR", dir).envs(env.iter().copied());
    let output = command.output()?;
    let lines = String::from_utf8(output.stdout.clone())?.lines().map(String::from).collect();
    Ok((output, lines))
}

#[test]
fn without_nvcc_the_build_fails_with_one_sentence_and_the_ways_out() -> Result<()> {
    let dir = tempfile::tempdir()?;
    let script = compiled(dir.path())?;
    let (output, lines) = run(&script, dir.path(), &[("CARGO_FEATURE_CUDA", "1")])?;
    let errors: Vec<&str> = lines.iter().filter_map(|line| line.strip_prefix("cargo::error=")).collect();
    assert_eq!(output.status.code(), Some(1));
    let text = "feature `cuda` needs nvcc (no GPU is needed), and none was found in $CANOPY_NVCC, $CUDA_HOME/bin, $CUDA_PATH/bin or $PATH.";
    assert_eq!(errors[0], text);
    assert!(
        errors.len() == 2 && errors[1].starts_with("Build without the feature, or install"),
        "{errors:?}"
    );
    assert!(output.stderr.is_empty(), "no backtrace");
    Ok(())
}

#[test]
fn a_build_without_the_feature_looks_for_nothing_and_a_type_check_needs_no_nvcc() -> Result<()> {
    let dir = tempfile::tempdir()?;
    let script = compiled(dir.path())?;
    let (output, lines) = run(&script, dir.path(), &[])?;
    assert!(output.status.success());
    assert_eq!(lines, ["cargo::rerun-if-changed=build.rs"]);
    let (output, lines) =
        run(&script, dir.path(), &[("CARGO_FEATURE_CUDA", "1"), ("CANOPY_TYPECHECK_ONLY", "1")])?;
    assert!(output.status.success(), "{lines:?}");
    assert!(
        lines.contains(&"cargo::rustc-env=CANOPY_BUILT_ARCHS=80,86,89,90,100,120,121".into()),
        "{lines:?}"
    );
    assert!(std::fs::read_to_string(dir.path().join("fatbins.rs"))?.contains("\"tree_gdn/fused\""));
    Ok(())
}

/// A compiler that writes what nvcc writes: the image, the list of headers, a word of ptxas; and which source it was given.
const NVCC: &str = r#"#!/bin/sh
[ "$1" = --version ] && { echo "release 13.0, V13.0.88"; exit; }
while [ $# -gt 1 ]; do
  case "$1" in -o) image=$2 ;; -MF) list=$2 ;; esac
  shift
done
echo "${1##*/}" >> compiled
echo image > "$image"
echo "x: $1 include/shared.cuh /usr/include/other.cuh" > "$list"
echo "ptxas of $1" >&2
case "$1" in *broken*) exit 2 ;; esac
"#;

/// Written by a process of its own: while a thread of this one has a file open for writing, what other threads start may
/// hold it open too, and then it cannot be run.
fn executable(path: &Path, text: &str) -> Result<()> {
    let mut write = Command::new("sh");
    write.args(["-c", "cat >\"$0\" && chmod 755 \"$0\""]).arg(path).stdin(Stdio::piped());
    let mut writing = write.spawn()?;
    writing.stdin.take().context("a pipe")?.write_all(text.as_bytes())?;
    ensure!(writing.wait()?.success(), "{} is not written", path.display());
    Ok(())
}

#[test]
fn only_images_whose_source_or_header_changed_are_compiled_again() -> Result<()> {
    use std::fs::{create_dir_all, read_to_string, remove_file, write};

    let dir = tempfile::tempdir()?;
    let (script, sources, out) = (compiled(dir.path())?, dir.path().join("crate"), dir.path().join("out"));
    create_dir_all(sources.join("src/room"))?;
    create_dir_all(sources.join("include"))?;
    create_dir_all(&out)?;
    for file in ["src/room/a.cu", "src/room/b.cu", "src/room/c.cu", "include/shared.cuh"] {
        write(sources.join(file), "")?;
    }
    let nvcc = dir.path().join("nvcc");
    executable(&nvcc, NVCC)?;
    let nvcc = nvcc.to_str().unwrap_or_default();
    let build = |archs| {
        let env = [
            ("CARGO_FEATURE_CUDA", "1"),
            ("CANOPY_NVCC", nvcc),
            ("CANOPY_CUDA_ARCHS", archs),
            ("NUM_JOBS", "2"),
        ];
        let env = env.into_iter().chain((archs == "none").then_some(("CANOPY_TYPECHECK_ONLY", "1")));
        let env: Vec<_> = env.collect();
        let (output, lines) = run_in(&sources, &script, &out, &env)?;
        let compiled = read_to_string(sources.join("compiled")).unwrap_or_default();
        let _ = remove_file(sources.join("compiled"));
        let mut compiled: Vec<String> = compiled.lines().map(String::from).collect();
        compiled.sort();
        anyhow::Ok((output.status.success(), lines, compiled))
    };
    let all = ["a.cu", "b.cu", "c.cu"];
    assert_eq!(build("80")?.2, all);
    let (good, lines, compiled) = build("80")?;
    assert!(good && compiled.is_empty(), "{compiled:?}");
    assert!(lines.contains(&"cargo::rerun-if-changed=include/shared.cuh".into()), "{lines:?}");
    let said = "== src/room/a.cu\nptxas of src/room/a.cu\n== src/room/b.cu\nptxas of src/room/b.cu\n";
    assert!(read_to_string(out.join("ptxas.log"))?.starts_with(said), "an image that stays keeps its record");
    write(sources.join("src/room/b.cu"), "changed")?;
    assert_eq!(build("80")?.2, ["b.cu"]);
    write(sources.join("include/shared.cuh"), "changed")?;
    assert_eq!(build("80")?.2, all);
    assert_eq!(build("80,90")?.2, all, "other arguments");
    remove_file(out.join("room_c.fatbin"))?;
    assert_eq!(build("80,90")?.2, ["c.cu"]);
    // as another checkout's source may be: older, and not the same
    write(sources.join("src/room/a.cu"), "older")?;
    std::fs::File::options()
        .write(true)
        .open(sources.join("src/room/a.cu"))?
        .set_modified(std::time::UNIX_EPOCH)?;
    assert_eq!(build("80,90")?.2, ["a.cu"]);
    assert!(build("none")?.2.is_empty(), "a type check compiles nothing");
    assert_eq!(build("80,90")?.2, all, "and leaves no image that a build could take for its own");
    write(sources.join("src/room/broken.cu"), "")?;
    for _ in 0..2 {
        let (good, lines, compiled) = build("80,90")?;
        assert!(!good && compiled == ["broken.cu"], "a failed image is not kept: {compiled:?}");
        assert!(lines.iter().any(|line| line.contains("failed on src/room/broken.cu")), "{lines:?}");
    }
    Ok(())
}
