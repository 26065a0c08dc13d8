//! Faults to plant, so that a gate shows it can fail.

use super::Device;
use super::gates::POISON;
use super::scene::Scene;
use super::subjects::Subject;

/// A planted fault.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Control {
    /// In what a sound kernel read or left.
    Outside(Fault),
    /// In a kernel compiled for the controls, by its name there (`include/canopy/fault.cuh`).
    Inside(&'static str),
}

/// The name of an inside control that plants nothing: the controls' images must pass the gates without a fault.
pub(super) const NONE: &str = "none";

impl Control {
    /// The name in reports.
    pub fn name(self) -> &'static str {
        match self {
            Self::Outside(fault) => fault.name(),
            Self::Inside(name) => name,
        }
    }

    /// Whether the gate must turn red.
    pub fn breaks(self) -> bool {
        self != Self::Inside(NONE)
    }
}

/// One fault that is planted around a kernel.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Fault {
    /// Non-finite outputs become 0.
    Swallowed,
    /// One non-finite output spreads to all, as a mask made of products would do.
    Leaked,
    /// The third of five runs differs by one unit in the last place.
    Drift,
    /// The last output is never written.
    Gap,
    /// One value is written past the outputs.
    Overrun,
    /// Every node hangs on the node before its parent, every length is one short.
    OffByOne,
    /// The last row is lost when it starts a new tile.
    TileEdge,
    /// Sums are kept in bfloat16.
    HalfSum,
    /// In a batch the first output differs by one unit in the last place.
    Company,
    /// A recorded kernel takes a byte more shared memory than sm_120 has.
    OverLimit,
    /// A recorded kernel spills.
    Spill,
}

impl Fault {
    /// The name in reports.
    pub fn name(self) -> &'static str {
        match self {
            Self::Swallowed => "swallowed",
            Self::Leaked => "leaked",
            Self::Drift => "drift",
            Self::Gap => "gap",
            Self::Overrun => "overrun",
            Self::OffByOne => "off-by-one",
            Self::TileEdge => "tile-edge",
            Self::HalfSum => "half-sum",
            Self::Company => "company",
            Self::OverLimit => "over-limit",
            Self::Spill => "spill",
        }
    }

    /// Whether the kernel has what the fault breaks. What a half sum gives is worked out for the CPU's kernels; CUDA's have one inside.
    pub(super) fn fits(self, subject: &dyn Subject) -> bool {
        match self {
            Self::OffByOne => subject.has_mask(),
            Self::HalfSum => subject.device() == Device::Cpu,
            _ => true,
        }
    }
}

/// Runs the kernel with a fault planted. `out` lies inside `buffer` at `out`; `run` counts from 0.
pub(super) fn run(
    subject: &dyn Subject,
    scene: &Scene,
    control: Option<Control>,
    index: usize,
    buffer: &mut [f32],
    out: std::ops::Range<usize>,
) -> crate::Result<()> {
    let fault = match control {
        Some(Control::Inside(name)) => return subject.run_planted(name, scene, &mut buffer[out]),
        Some(Control::Outside(fault)) => Some(fault),
        None => None,
    };
    match fault {
        Some(Fault::OffByOne) => subject.run(&scene.off_by_one()?, &mut buffer[out.clone()])?,
        Some(Fault::HalfSum) => subject.half_sum(scene, &mut buffer[out.clone()]),
        _ => subject.run(scene, &mut buffer[out.clone()])?,
    }
    let end = out.end;
    let values = &mut buffer[out];
    let flip = |x: &mut f32| *x = f32::from_bits(x.to_bits() ^ 1);
    match fault {
        Some(Fault::Swallowed) => values.iter_mut().filter(|x| !x.is_finite()).for_each(|x| *x = 0.0),
        Some(Fault::Leaked) if values.iter().any(|x| !x.is_finite()) => values.fill(f32::NAN),
        Some(Fault::Drift) if index == 2 => flip(&mut values[0]),
        Some(Fault::Company) if scene.batch.sequences() > 1 => flip(&mut values[0]),
        Some(Fault::Gap) => values[values.len() - 1] = f32::from_bits(POISON),
        Some(Fault::TileEdge) if scene.batch.rows() % 16 == 1 => {
            let width = subject.planes(scene).last().map_or(0, |plane| plane.width);
            let row = values.len() - width;
            values[row..].fill(0.0);
        }
        Some(Fault::Overrun) => buffer[end] = 0.0,
        _ => {}
    }
    Ok(())
}
