//! The suite itself: every gate green, every control red, on every kernel.

use super::*;

#[test]
fn every_gate_is_green_and_every_control_is_red() {
    let (mut gates, mut controls, mut wrong) = (0, 0, Vec::new());
    run("", |line| {
        match line.control {
            None => gates += 1,
            Some(_) => controls += 1,
        }
        if !line.as_it_should_be() {
            wrong.push(format!("{line:?}"));
        }
    });
    assert!(wrong.is_empty(), "{}", wrong.join("\n"));
    assert!(gates >= 3 * kernels().len() && controls > gates);
}

#[test]
fn a_filter_picks_kernels_by_name() {
    let mut kernels = Vec::new();
    run("kv_compact", |line| kernels.push(line.kernel));
    assert!(!kernels.is_empty() && kernels.iter().all(|kernel| kernel == "kv_compact"));
}
