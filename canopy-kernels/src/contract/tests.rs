//! The suite itself: every gate green, every control red, on every kernel.

use super::*;

#[test]
fn every_gate_is_green_and_every_control_is_red() {
    let (mut gates, mut controls, mut wrong) = (0, 0, Vec::new());
    let all = Choice::default();
    run(&all, |line| {
        match line.control {
            _ if line.gate == Gate::Limits => {}
            None => gates += 1,
            Some(_) => controls += 1,
        }
        if !line.as_it_should_be() {
            wrong.push(format!("{line:?}"));
        }
    })
    .unwrap();
    assert!(wrong.is_empty(), "{}", wrong.join("\n"));
    assert!(gates >= 3 * kernels(&all).unwrap().len() && controls > gates);
}

#[test]
fn a_filter_picks_kernels_by_name() {
    let mut kernels = Vec::new();
    let choice = Choice { filter: "kv_compact".into(), ..Choice::default() };
    run(&choice, |line| kernels.push(line.kernel)).unwrap();
    assert!(!kernels.is_empty() && kernels.iter().all(|kernel| kernel == "kv_compact"));
}
