//! CPU forward: checks, one task per sequence and value head, the two variants.

use rayon::prelude::*;

use super::{Tape, Variant, VerifyInput, VerifyOutput};
use crate::error::{Result, expect_len};
use crate::numeric::{Kernel, dispatch};
use crate::{AcceptedPaths, DraftTree, GdnDims, TreeBatch};

mod unit;
mod walk;

use unit::UnitRows;

const VERIFY: &str = "tree_gdn verify";
const COMMIT: &str = "tree_gdn commit";

/// Multiply-adds below which one thread does the whole call.
const PARALLEL_FROM: usize = 1 << 19;

/// Verifies every tree of `batch`; reads the state pool and leaves it as it is. A padding sequence's rows become
/// zero.
///
/// # Errors
/// [`crate::Error::Shape`] or [`crate::Error::Value`] naming the argument whose size does not fit.
pub fn verify(
    dims: GdnDims,
    batch: &TreeBatch,
    variant: Variant,
    input: VerifyInput<'_>,
    output: VerifyOutput<'_>,
) -> Result<()> {
    check_verify(dims, batch, &input, &output)?;
    if variant != Variant::Walk {
        let wanted = format!("{variant:?}");
        return Err(crate::Error::Unsupported { op: VERIFY, wanted, built: "walk" });
    }
    let parallel = batch.rows() * dims.state_len() >= PARALLEL_FROM;
    let live = batch.iter().filter(|(_, _, slot)| slot.is_some());
    let rows = live.flat_map(|(first, tree, _)| first..first + tree.len());
    let units = UnitRows::new(dims, input.qkv, rows);
    cumulate(dims, batch, input.gates, output.g_cum);

    let mut o_heads = split_heads(dims, batch, output.o);
    let mut u_heads = split_heads(dims, batch, output.u);
    let mut tasks = Vec::new();
    for (first, tree, slot) in batch.iter().collect::<Vec<_>>().into_iter().rev() {
        for v_head in (0..dims.v_heads).rev() {
            let (mut o, mut u) = (o_heads.pop().unwrap_or_default(), u_heads.pop().unwrap_or_default());
            let Some(slot) = slot else {
                o.iter_mut().chain(&mut u).for_each(|row| row.fill(0.0));
                continue;
            };
            let state =
                &input.state[slot * dims.state_len()..][v_head * dims.dv * dims.dk..][..dims.dv * dims.dk];
            let head = Head { dims, first, tree, v_head, qkv: input.qkv, gates: input.gates, units: &units };
            tasks.push(HeadVerify { head, state, o, u });
        }
    }
    run_all(tasks, parallel);
    Ok(())
}

/// Commits the accepted paths into the state pool `[slots, Hv, Dv, Dk]`, in place: Walk replays the paths with the
/// taped pseudo-values, Solve evaluates the closed form.
///
/// # Errors
/// [`crate::Error::Shape`] or [`crate::Error::Value`] naming the argument whose size does not fit.
pub fn commit(
    dims: GdnDims,
    paths: &AcceptedPaths,
    variant: Variant,
    tape: Tape<'_>,
    state: &mut [f32],
) -> Result<()> {
    check_commit(dims, paths, &tape, state)?;
    if variant != Variant::Walk {
        let wanted = format!("{variant:?}");
        return Err(crate::Error::Unsupported { op: COMMIT, wanted, built: "walk" });
    }
    let parallel = paths.rows().len() * dims.state_len() >= PARALLEL_FROM;
    let live = paths.iter().flat_map(|(_, _, rows)| rows.iter().map(|&row| row as usize));
    let units = UnitRows::new(dims, tape.qkv, live);
    let mut by_slot: Vec<(usize, &[i32])> = paths.iter().map(|(_, slot, rows)| (slot, rows)).collect();
    by_slot.sort_by_key(|&(slot, _)| slot);
    let mut tasks = Vec::new();
    let (mut rest, mut at) = (state, 0);
    for (slot, rows) in by_slot {
        let (_, tail) = rest.split_at_mut((slot - at) * dims.state_len());
        let (own, tail) = tail.split_at_mut(dims.state_len());
        (rest, at) = (tail, slot + 1);
        for (v_head, state) in own.chunks_exact_mut(dims.dv * dims.dk).enumerate() {
            tasks.push(HeadCommit { dims, v_head, rows, tape, units: &units, state });
        }
    }
    run_all(tasks, parallel);
    Ok(())
}

/// What one value head of one sequence reads.
#[derive(Clone, Copy)]
struct Head<'a> {
    dims: GdnDims,
    first: usize,
    tree: &'a DraftTree,
    v_head: usize,
    qkv: &'a [f32],
    gates: &'a [f32],
    units: &'a UnitRows,
}

impl<'a> Head<'a> {
    /// A node's value row, `[Dv]`.
    #[inline(always)]
    fn v(&self, node: usize) -> &'a [f32] {
        let dims = self.dims;
        let start =
            (self.first + node) * dims.qkv_width() + 2 * dims.k_heads * dims.dk + self.v_head * dims.dv;
        &self.qkv[start..start + dims.dv]
    }
}

