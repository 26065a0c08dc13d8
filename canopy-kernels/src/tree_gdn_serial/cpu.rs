//! CPU forward.

use super::{SerialInput, SerialOutput};
use crate::error::{Result, expect_len};
use crate::numeric::{Kernel, Simd, dispatch_all, dot, normalise, row_dots};
use crate::{AcceptedPaths, DraftTree, GdnDims, TreeBatch};

const VERIFY: &str = "tree_gdn_serial verify";
const COMMIT: &str = "tree_gdn_serial commit";

/// Verifies every tree of `batch` node by node; reads the state pool and leaves it as it is. A padding sequence's
/// rows become zero.
///
/// # Errors
/// [`crate::Error::Shape`] or [`crate::Error::Value`] naming the argument that does not fit.
pub fn verify(
    dims: GdnDims,
    batch: &TreeBatch,
    input: SerialInput<'_>,
    output: SerialOutput<'_>,
) -> Result<()> {
    let n = batch.rows();
    let slots = dims.pool_slots(VERIFY, input.state.len())?;
    expect_len(VERIFY, "qkv", &[n, dims.qkv_width()], input.qkv.len())?;
    expect_len(VERIFY, "gates", &[n, 2, dims.v_heads], input.gates.len())?;
    batch.check_slots(VERIFY, slots)?;
    expect_len(VERIFY, "o", &[n, dims.v_heads, dims.dv], output.o.len())?;
    expect_len(VERIFY, "snapshots", &[n, dims.v_heads, dims.dv, dims.dk], output.snapshots.len())?;

    let size = dims.dv * dims.dk;
    let os = batch.split_heads(dims.v_heads, dims.dv, output.o);
    let mut heads = os.into_iter().zip(batch.split_heads(dims.v_heads, size, output.snapshots));
    let mut tasks = Vec::with_capacity(heads.len());
    for (first, tree, slot) in batch.iter() {
        for (v_head, (o, snapshots)) in heads.by_ref().take(dims.v_heads).enumerate() {
            let state = slot.map(|slot| &input.state[slot * dims.state_len() + v_head * size..][..size]);
            tasks.push(Head { dims, first, tree, v_head, input, state, o, snapshots });
        }
    }
    dispatch_all(tasks, n * dims.state_len());
    Ok(())
}

/// Copies the snapshot of every accepted path's last node into the pool, in place.
///
/// # Errors
/// [`crate::Error::Shape`] or [`crate::Error::Value`] naming the argument that does not fit.
pub fn commit(dims: GdnDims, paths: &AcceptedPaths, snapshots: &[f32], state: &mut [f32]) -> Result<()> {
    let slots = dims.pool_slots(COMMIT, state.len())?;
    let n = paths.cu_nodes().last().map_or(0, |&n| n as usize);
    expect_len(COMMIT, "snapshots", &[n, dims.v_heads, dims.dv, dims.dk], snapshots.len())?;
    paths.check_slots(COMMIT, slots)?;
    let len = dims.state_len();
    for (_, slot, rows) in paths.iter() {
        if let Some(&last) = rows.last() {
            state[slot * len..][..len].copy_from_slice(&snapshots[last as usize * len..][..len]);
        }
    }
    Ok(())
}

/// One value head of one tree.
struct Head<'a> {
    dims: GdnDims,
    first: usize,
    tree: &'a DraftTree,
    v_head: usize,
    input: SerialInput<'a>,
    /// `[Dv, Dk]`, `None` for padding.
    state: Option<&'a [f32]>,
    /// `[nodes][Dv]`.
    o: Vec<&'a mut [f32]>,
    /// `[nodes][Dv, Dk]`.
    snapshots: Vec<&'a mut [f32]>,
}

impl Kernel for Head<'_> {
    #[inline(always)]
    fn run<S: Simd>(self) {
        let Self { dims, first, tree, v_head, input, state, mut o, mut snapshots } = self;
        let Some(state) = state else {
            o.iter_mut().chain(&mut snapshots).for_each(|plane| plane.fill(0.0));
            return;
        };
        let (dk, k_head) = (dims.dk, dims.key_head(v_head));
        let (mut k, mut q, mut sums) = (vec![0.0; dk], vec![0.0; dk], vec![[0.0; 2]; dims.dv]);
        for node in 0..tree.len() {
            let row = &input.qkv[(first + node) * dims.qkv_width()..][..dims.qkv_width()];
            normalise::<S, f32>(&row[k_head * dk..][..dk], dims.scale(), &mut q);
            normalise::<S, f32>(&row[(dims.k_heads + k_head) * dk..][..dk], 1.0, &mut k);
            let v = &row[2 * dims.k_heads * dk + v_head * dims.dv..][..dims.dv];
            let gates = &input.gates[(first + node) * 2 * dims.v_heads..][..2 * dims.v_heads];
            let (decay, beta, kq) =
                (gates[v_head].exp(), gates[dims.v_heads + v_head], dot::<S, f32>(&k, &q));
            let (before, rest) = snapshots.split_at_mut(node);
            let parent = tree.parent(node).map_or(state, |parent| &*before[parent]);
            row_dots::<S, f32>(parent, &k, &q, &mut sums);
            let rows = parent.chunks_exact(dk).zip(rest[0].chunks_exact_mut(dk));
            for ((((from, to), &[sk, sq]), &v), o) in rows.zip(&sums).zip(v).zip(&mut *o[node]) {
                let u = beta * (-decay).mul_add(sk, v);
                *o = u.mul_add(kq, decay * sq);
                for ((to, &from), &k) in to.iter_mut().zip(from).zip(&k) {
                    *to = from.mul_add(decay, k * u);
                }
            }
        }
    }
}
