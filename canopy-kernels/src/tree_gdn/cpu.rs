//! CPU forward: checks, then one task per sequence and value head.

use super::{Tape, Variant, VerifyInput, VerifyOutput};
use crate::error::{Result, expect_len};
use crate::numeric::{Kernel, Real, Simd, dispatch_all};
use crate::{AcceptedPaths, DraftTree, GdnDims, TreeBatch};

mod closed_form;
pub(super) mod system;
mod unit;
mod walk;

use unit::UnitRows;

const VERIFY: &str = "tree_gdn verify";
const COMMIT: &str = "tree_gdn commit";

/// Verifies every tree of `batch`; reads the state pool and leaves it as it is. A padding sequence's rows become
/// zero.
///
/// # Errors
/// [`crate::Error::Shape`] or [`crate::Error::Value`] naming the argument that does not fit.
pub fn verify(
    dims: GdnDims,
    batch: &TreeBatch,
    variant: Variant,
    input: VerifyInput<'_>,
    output: VerifyOutput<'_>,
) -> Result<()> {
    variant.check(VERIFY)?;
    check_verify(dims, batch, &input, &output)?;
    cumulate(dims, batch, input.gates, output.g_cum);
    let planes = Planes { qkv: input.qkv, gates: input.gates };
    verify_in(dims, batch, variant, planes, input.state, [output.o, output.u]);
    Ok(())
}

/// Commits the accepted paths into the state pool `[slots, Hv, Dv, Dk]`, in place: Walk replays the paths with the
/// taped pseudo-values, Solve evaluates the closed form.
///
/// # Errors
/// [`crate::Error::Shape`] or [`crate::Error::Value`] naming the argument that does not fit.
pub fn commit(
    dims: GdnDims,
    paths: &AcceptedPaths,
    variant: Variant,
    tape: Tape<'_>,
    state: &mut [f32],
) -> Result<()> {
    variant.check(COMMIT)?;
    check_commit(dims, paths, &tape, state)?;
    commit_in(dims, paths, variant, Planes { qkv: tape.qkv, gates: tape.gates }, tape.u, state);
    Ok(())
}

/// This round's rows: `qkv` `[N, 2 Hk Dk + Hv Dv]` and `gates` `[N, 2, Hv]`.
#[derive(Clone, Copy)]
pub(super) struct Planes<'a, T> {
    pub(super) qkv: &'a [T],
    pub(super) gates: &'a [T],
}

/// [`verify`] in any precision, sizes checked; `out` is `[o, u]`.
pub(super) fn verify_in<T: Real>(
    dims: GdnDims,
    batch: &TreeBatch,
    variant: Variant,
    planes: Planes<'_, T>,
    state: &[T],
    out: [&mut [T]; 2],
) {
    let live = batch.iter().filter(|(_, _, slot)| slot.is_some());
    let rows = live.flat_map(|(first, tree, _)| first..first + tree.len());
    let units = UnitRows::new(dims, planes.qkv, rows);
    let [o, u] = out.map(|plane| batch.split_heads(dims.v_heads, dims.dv, plane));
    let mut heads = o.into_iter().zip(u);
    let mut tasks = Vec::with_capacity(heads.len());
    for (first, tree, slot) in batch.iter() {
        for (v_head, (mut o, mut u)) in heads.by_ref().take(dims.v_heads).enumerate() {
            let Some(slot) = slot else {
                o.iter_mut().chain(&mut u).for_each(|row| row.fill(T::ZERO));
                continue;
            };
            let size = dims.dv * dims.dk;
            let state = &state[slot * dims.state_len() + v_head * size..][..size];
            let head =
                Head { dims, first, tree, v_head, qkv: planes.qkv, gates: planes.gates, units: &units };
            tasks.push(HeadVerify { head, variant, state, o, u });
        }
    }
    dispatch_all(tasks, batch.rows() * dims.state_len());
}

/// [`commit`] in any precision, sizes checked.
pub(super) fn commit_in<T: Real>(
    dims: GdnDims,
    paths: &AcceptedPaths,
    variant: Variant,
    planes: Planes<'_, T>,
    u: &[T],
    state: &mut [T],
) {
    let live = paths.iter().flat_map(|(_, _, rows)| rows.iter().map(|&row| row as usize));
    let units = UnitRows::new(dims, planes.qkv, live);
    let mut by_slot: Vec<(usize, &[i32])> = paths.iter().map(|(_, slot, rows)| (slot, rows)).collect();
    by_slot.sort_by_key(|&(slot, _)| slot);
    let mut tasks = Vec::with_capacity(by_slot.len() * dims.v_heads);
    let (mut rest, mut at) = (state, 0);
    for (slot, rows) in by_slot {
        let (_, tail) = rest.split_at_mut((slot - at) * dims.state_len());
        let (own, tail) = tail.split_at_mut(dims.state_len());
        (rest, at) = (tail, slot + 1);
        for (v_head, state) in own.chunks_exact_mut(dims.dv * dims.dk).enumerate() {
            let gates = planes.gates;
            tasks.push(HeadCommit { dims, v_head, variant, rows, gates, u, units: &units, state });
        }
    }
    dispatch_all(tasks, paths.rows().len() * dims.state_len());
}