/// Log gate and write strength of one packed row.
fn gate(dims: GdnDims, gates: &[f32], row: usize, v_head: usize) -> (f32, f32) {
    let at = row * 2 * dims.v_heads + v_head;
    (gates[at], gates[at + dims.v_heads])
}

struct HeadVerify<'a> {
    head: Head<'a>,
    state: &'a [f32],
    o: Vec<&'a mut [f32]>,
    u: Vec<&'a mut [f32]>,
}

impl Kernel for HeadVerify<'_> {
    #[inline(always)]
    fn run(mut self) {
        walk::verify(self.head, self.state, &mut self.o, &mut self.u);
    }
}

struct HeadCommit<'a> {
    dims: GdnDims,
    v_head: usize,
    rows: &'a [i32],
    tape: Tape<'a>,
    units: &'a UnitRows,
    state: &'a mut [f32],
}

impl<'a> HeadCommit<'a> {
    /// A row's taped pseudo-values, `[Dv]`.
    #[inline(always)]
    fn u(&self, row: usize) -> &'a [f32] {
        &self.tape.u[(row * self.dims.v_heads + self.v_head) * self.dims.dv..][..self.dims.dv]
    }
}

impl Kernel for HeadCommit<'_> {
    #[inline(always)]
    fn run(self) {
        walk::commit(self);
    }
}

fn run_all<K: Kernel + Send>(tasks: Vec<K>, parallel: bool) {
    if parallel {
        tasks.into_par_iter().for_each(dispatch);
    } else {
        tasks.into_iter().for_each(dispatch);
    }
}

/// The rows of a `[N, Hv, Dv]` plane, per sequence and value head.
fn split_heads<'a>(dims: GdnDims, batch: &TreeBatch, plane: &'a mut [f32]) -> Vec<Vec<&'a mut [f32]>> {
    let mut heads = Vec::with_capacity(batch.sequences() * dims.v_heads);
    let mut rows = plane.chunks_exact_mut(dims.dv);
    for tree in batch.trees() {
        let start = heads.len();
        heads.extend((0..dims.v_heads).map(|_| Vec::with_capacity(tree.len())));
        for _ in 0..tree.len() {
            for head in &mut heads[start..] {
                head.extend(rows.next());
            }
        }
    }
    heads
}

/// Writes the sums of `g` from the root to every node.
fn cumulate(dims: GdnDims, batch: &TreeBatch, gates: &[f32], g_cum: &mut [f32]) {
    for (first, tree, slot) in batch.iter() {
        for node in 0..tree.len() {
            for v_head in 0..dims.v_heads {
                let at = |node: usize| (first + node) * dims.v_heads + v_head;
                g_cum[at(node)] = match (slot, tree.parent(node)) {
                    (None, _) => 0.0,
                    (_, None) => gate(dims, gates, first, v_head).0,
                    (_, Some(parent)) => g_cum[at(parent)] + gate(dims, gates, first + node, v_head).0,
                };
            }
        }
    }
}

fn check_verify(
    dims: GdnDims,
    batch: &TreeBatch,
    input: &VerifyInput<'_>,
    output: &VerifyOutput<'_>,
) -> Result<()> {
    let n = batch.rows();
    expect_len(VERIFY, "qkv", &[n, dims.qkv_width()], input.qkv.len())?;
    expect_len(VERIFY, "gates", &[n, 2, dims.v_heads], input.gates.len())?;
    let slots = check_pool(VERIFY, dims, input.state)?;
    batch.check_slots(VERIFY, slots)?;
    expect_len(VERIFY, "o", &[n, dims.v_heads, dims.dv], output.o.len())?;
    expect_len(VERIFY, "u", &[n, dims.v_heads, dims.dv], output.u.len())?;
    expect_len(VERIFY, "g_cum", &[n, dims.v_heads], output.g_cum.len())
}

fn check_commit(dims: GdnDims, paths: &AcceptedPaths, tape: &Tape<'_>, state: &[f32]) -> Result<()> {
    let n = paths.cu_nodes().last().map_or(0, |&n| n as usize);
    expect_len(COMMIT, "qkv", &[n, dims.qkv_width()], tape.qkv.len())?;
    expect_len(COMMIT, "gates", &[n, 2, dims.v_heads], tape.gates.len())?;
    expect_len(COMMIT, "u", &[n, dims.v_heads, dims.dv], tape.u.len())?;
    expect_len(COMMIT, "g_cum", &[n, dims.v_heads], tape.g_cum.len())?;
    let slots = check_pool(COMMIT, dims, state)?;
    paths.check_slots(COMMIT, slots)
}

fn check_pool(op: &'static str, dims: GdnDims, state: &[f32]) -> Result<usize> {
    let slots = state.len() / dims.state_len();
    expect_len(op, "state", &[slots, dims.v_heads, dims.dv, dims.dk], state.len())?;
    Ok(slots)
}
