//! The kernel contract: what every kernel must show before a number of it counts, and the proof that each check can
//! fail.
//!
//! | gate | shows | faults around a kernel that must turn it red |
//! |---|---|---|
//! | nonfinite | a NaN or an infinity in any input reaches what it reaches in float64, and nothing else | swallowed, leaked |
//! | repeat | five runs byte-identical, every output written, inputs and what lies around outputs untouched | drift, gap, overrun |
//! | shapes | every tile edge, tree kind, context and batch within the bound of the float64 oracle | off by one, tile edge |
//! | sums | inputs on which a 16-bit accumulator is wrong by orders of magnitude stay within the bound | half sum |
//! | invariant | a sequence's bits are its own: alone, in batches of 2 to 16, in any slot, in every variant that may be picked instead, on CUDA also on few of the device's multiprocessors | company |
//! | limits | registers, shared memory and spills of every CUDA entry point within its target's, from the checked-in record | over limit, spill |
//!
//! A control is the same gate on the same kernel with a fault planted; one that stays green fails the suite. A gate
//! that has nothing to test in a kernel (a copy has no sum) is not listed for it.
//!
//! CPU kernels run in every build, CUDA kernels with feature `cuda` where there is a device. With feature `controls` the CUDA sources are
//! compiled once more with faults inside (`include/canopy/fault.cuh`; nothing of it is left in the kernels that serve); the suite picks one
//! at a time, and such an image must pass its gates as long as none is picked.

#[cfg_attr(not(feature = "cuda"), allow(dead_code, reason = "some bounds are those of CUDA kernels alone"))]
mod bound;
#[cfg(feature = "cuda")]
mod cuda;
mod fault;
mod gates;
mod limits;
mod report;
mod scene;
mod subjects;
#[cfg(test)]
mod tests;

pub use fault::{Control, Fault};
pub use report::Sum;

use gates::Check;
use subjects::Subject;

/// Where a kernel runs.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Device {
    /// On the CPU.
    Cpu,
    /// On a CUDA device.
    Cuda,
}

impl Device {
    /// The name in reports.
    pub fn name(self) -> &'static str {
        match self {
            Self::Cpu => "cpu",
            Self::Cuda => "cuda",
        }
    }
}

/// One of the six questions.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Gate {
    /// NaN and infinities stay where float64 has them.
    Nonfinite,
    /// The same call gives the same bytes and touches its outputs only.
    Repeat,
    /// Every shape is within the bound.
    Shapes,
    /// Accumulation is in f32.
    Sums,
    /// Bits do not depend on company.
    Invariant,
    /// CUDA resources.
    Limits,
}

impl Gate {
    /// The gates that run a kernel.
    pub const RUNNING: [Self; 5] = [Self::Nonfinite, Self::Repeat, Self::Shapes, Self::Sums, Self::Invariant];

    /// The name in reports.
    pub fn name(self) -> &'static str {
        match self {
            Self::Nonfinite => "nonfinite",
            Self::Repeat => "repeat",
            Self::Shapes => "shapes",
            Self::Sums => "sums",
            Self::Invariant => "invariant",
            Self::Limits => "limits",
        }
    }

    fn faults(self) -> &'static [Fault] {
        match self {
            Self::Nonfinite => &[Fault::Swallowed, Fault::Leaked],
            Self::Repeat => &[Fault::Drift, Fault::Gap, Fault::Overrun],
            Self::Shapes => &[Fault::OffByOne, Fault::TileEdge],
            Self::Sums => &[Fault::HalfSum],
            Self::Invariant => &[Fault::Company],
            Self::Limits => &[Fault::OverLimit, Fault::Spill],
        }
    }

    fn check(self) -> Check {
        match self {
            Self::Nonfinite => gates::nonfinite,
            Self::Repeat => gates::repeat,
            Self::Shapes => gates::shapes,
            Self::Sums => gates::sums,
            Self::Invariant => gates::invariant,
            Self::Limits => |_, _| Err("reads the record, runs nothing".into()),
        }
    }

    /// The controls of this gate on a kernel: those around it, then those inside.
    fn controls(self, subject: &dyn Subject) -> Vec<Control> {
        let outside =
            self.faults().iter().filter(|fault| fault.fits(subject)).map(|&fault| Control::Outside(fault));
        let inside: Vec<_> = subject
            .planted()
            .iter()
            .filter(|(gate, _)| *gate == self)
            .map(|(_, name)| Control::Inside(name))
            .collect();
        let sound = (!inside.is_empty()).then_some(Control::Inside(fault::NONE));
        outside.chain(sound).chain(inside).collect()
    }
}

