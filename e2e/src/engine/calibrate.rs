//! Times a few passes on an empty engine, so that `auto` starts with this machine's costs.

use std::time::{Duration, Instant};

use candle_core::Tensor;
use canopy_kernels::DraftTree;

use super::CostCurve;
use super::auto::{Tuner, block_lengths, draft_load};
use crate::Result;
use crate::draft::{DraftRequest, Drafter};
use crate::target::{LogitRows, Target, VerifyStream};

/// Cost of one more row relative to the first, where nothing else is known.
const VERIFY_PER_ROW: f64 = 0.05;
/// Cost of one more unit of draft load relative to the first.
const DRAFT_PER_LOAD: f64 = 0.02;
/// Rows of the timed passes.
const ROWS: [usize; 12] = [1, 2, 3, 4, 5, 6, 7, 8, 12, 16, 32, 64];
/// Sizes above are timed in the first sweep only.
const SMALL: usize = 16;
/// Nothing more is timed once this much time is spent.
const TIME: Duration = Duration::from_millis(120);
/// Sweeps over all sizes; the fastest pass of each size counts. What disturbs the machine for a while thereby meets all
/// sizes, and none of them in every sweep.
const SWEEPS: usize = 4;
/// Passes per size of a sweep.
const PASSES: usize = 2;
/// Context rows the drafter is timed with.
const CONTEXT: usize = 8;

/// A tuner for this pair: measured when `measure`, of unknown scale otherwise. Slot 0 is used and left empty.
pub(super) fn tuner(
    target: &mut dyn Target,
    drafter: Option<&mut (dyn Drafter + 'static)>,
    measure: bool,
) -> Result<Tuner> {
    let block_size = drafter.as_ref().map_or(1, |drafter| drafter.block_size());
    let (mut verify, mut draft) = (None, None);
    if measure {
        verify = CostCurve::through(&time_verify(target)?, VERIFY_PER_ROW);
    }
    if let Some(drafter) = drafter.filter(|_| measure) {
        draft = CostCurve::through(&time_draft(target, drafter)?, DRAFT_PER_LOAD);
    }
    let verify = verify.unwrap_or_else(|| CostCurve::shape(VERIFY_PER_ROW));
    let draft = draft.unwrap_or_else(|| CostCurve::shape(DRAFT_PER_LOAD));
    Ok(Tuner::new(verify, draft, block_size))
}

/// A tree like the builders': a spine whose nodes each have a leaf beside them.
fn comb(nodes: usize) -> Result<DraftTree> {
    let parent = |node: usize| match node {
        0 => -1,
        1 => 0,
        _ => (node as i32 - 2) / 2 * 2,
    };
    Ok(DraftTree::new((0..nodes).map(parent).collect())?)
}

fn pass(tree: DraftTree) -> [VerifyStream; 1] {
    [VerifyStream { slot: 0, tokens: vec![0; tree.len()], tree, logits: LogitRows::All }]
}

/// Waits until the device has computed `results` and what was asked of it before.
fn finish(results: &[Tensor]) -> Result<()> {
    results.iter().take(1).try_for_each(|result| Ok(result.device().synchronize()?))
}

fn time_verify(target: &mut dyn Target) -> Result<Vec<(usize, f64)>> {
    let context = target.context_len();
    let sizes = ROWS.into_iter().filter(|&rows| rows < context).collect();
    sweep(sizes, SMALL, |rows| {
        let streams = pass(comb(rows)?);
        let pass = Instant::now();
        let verified = target.verify(&streams)?;
        target.commit(&[vec![0]])?;
        finish(verified.logits.as_slice())?;
        let seconds = pass.elapsed().as_secs_f64();
        target.reset(0)?;
        Ok(seconds)
    })
}

fn time_draft(target: &mut dyn Target, drafter: &mut dyn Drafter) -> Result<Vec<(usize, f64)>> {
    let context = CONTEXT.min(target.context_len() - 1).max(1);
    let streams = pass(DraftTree::chain(context)?);
    let mut points = Vec::new();
    if let Some(features) = target.verify(&streams)?.features {
        target.commit(&[(0..context).collect()])?;
        drafter.extend(0, &features)?;
        finish(&[features])?;
        let sizes: Vec<_> =
            block_lengths(drafter.block_size()).into_iter().filter(|&rows| rows > 1).collect();
        let seconds = sweep(sizes, usize::MAX, |rows| {
            let call = Instant::now();
            finish(&drafter.draft_quickly(&[DraftRequest { slot: 0, root: 0, horizon: rows - 1 }], rows)?)?;
            Ok(call.elapsed().as_secs_f64())
        })?;
        points = seconds.into_iter().map(|(rows, seconds)| (draft_load(rows, rows - 1), seconds)).collect();
    }
    drafter.reset(0)?;
    target.reset(0)?;
    Ok(points)
}

/// The fewest seconds of every size by `time`, rising; large sizes are left out when time runs out.
fn sweep(
    sizes: Vec<usize>,
    small: usize,
    mut time: impl FnMut(usize) -> Result<f64>,
) -> Result<Vec<(usize, f64)>> {
    let started = Instant::now();
    let mut points: Vec<(usize, f64)> = Vec::with_capacity(sizes.len());
    for sweep in 0..SWEEPS {
        for (index, &size) in sizes.iter().enumerate() {
            if (sweep > 0 && size > small) || (index > 0 || sweep > 0) && started.elapsed() > TIME {
                break;
            }
            for _ in 0..PASSES {
                let seconds = time(size)?;
                match points.get_mut(index) {
                    Some((_, fewest)) => *fewest = fewest.min(seconds),
                    None => points.push((size, seconds)),
                }
            }
        }
    }
    Ok(points)
}
