//! Times a few passes on an empty engine, so that `auto` starts with this machine's costs.

mod rounds;

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
/// Context rows the drafter is timed with.
const CONTEXT: usize = 8;

/// Most rows of one stream in a timed pass.
const TALLEST: usize = 128;

/// What is timed, and for how long.
struct Sizes {
    /// Rows of the timed passes of one stream.
    rows: &'static [usize],
    /// Rows of those of several streams, besides one row of each.
    shared: &'static [usize],
    /// Rows of passes of chains, for any number of streams; none where a chain costs what a tree costs.
    chains: &'static [usize],
    /// Sizes above are timed in the first sweep only.
    small: usize,
    /// Sweeps over all sizes; the fastest pass of each size counts. What disturbs the machine for a while thereby meets
    /// all sizes, and none of them in every sweep.
    sweeps: usize,
    /// Passes per size of a sweep.
    passes: usize,
    /// Nothing more is timed once this much time is spent.
    time: Duration,
    /// Numbers of streams of the timed passes.
    streams: &'static [usize],
    /// Numbers of rows behind which passes step up, see [`Tuner::with_streams`].
    steps: &'static [usize],
}

/// The CPU: passes of a millisecond whose every row costs, next to other programs.
const HOST: Sizes = Sizes {
    rows: &[1, 2, 3, 4, 5, 6, 7, 8, 12, 16, 32, 64],
    shared: &[],
    chains: &[],
    small: 16,
    sweeps: 4,
    passes: 2,
    time: Duration::from_millis(120),
    streams: &[1],
    steps: &[],
};
/// A device: passes of 6 to 30 milliseconds that read the weights once for many rows. The first pass of a size loads its
/// kernels, the second counts.
const DEVICE: Sizes = Sizes {
    rows: &[1, 2, 4, 8, 9, 16, 17, 24, 32, 33, 48, 64, 65, 96, 128],
    shared: &[8, 9, 16, 17, 32, 33, 64, 65, 128, 129, 256],
    chains: &[1, 2, 4, 8, 9, 16, 17, 32, 33, 64, 65, 128, 129, 256],
    small: usize::MAX,
    sweeps: 2,
    passes: 2,
    time: Duration::from_millis(1500),
    streams: &[1, 2, 4, 8, 16],
    steps: &[8, 16, 32, 64, 128, 256],
};

