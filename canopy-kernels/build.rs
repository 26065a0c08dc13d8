//! Nothing to build without the feature `cuda`.

fn main() {
    println!("cargo::rerun-if-changed=build.rs");
}
