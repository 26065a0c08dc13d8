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

/// What the CUDA sources plant is what the header lists.
#[test]
fn every_listed_fault_is_planted_somewhere() {
    const HEADER: &str = include_str!("../../include/canopy/fault.cuh");
    let (listed, code) = HEADER.split_once("enum class Fault : int {").unwrap().1.split_once("};").unwrap();
    let listed = listed
        .lines()
        .filter_map(|line| line.split(',').next())
        .map(str::trim)
        .filter(|name| !name.is_empty());
    let listed = listed.filter(|name| *name != "none").collect::<Vec<_>>();
    let mut sources = code.to_string();
    for room in std::fs::read_dir(concat!(env!("CARGO_MANIFEST_DIR"), "/src")).unwrap().flatten() {
        for file in std::fs::read_dir(room.path()).into_iter().flatten().flatten() {
            if file.path().extension().is_some_and(|kind| kind == "cu" || kind == "cuh") {
                sources.push_str(&std::fs::read_to_string(file.path()).unwrap());
            }
        }
    }
    let planted = sources.split("CANOPY_FAULT(").skip(1).map(|rest| rest.split(')').next().unwrap_or(""));
    let planted = planted.filter(|name| *name != "name").collect::<std::collections::BTreeSet<_>>();
    assert_eq!(planted, listed.into_iter().collect());
}

#[test]
fn a_filter_picks_kernels_by_name() {
    let mut kernels = Vec::new();
    let choice = Choice { filter: "kv_compact".into(), ..Choice::default() };
    run(&choice, |line| kernels.push(line.kernel)).unwrap();
    assert!(!kernels.is_empty() && kernels.iter().all(|kernel| kernel == "kv_compact"));
}
