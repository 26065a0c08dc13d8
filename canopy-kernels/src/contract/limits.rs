//! Gate 5: what ptxas gave every CUDA entry point (`resources.tsv`, written by `tools/kernel_resources.py`) against what its target has.

use std::collections::BTreeMap;

use super::{Control, Device, Fault, Gate, Line};

/// The checked-in record.
const RECORD: &str = include_str!("../../resources.tsv");

/// Registers of a thread, and of a multiprocessor, on every target.
const REGISTERS: usize = 255;
const REGISTER_FILE: usize = 65_536;

/// Kilobytes of shared memory that a CTA may have by compute capability (CUDA programming guide, technical specifications).
fn shared_limit(sm: usize) -> Option<usize> {
    let kib = match sm {
        80 | 87 => 163,
        86 | 89 | 120 | 121 => 99,
        90 | 100 | 103 => 227,
        _ => return None,
    };
    Some(1024 * kib)
}

/// Most bytes that a thread may spill.
const SPILLED: usize = 256;

/// One row of the record.
#[derive(Clone, Debug, PartialEq)]
struct Image {
    kernel: String,
    sm: usize,
    registers: usize,
    /// Bytes of static shared memory a CTA.
    shared: usize,
    /// Bytes of spilled stores a thread.
    spilled: usize,
    /// Threads of a CTA by its launch bounds; 0 where the record has none.
    threads: usize,
}

impl Image {
    fn read(line: &str) -> Result<Self, String> {
        let fields = line.split('\t').collect::<Vec<_>>();
        let number = |at: usize| match fields.get(at).map(|field| field.parse()) {
            Some(Ok(number)) => Ok(number),
            _ => Err(format!("column {at} of the record's row {line:?} is no number")),
        };
        Ok(Self {
            kernel: fields[0].into(),
            sm: number(1)?,
            registers: number(2)?,
            shared: number(3)?,
            spilled: number(5)?,
            threads: if fields.len() > 7 { number(7)? } else { 0 },
        })
    }

    fn check(&self) -> Result<(), String> {
        let Self { sm, registers, shared, spilled, threads, .. } = *self;
        let limit = shared_limit(sm).ok_or_else(|| format!("sm_{sm}: its limits are not known"))?;
        let within = |what: &str, got: usize, most: usize| match got > most {
            true => Err(format!("sm_{sm}: {got} {what}, at most {most}")),
            false => Ok(()),
        };
        within("registers a thread", registers, REGISTERS)?;
        within(
            "registers a CTA",
            registers.next_multiple_of(8) * threads.next_multiple_of(32),
            REGISTER_FILE,
        )?;
        within("bytes of static shared memory", shared, limit)?;
        within("bytes spilled", spilled, SPILLED)
    }
}

/// A kernel's images on all targets: green with the most of each resource, or the first that is over a limit.
fn check(images: &[Image]) -> Result<String, String> {
    images.iter().try_for_each(Image::check)?;
    let most = |of: fn(&Image) -> usize| images.iter().map(of).max().unwrap_or(0);
    let (registers, shared) = (most(|image| image.registers), most(|image| image.shared));
    let spilled = most(|image| image.spilled);
    Ok(format!("{} targets, {registers} registers, {shared} bytes shared, {spilled} spilled", images.len()))
}

/// The record's rows by kernel.
fn record() -> Result<BTreeMap<String, Vec<Image>>, String> {
    let mut kernels = BTreeMap::<String, Vec<Image>>::new();
    for line in RECORD.lines().skip(1).filter(|line| !line.is_empty()) {
        let image = Image::read(line)?;
        kernels.entry(image.kernel.clone()).or_default().push(image);
    }
    Ok(kernels)
}

/// A line for every entry point that contains `filter`, and one control: a row over its target's shared memory.
pub(super) fn run(filter: &str, mut report: impl FnMut(Line)) {
    let mut line = |kernel: &str, control, outcome| {
        report(Line {
            device: Device::Cuda,
            kernel: kernel.into(),
            gate: Gate::Limits,
            control,
            outcome,
            seconds: 0.0,
        });
    };
    let kernels = match record() {
        Ok(kernels) => kernels,
        Err(error) => return line("resources.tsv", None, Err(error)),
    };
    for (kernel, images) in kernels.iter().filter(|(kernel, _)| kernel.contains(filter)) {
        line(kernel, None, check(images));
    }
    let Some((kernel, images)) = kernels.iter().find(|(kernel, _)| kernel.contains(filter)) else { return };
    for fault in Gate::Limits.faults() {
        let mut images = images.clone();
        match fault {
            Fault::OverLimit => {
                images.iter_mut().filter(|image| image.sm == 120).for_each(|x| x.shared = 99 * 1024 + 1)
            }
            _ => images.iter_mut().for_each(|image| image.spilled = SPILLED + 1),
        }
        line(kernel, Some(Control::Outside(*fault)), check(&images));
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn every_recorded_kernel_is_within_its_targets() {
        let kernels = record().unwrap();
        assert!(kernels.len() > 50);
        for (kernel, images) in kernels {
            check(&images).unwrap_or_else(|error| panic!("{kernel}: {error}"));
        }
    }

    #[test]
    fn a_row_over_a_limit_is_named() {
        let image =
            Image { kernel: "k".into(), sm: 120, registers: 128, shared: 0, spilled: 0, threads: 512 };
        for (image, what) in [
            (Image { shared: 101_377, ..image.clone() }, "shared memory"),
            (Image { registers: 256, ..image.clone() }, "registers a thread"),
            (Image { registers: 136, ..image.clone() }, "registers a CTA"),
            (Image { spilled: 300, ..image.clone() }, "spilled"),
            (Image { sm: 75, ..image.clone() }, "not known"),
        ] {
            let error = check(&[image]).unwrap_err();
            assert!(error.contains(what), "{error}");
        }
        assert!(check(&[image]).is_ok());
        assert!(Image::read("kernel\t80\tmany\t0\t0\t0\t0").is_err());
    }
}
