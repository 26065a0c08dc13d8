//! The kernel contract: what every kernel must show before a number of it counts, and the proof that each check can
//! fail.
//!
//! | gate | shows | planted faults that must turn it red |
//! |---|---|---|
//! | nonfinite | a NaN or an infinity in any input reaches what it reaches in float64, and nothing else | swallowed, leaked |
//! | repeat | five runs byte-identical, every output written, nothing around outputs touched | drift, gap, overrun |
//! | shapes | every tile edge, tree kind, context and batch within the bound of the float64 oracle | off by one, tile edge |
//! | sums | inputs on which a 16-bit accumulator is wrong by orders of magnitude stay within the bound | half sum |
//! | limits | registers, shared memory and spills of CUDA entry points; needs nvcc, so the CPU suite only names it | - |
//!
//! A control is the same gate on the same kernel with the fault planted; one that stays green fails the suite. A gate
//! that has nothing to test in a kernel (a copy has no sum) is not listed for it.

mod fault;
mod gates;
mod scene;
mod subjects;
#[cfg(test)]
mod tests;

pub use fault::Fault;

use gates::Check;

/// One of the five questions.
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
    /// CUDA resources.
    Limits,
}

impl Gate {
    /// The gates that run on a CPU.
    pub const CPU: [Self; 4] = [Self::Nonfinite, Self::Repeat, Self::Shapes, Self::Sums];

    /// The name in reports.
    pub fn name(self) -> &'static str {
        match self {
            Self::Nonfinite => "nonfinite",
            Self::Repeat => "repeat",
            Self::Shapes => "shapes",
            Self::Sums => "sums",
            Self::Limits => "limits",
        }
    }

    fn faults(self) -> &'static [Fault] {
        match self {
            Self::Nonfinite => &[Fault::Swallowed, Fault::Leaked],
            Self::Repeat => &[Fault::Drift, Fault::Gap, Fault::Overrun],
            Self::Shapes => &[Fault::OffByOne, Fault::TileEdge],
            Self::Sums => &[Fault::HalfSum],
            Self::Limits => &[],
        }
    }

    fn check(self) -> Check {
        match self {
            Self::Nonfinite => gates::nonfinite,
            Self::Repeat => gates::repeat,
            Self::Shapes => gates::shapes,
            Self::Sums => gates::sums,
            Self::Limits => |_, _| Err("needs nvcc".into()),
        }
    }
}

/// One line of the report: a gate on a kernel, or a control of it.
#[derive(Clone, Debug)]
pub struct Line {
    /// Which kernel.
    pub kernel: String,
    /// Which gate.
    pub gate: Gate,
    /// The planted fault, for a control.
    pub control: Option<Fault>,
    /// What the gate said: `Ok` is green, with what it covered; `Err` is red, with the first thing wrong.
    pub outcome: Result<String, String>,
}

impl Line {
    /// A gate should be green, a control red.
    pub fn as_it_should_be(&self) -> bool {
        self.outcome.is_ok() == self.control.is_none()
    }
}

/// The kernels' names.
pub fn kernels() -> Vec<String> {
    subjects::all().iter().map(|subject| subject.name()).collect()
}

/// Runs gates 1 to 4 with their controls on every kernel whose name contains `filter`, handing out each line as it is
/// done.
pub fn run(filter: &str, mut report: impl FnMut(Line)) {
    for subject in subjects::all().iter().filter(|subject| subject.name().contains(filter)) {
        for gate in Gate::CPU {
            if gate == Gate::Sums && subject.sums().is_none() {
                continue;
            }
            let faults = gate.faults().iter().copied().filter(|fault| fault.fits(&**subject));
            for control in std::iter::once(None).chain(faults.map(Some)) {
                let outcome = gate.check()(&**subject, control);
                report(Line { kernel: subject.name(), gate, control, outcome });
            }
        }
    }
}