/// What one value head of one sequence reads in verify.
#[derive(Clone, Copy)]
struct Head<'a, T> {
    dims: GdnDims,
    first: usize,
    tree: &'a DraftTree,
    v_head: usize,
    qkv: &'a [T],
    gates: &'a [T],
    units: &'a UnitRows<T>,
}

impl<'a, T: Real> Head<'a, T> {
    /// A node's value row, `[Dv]`.
    #[inline(always)]
    fn v(&self, node: usize) -> &'a [T] {
        let dims = self.dims;
        let start =
            (self.first + node) * dims.qkv_width() + 2 * dims.k_heads * dims.dk + self.v_head * dims.dv;
        &self.qkv[start..start + dims.dv]
    }

    /// `(key, query, key . query)` of a node.
    #[inline(always)]
    fn unit(&self, node: usize) -> (&'a [T], &'a [T], T) {
        self.units.row(self.dims.key_head(self.v_head), self.first + node)
    }
}

/// Log gate and write strength of one packed row.
fn gate<T: Copy>(dims: GdnDims, gates: &[T], row: usize, v_head: usize) -> (T, T) {
    let at = row * 2 * dims.v_heads + v_head;
    (gates[at], gates[at + dims.v_heads])
}

struct HeadVerify<'a, T> {
    head: Head<'a, T>,
    variant: Variant,
    state: &'a [T],
    o: Vec<&'a mut [T]>,
    u: Vec<&'a mut [T]>,
}

impl<T: Real> Kernel for HeadVerify<'_, T> {
    #[inline(always)]
    fn run<S: Simd>(mut self) {
        match self.variant {
            Variant::Walk => walk::verify::<S, T>(self.head, self.state, &mut self.o, &mut self.u),
            Variant::Solve(solve) => {
                closed_form::verify::<S, T>(self.head, solve, self.state, &mut self.o, &mut self.u);
            }
        }
    }
}

/// What one value head of one sequence reads and writes in commit.
struct HeadCommit<'a, T> {
    dims: GdnDims,
    v_head: usize,
    variant: Variant,
    rows: &'a [i32],
    gates: &'a [T],
    u: &'a [T],
    units: &'a UnitRows<T>,
    state: &'a mut [T],
}

impl<'a, T: Real> HeadCommit<'a, T> {
    /// A row's taped pseudo-values, `[Dv]`.
    #[inline(always)]
    fn u(&self, row: usize) -> &'a [T] {
        &self.u[(row * self.dims.v_heads + self.v_head) * self.dims.dv..][..self.dims.dv]
    }
}

impl<T: Real> Kernel for HeadCommit<'_, T> {
    #[inline(always)]
    fn run<S: Simd>(self) {
        match self.variant {
            Variant::Walk => walk::commit::<S, T>(self),
            Variant::Solve(_) => closed_form::commit::<S, T>(self),
        }
    }
}

/// Writes the sums of `g` from the root to every node.
fn cumulate(dims: GdnDims, batch: &TreeBatch, gates: &[f32], g_cum: &mut [f32]) {
    for (first, tree, slot) in batch.iter() {
        for node in 0..tree.len() {
            for v_head in 0..dims.v_heads {
                let at = |node: usize| (first + node) * dims.v_heads + v_head;
                let (g, _) = gate(dims, gates, first + node, v_head);
                g_cum[at(node)] = match (slot, tree.parent(node)) {
                    (None, _) => 0.0,
                    (_, None) => g,
                    (_, Some(parent)) => g_cum[at(parent)] + g,
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
    let slots = dims.pool_slots(VERIFY, input.state.len())?;
    expect_len(VERIFY, "qkv", &[n, dims.qkv_width()], input.qkv.len())?;
    expect_len(VERIFY, "gates", &[n, 2, dims.v_heads], input.gates.len())?;
    batch.check_slots(VERIFY, slots)?;
    expect_len(VERIFY, "o", &[n, dims.v_heads, dims.dv], output.o.len())?;
    expect_len(VERIFY, "u", &[n, dims.v_heads, dims.dv], output.u.len())?;
    expect_len(VERIFY, "g_cum", &[n, dims.v_heads], output.g_cum.len())
}

fn check_commit(dims: GdnDims, paths: &AcceptedPaths, tape: &Tape<'_>, state: &[f32]) -> Result<()> {
    let n = paths.cu_nodes().last().map_or(0, |&n| n as usize);
    let slots = dims.pool_slots(COMMIT, state.len())?;
    expect_len(COMMIT, "qkv", &[n, dims.qkv_width()], tape.qkv.len())?;
    expect_len(COMMIT, "gates", &[n, 2, dims.v_heads], tape.gates.len())?;
    expect_len(COMMIT, "u", &[n, dims.v_heads, dims.dv], tape.u.len())?;
    expect_len(COMMIT, "g_cum", &[n, dims.v_heads], tape.g_cum.len())?;
    paths.check_slots(COMMIT, slots)
}
