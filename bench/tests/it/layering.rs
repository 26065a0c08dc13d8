//! Dependencies point one way, features are off by default, `cuda` is forwarded, there is one cudarc.

use std::collections::BTreeSet;

use cargo_metadata::{DependencyKind, Metadata, MetadataCommand, Package};

/// A crate, the workspace crates it may use, and what it must never use.
struct Rule {
    name: &'static str,
    workspace: &'static [&'static str],
    never: &'static [&'static str],
}

const RULES: [Rule; 5] = [
    Rule {
        name: "canopy-kernels",
        workspace: &[],
        never: &["candle-core", "candle-nn", "candle-transformers", "serde", "tokio", "tracing", "anyhow"],
    },
    Rule {
        name: "canopy-candle",
        workspace: &["canopy-kernels"],
        never: &["candle-nn", "candle-transformers", "tokio", "serde", "anyhow", "tracing"],
    },
    Rule {
        name: "canopy-e2e",
        workspace: &["canopy-kernels", "canopy-candle"],
        never: &["axum", "tower", "tower-http", "tokio", "hyper"],
    },
    Rule {
        name: "canopy-server",
        workspace: &["canopy-e2e"],
        never: &["candle-core", "candle-nn", "candle-transformers", "canopy-candle", "canopy-kernels"],
    },
    Rule {
        name: "canopy-bench",
        workspace: &["canopy-kernels", "canopy-candle", "canopy-e2e"],
        never: &["canopy-server", "axum", "tokio"],
    },
];

fn metadata() -> Metadata {
    let manifest = concat!(env!("CARGO_MANIFEST_DIR"), "/../Cargo.toml");
    MetadataCommand::new().manifest_path(manifest).no_deps().exec().expect("cargo metadata of this workspace")
}

fn package<'a>(metadata: &'a Metadata, name: &str) -> &'a Package {
    let found = metadata.packages.iter().find(|package| package.name.as_str() == name);
    found.unwrap_or_else(|| panic!("no package {name}"))
}

/// What a crate uses outside its tests.
fn dependencies(package: &Package) -> BTreeSet<&str> {
    let used =
        package.dependencies.iter().filter(|dependency| dependency.kind != DependencyKind::Development);
    used.map(|dependency| dependency.name.as_str()).collect()
}

#[test]
fn every_crate_has_a_rule_and_keeps_it() {
    let metadata = metadata();
    let members = metadata.packages.iter().map(|package| package.name.as_str()).collect::<BTreeSet<_>>();
    assert_eq!(members, RULES.iter().map(|rule| rule.name).collect());
    for rule in &RULES {
        let used = dependencies(package(&metadata, rule.name));
        for &name in used.iter().filter(|name| members.contains(*name)) {
            assert!(rule.workspace.contains(&name), "{} must not use {name}", rule.name);
        }
        for name in rule.never {
            assert!(!used.contains(name), "{} must never use {name}", rule.name);
        }
    }
}

#[test]
fn canopy_kernels_and_canopy_candle_use_what_the_table_names_and_nothing_else() {
    let metadata = metadata();
    let allowed = [
        ("canopy-kernels", &["thiserror", "half", "rayon", "cudarc"][..]),
        ("canopy-candle", &["canopy-kernels", "candle-core", "half"][..]),
    ];
    for (name, allowed) in allowed {
        for used in dependencies(package(&metadata, name)) {
            assert!(allowed.contains(&used), "{name} uses {used}");
        }
    }
    let cudarc = package(&metadata, "canopy-kernels").dependencies.iter().find(|d| d.name == "cudarc");
    assert!(cudarc.is_some_and(|cudarc| cudarc.optional), "cudarc comes with feature cuda only");
}

#[test]
fn features_are_off_by_default_and_cuda_is_forwarded_one_step_at_a_time() {
    let metadata = metadata();
    for package in &metadata.packages {
        assert_eq!(package.features.get("default"), Some(&Vec::new()), "{}", package.name);
        let forwarded = &package.features["cuda"];
        for below in ["canopy-kernels", "canopy-candle", "canopy-e2e", "candle-core"] {
            // A crate reaches what lies below through the workspace crate that it uses; candle-core it must switch itself.
            let nearest = match (package.name.as_str(), below) {
                ("canopy-e2e" | "canopy-bench", "canopy-kernels")
                | ("canopy-bench", "canopy-candle" | "candle-core") => continue,
                _ => dependencies(package).contains(below),
            };
            assert!(
                !nearest || forwarded.contains(&format!("{below}/cuda")),
                "{}: {below}/cuda",
                package.name
            );
        }
    }
    assert!(package(&metadata, "canopy-kernels").features["cuda"].contains(&"dep:cudarc".to_string()));
}

#[test]
fn the_lock_file_has_one_cudarc_and_one_candle() {
    let lock = include_str!("../../../Cargo.lock");
    for (name, exactly) in [("cudarc", "0.19.10"), ("candle-core", "0.11.1")] {
        let entry = format!("name = \"{name}\"\n");
        assert_eq!(lock.matches(&entry).count(), 1, "{name}");
        assert!(lock.contains(&format!("{entry}version = \"{exactly}\"\n")), "{name} {exactly}");
    }
}
