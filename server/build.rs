//! Files that are added to the page's folder have to be embedded too.

fn main() {
    println!("cargo::rerun-if-changed=static");
}
