//! The images of the contract's controls: every kernel compiled once more with faults inside, of which at most one is picked at a time.

use std::collections::HashMap;
use std::sync::{Arc, Mutex, OnceLock};

use cudarc::driver::CudaStream;

use super::{CONTROLS, Kernels, registry};
use crate::{Error, Result};

const OP: &str = "controls";
/// The faults' names and numbers: the enumerators of `canopy::Fault` in order.
const FAULTS: &str = include_str!("../../../include/canopy/fault.cuh");

/// The number of a fault in the kernels.
fn number(fault: &str) -> Result<i32> {
    let names = FAULTS.split_once("enum class Fault").and_then(|(_, rest)| rest.split_once('{'));
    let names = names.and_then(|(_, rest)| rest.split_once('}')).map_or("", |(names, _)| names);
    let lines = names.lines().map(|line| line.split("//").next().unwrap_or("").trim().trim_end_matches(','));
    let unknown = || {
        let expected = "a fault of include/canopy/fault.cuh".into();
        Error::Value { op: OP, arg: "fault", expected, got: fault.into() }
    };
    lines
        .filter(|line| !line.is_empty())
        .position(|name| name == fault)
        .map(|at| at as i32)
        .ok_or_else(unknown)
}

/// While it lives, launches on its context take the controls' images.
pub(crate) struct Planted {
    key: usize,
    sound: Arc<Kernels>,
}

impl Drop for Planted {
    fn drop(&mut self) {
        registry().lock().expect("no holder of this lock panics").insert(self.key, self.sound.clone());
    }
}

/// Picks a fault in the images whose names start with `images`, and none in the others.
///
/// # Errors
/// An unknown fault, no such image, or an error of the driver.
pub(crate) fn plant(stream: &Arc<CudaStream>, images: &str, fault: &str) -> Result<Planted> {
    static LOADED: OnceLock<Mutex<HashMap<usize, Arc<Kernels>>>> = OnceLock::new();
    let driver = |source| Error::Driver { op: OP, source };
    let number = number(fault)?;
    let context = stream.context();
    let (key, sound) = (context.cu_ctx() as usize, Kernels::on(context)?);
    let mut loaded = LOADED.get_or_init(Mutex::default).lock().expect("no holder of this lock panics");
    let kernels = match loaded.get(&key) {
        Some(kernels) => kernels.clone(),
        None => {
            let kernels = Arc::new(Kernels::load(context, sound.sm, CONTROLS)?);
            loaded.insert(key, kernels.clone());
            kernels
        }
    };
    let mut found = false;
    for (name, module) in &kernels.modules {
        let own = name.starts_with(images);
        found |= own;
        let mut variable = module.get_global("canopy_fault", stream).map_err(driver)?;
        let value = if own { number } else { 0 };
        stream.memcpy_htod(&value.to_ne_bytes(), &mut variable).map_err(driver)?;
    }
    if !found {
        let expected = "the start of an image's name".into();
        return Err(Error::Value { op: OP, arg: "images", expected, got: images.into() });
    }
    stream.synchronize().map_err(driver)?;
    registry().lock().expect("no holder of this lock panics").insert(key, kernels);
    Ok(Planted { key, sound })
}

#[cfg(test)]
mod tests {
    use super::number;

    #[test]
    fn faults_are_numbered_as_in_the_header() {
        assert_eq!(number("none"), Ok(0));
        assert!(number("half_sum").unwrap() > 0);
        assert!(number("no_such_fault").unwrap_err().to_string().contains("no_such_fault"));
    }
}
