//! canopy-kernels's build script, run as cargo runs it, on a machine that has no nvcc: an empty `PATH` and no `CUDA_HOME`.

use std::path::{Path, PathBuf};
use std::process::{Command, Output};

use anyhow::{Result, ensure};

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
    let mut command = Command::new(script);
    command.current_dir(KERNELS).env_clear().env("PATH", "").env("OUT_DIR", dir).envs(env.iter().copied());
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