/// One line of the report: a gate on a kernel, or a control of it.
#[derive(Clone, Debug)]
pub struct Line {
    /// Where it ran.
    pub device: Device,
    /// Which kernel.
    pub kernel: String,
    /// Which gate.
    pub gate: Gate,
    /// The planted fault, for a control.
    pub control: Option<Control>,
    /// What the gate said: `Ok` is green, with what it covered; `Err` is red, with the first thing wrong.
    pub outcome: Result<String, String>,
    /// Seconds that it took.
    pub seconds: f64,
}

impl Line {
    /// A gate should be green, a control red.
    pub fn as_it_should_be(&self) -> bool {
        self.outcome.is_ok() != self.control.is_some_and(Control::breaks)
    }
}

/// What to run.
#[derive(Clone, Debug, Default)]
pub struct Choice {
    /// Part of a kernel's name; empty for all.
    pub filter: String,
    /// The CUDA device's number, to run the CUDA kernels too.
    pub cuda: Option<usize>,
    /// Leave the CPU kernels out.
    pub no_cpu: bool,
    /// This gate alone.
    pub gate: Option<Gate>,
}

impl Choice {
    fn subjects(&self) -> Result<Vec<Box<dyn Subject>>, String> {
        let mut all = if self.no_cpu { Vec::new() } else { subjects::all() };
        if let Some(device) = self.cuda {
            all.extend(cuda_subjects(device)?);
        }
        Ok(all)
    }
}

#[cfg(feature = "cuda")]
fn cuda_subjects(device: usize) -> Result<Vec<Box<dyn Subject>>, String> {
    cuda::all(device)
}

#[cfg(not(feature = "cuda"))]
fn cuda_subjects(_: usize) -> Result<Vec<Box<dyn Subject>>, String> {
    Err("this build has no CUDA kernels (feature cuda)".into())
}

/// The kernels' names, whatever the filter.
///
/// # Errors
/// When a CUDA device is asked for and there is none, or this build has no CUDA kernels.
pub fn kernels(choice: &Choice) -> Result<Vec<String>, String> {
    Ok(choice.subjects()?.iter().map(|subject| subject.name()).collect())
}

/// Runs every gate with its controls on every kernel that the choice names, handing out each line as it is done; the limits of the CUDA
/// entry points are read from the record in every build.
///
/// # Errors
/// As [`kernels`].
pub fn run(choice: &Choice, mut report: impl FnMut(Line)) -> Result<(), String> {
    for subject in choice.subjects()?.iter().filter(|subject| subject.name().contains(&choice.filter)) {
        for gate in Gate::RUNNING {
            let left_out = choice.gate.is_some_and(|only| only != gate);
            if left_out || gate == Gate::Sums && subject.sums().is_none() {
                continue;
            }
            for control in std::iter::once(None).chain(gate.controls(&**subject).into_iter().map(Some)) {
                let start = std::time::Instant::now();
                let outcome = gate.check()(&**subject, control);
                let (device, kernel, seconds) =
                    (subject.device(), subject.name(), start.elapsed().as_secs_f64());
                report(Line { device, kernel, gate, control, outcome, seconds });
            }
        }
    }
    if choice.gate.is_none_or(|only| only == Gate::Limits) {
        limits::run(&choice.filter, report);
    }
    Ok(())
}
