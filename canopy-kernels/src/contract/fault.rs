//! Faults to plant, so that a gate shows it can fail.

use super::gates::POISON;
use super::scene::Scene;
use super::subjects::Subject;

/// One planted fault.
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
        }
    }

    /// Whether the kernel has what the fault breaks.
    pub(super) fn fits(self, subject: &dyn Subject) -> bool {
        self != Self::OffByOne || subject.has_mask()
    }
}

/// Runs the kernel with a fault planted. `out` lies inside `buffer` at `out`; `run` counts from 0.
pub(super) fn run(
    subject: &dyn Subject,
    scene: &Scene,
    fault: Option<Fault>,
    index: usize,
    buffer: &mut [f32],
    out: std::ops::Range<usize>,
) -> crate::Result<()> {
    match fault {
        Some(Fault::OffByOne) => subject.run(&scene.off_by_one()?, &mut buffer[out.clone()])?,
        Some(Fault::HalfSum) => subject.half_sum(scene, &mut buffer[out.clone()]),
        _ => subject.run(scene, &mut buffer[out.clone()])?,
    }
    let end = out.end;
    let values = &mut buffer[out];
    match fault {
        Some(Fault::Swallowed) => values.iter_mut().filter(|x| !x.is_finite()).for_each(|x| *x = 0.0),
        Some(Fault::Leaked) if values.iter().any(|x| !x.is_finite()) => values.fill(f32::NAN),
        Some(Fault::Drift) if index == 2 => values[0] = f32::from_bits(values[0].to_bits() ^ 1),
        Some(Fault::Gap) => values[values.len() - 1] = f32::from_bits(POISON),
        Some(Fault::TileEdge) if scene.batch.rows() % 16 == 1 => {
            let row = values.len() - subject.row_len(scene);
            values[row..].fill(0.0);
        }
        Some(Fault::Overrun) => buffer[end] = 0.0,
        _ => {}
    }
    Ok(())
}