/// A tuner for this pair: measured when `measure`, of unknown scale otherwise. Slot 0 is used and left empty.
pub(super) fn tuner(
    target: &mut dyn Target,
    drafter: Option<&mut (dyn Drafter + 'static)>,
    measure: bool,
) -> Result<Tuner> {
    let block_size = drafter.as_ref().map_or(1, |drafter| drafter.block_size());
    let (mut verify, mut chains, mut draft, mut sizes) = (Vec::new(), Vec::new(), None, &HOST);
    if measure {
        sizes = sizes_for(target)?;
        let slots = target.slots();
        for &streams in sizes.streams.iter().filter(|&&streams| streams <= slots) {
            let points = time_verify(target, streams, sizes)?;
            let walked = time_chains(target, (streams, block_size), sizes)?;
            chains.extend(chain_curve(walked, &points).map(|curve| (streams, curve.rigid())));
            let curve = CostCurve::through(&points, VERIFY_PER_ROW);
            verify.extend(curve.map(|curve| (streams, curve)));
        }
    }
    if let Some(drafter) = drafter.filter(|_| measure) {
        draft = CostCurve::through(&time_draft(target, drafter, sizes)?, DRAFT_PER_LOAD);
    }
    let first = verify.first().map(|curve| curve.1.clone());
    let first = first.unwrap_or_else(|| CostCurve::shape(VERIFY_PER_ROW));
    let draft = draft.unwrap_or_else(|| CostCurve::shape(DRAFT_PER_LOAD));
    if sizes.steps.is_empty() {
        return Ok(Tuner::new(first, draft, block_size));
    }
    let verify = verify.into_iter().map(|(streams, curve)| (streams, curve.rigid())).collect();
    Ok(Tuner::new(first, draft.rigid(), block_size).with_streams(verify, sizes.steps).with_chains(chains))
}

/// What passes of chains cost: as measured, and beyond that as much less than trees as the largest ones.
fn chain_curve(mut chains: Vec<(usize, f64)>, trees: &[(usize, f64)]) -> Option<CostCurve> {
    let &(largest, seconds) = chains.last()?;
    let saved = CostCurve::through(trees, VERIFY_PER_ROW)?.predict(largest) - seconds;
    let beyond = trees.iter().filter(|(rows, _)| *rows > largest);
    chains.extend(beyond.map(|&(rows, of_trees)| (rows, (of_trees - saved).max(seconds))));
    CostCurve::through(&chains, VERIFY_PER_ROW)
}

/// By where the target computes.
fn sizes_for(target: &mut dyn Target) -> Result<&'static Sizes> {
    let verified = target.verify(&[pass(0, DraftTree::chain(1)?)])?;
    target.commit(&[Vec::new()])?;
    Ok(match verified.logits.is_some_and(|logits| !logits.device().is_cpu()) {
        true => &DEVICE,
        false => &HOST,
    })
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

fn pass(slot: usize, tree: DraftTree) -> VerifyStream {
    VerifyStream { slot, tokens: vec![0; tree.len()], tree, logits: LogitRows::All }
}

/// Waits until the device has computed `results` and what was asked of it before.
fn finish(results: &[Tensor]) -> Result<()> {
    results.iter().take(1).try_for_each(|result| Ok(result.device().synchronize()?))
}

/// Seconds of one pass over the first slots, its commit included; the slots are empty afterwards.
fn time_pass(target: &mut dyn Target, streams: &[VerifyStream]) -> Result<f64> {
    let pass = Instant::now();
    let verified = target.verify(streams)?;
    target.commit(&vec![vec![0]; streams.len()])?;
    finish(verified.logits.as_slice())?;
    let seconds = pass.elapsed().as_secs_f64();
    (0..streams.len()).try_for_each(|slot| target.reset(slot))?;
    Ok(seconds)
}

/// Passes of `streams` streams that share the rows.
fn time_verify(target: &mut dyn Target, streams: usize, sizes: &Sizes) -> Result<Vec<(usize, f64)>> {
    let most = streams * TALLEST.min(target.context_len() - 1);
    let timed = if streams == 1 { sizes.rows } else { sizes.shared };
    let mut rows: Vec<usize> = timed.iter().copied().chain([streams]).collect();
    rows.retain(|&rows| (streams..=most).contains(&rows));
    rows.sort_unstable();
    rows.dedup();
    sweep(rows, sizes, |rows| time_shared(target, rows, streams, comb))
}

/// Seconds of a pass of `rows` rows that `streams` streams share, each with a tree of its rows by `shape`.
fn time_shared(
    target: &mut dyn Target,
    rows: usize,
    streams: usize,
    shape: impl Fn(usize) -> Result<DraftTree>,
) -> Result<f64> {
    let share = |slot| rows / streams + usize::from(slot < rows % streams);
    let passes: Result<Vec<_>> = (0..streams).map(|slot| Ok(pass(slot, shape(share(slot))?))).collect();
    time_pass(target, &passes?)
}

/// Passes of chains of at most `block` rows of so many streams.
fn time_chains(
    target: &mut dyn Target,
    (streams, block): (usize, usize),
    sizes: &Sizes,
) -> Result<Vec<(usize, f64)>> {
    let most = streams * block.min(target.context_len() - 1);
    let rows = sizes.chains.iter().copied().filter(|rows| (streams..=most).contains(rows)).collect();
    sweep(rows, sizes, |rows| time_shared(target, rows, streams, |rows| Ok(DraftTree::chain(rows)?)))
}

/// Blocks of every length for one stream, and whole ones for several.
fn time_draft(
    target: &mut dyn Target,
    drafter: &mut dyn Drafter,
    sizes: &Sizes,
) -> Result<Vec<(usize, f64)>> {
    let context = CONTEXT.min(target.context_len() - 1).max(1);
    let most = sizes.streams.last().copied().unwrap_or(1);
    let (slots, block) = (target.slots().min(most), drafter.block_size());
    for slot in 0..slots {
        let streams = [pass(slot, DraftTree::chain(context)?)];
        if let Some(features) = target.verify(&streams)?.features {
            target.commit(&[(0..context).collect()])?;
            drafter.extend(slot, &features)?;
            finish(&[features])?;
        }
    }
    let mut calls: Vec<(usize, usize)> =
        block_lengths(block).into_iter().filter(|&rows| rows > 1).map(|rows| (rows, 1)).collect();
    let several = sizes.streams.iter().filter(|&&streams| streams > 1 && streams <= slots);
    calls.extend(several.map(|&streams| (block, streams)));
    let drafted = drafter.context_len(0) > 0;
    let seconds = sweep((0..if drafted { calls.len() } else { 0 }).collect(), sizes, |index| {
        let (rows, streams) = calls[index];
        let request = |slot| DraftRequest { slot, root: 0, horizon: rows - 1 };
        let requests: Vec<_> = (0..streams).map(request).collect();
        let call = Instant::now();
        finish(&drafter.draft_quickly(&requests, rows)?)?;
        Ok(call.elapsed().as_secs_f64())
    })?;
    for slot in 0..slots {
        drafter.reset(slot)?;
        target.reset(slot)?;
    }
    let load = |index: usize| calls[index].1 * draft_load(calls[index].0, calls[index].0 - 1);
    Ok(seconds.into_iter().map(|(index, seconds)| (load(index), seconds)).collect())
}

/// The fewest seconds of every size by `time`, rising; large sizes are left out when time runs out.
fn sweep(
    counts: Vec<usize>,
    sizes: &Sizes,
    mut time: impl FnMut(usize) -> Result<f64>,
) -> Result<Vec<(usize, f64)>> {
    let started = Instant::now();
    let mut points: Vec<(usize, f64)> = Vec::with_capacity(counts.len());
    for sweep in 0..sizes.sweeps {
        for (index, &size) in counts.iter().enumerate() {
            if (sweep > 0 && size > sizes.small) || (index > 0 || sweep > 0) && started.elapsed() > sizes.time
            {
                break;
            }
            for _ in 0..sizes.passes {
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

#[cfg(test)]
mod tests {
    use std::path::Path;

    use super::*;
    use crate::files::ModelFiles;
    use crate::loader::{LoadOptions, load_drafter, load_target};

    #[test]
    fn beyond_the_longest_chains_their_passes_cost_as_much_less_than_trees() {
        let trees = [(1, 5.0), (16, 6.0), (64, 7.0), (65, 9.0)];
        let curve = chain_curve(vec![(1, 5.0), (16, 5.75)], &trees).unwrap();
        for (rows, seconds) in [(1, 5.0), (16, 5.75), (64, 6.75), (65, 8.75)] {
            assert!((curve.predict(rows) - seconds).abs() < 1e-9, "{rows} rows: {}", curve.predict(rows));
        }
        assert!(chain_curve(Vec::new(), &trees).is_none());
    }

    #[test]
    fn a_devices_sizes_are_timed_for_several_streams_and_leave_every_slot_empty() {
        let files = |set: &str| {
            let dir = Path::new(env!("CARGO_MANIFEST_DIR")).join("tests/golden").join(set);
            ModelFiles::Directory(dir)
        };
        let options = LoadOptions { slots: 3, context_len: Some(49), ..LoadOptions::default() };
        let mut target = load_target(&files("qwen35-random"), &options).unwrap();
        let mut drafter = load_drafter(&files("dflash-random-new"), &mut target, &options).unwrap();
        let sizes = Sizes { sweeps: 1, passes: 1, time: Duration::MAX, ..DEVICE };
        let rising = |points: &[(usize, f64)]| points.windows(2).all(|pair| pair[0].0 < pair[1].0);
        let verify = time_verify(&mut target, 1, &sizes).unwrap();
        // As many rows as the context has room for.
        assert_eq!(
            verify.iter().map(|point| point.0).collect::<Vec<_>>(),
            [1, 2, 4, 8, 9, 16, 17, 24, 32, 33, 48]
        );
        let of_three = time_verify(&mut target, 3, &sizes).unwrap();
        assert_eq!(
            of_three.iter().map(|p| p.0).collect::<Vec<_>>(),
            [3, 8, 9, 16, 17, 32, 33, 64, 65, 128, 129]
        );
        let chains = time_chains(&mut target, (2, 8), &sizes).unwrap();
        assert_eq!(chains.iter().map(|point| point.0).collect::<Vec<_>>(), [2, 4, 8, 9, 16]);
        let draft = time_draft(&mut target, &mut drafter, &sizes).unwrap();
        // Blocks of 3, 4, 5, 6 and 8 rows for one stream, of 8 for two.
        assert_eq!(draft.iter().map(|point| point.0).collect::<Vec<_>>(), [5, 7, 9, 11, 15, 30]);
        assert!(rising(&draft) && draft.iter().chain(&verify).chain(&of_three).all(|point| point.1 > 0.0));
        let empty = (0..3).all(|slot| target.committed(slot) == 0 && drafter.context_len(slot) == 0);
        assert!(empty, "a slot is not empty");
    }
}
