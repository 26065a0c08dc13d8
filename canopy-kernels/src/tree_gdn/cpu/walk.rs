//! The walk: node by node, each from its parent's state, with the very operations of serial decoding.
//!
//! The rows of a state `[Dv, Dk]` never meet, so the walk runs over a few rows at a time and keeps them in the
//! first-level cache for the whole tree.

use super::{Head, HeadCommit, gate};
use crate::DraftTree;
use crate::numeric::dots;

/// Rows of a state that walk the tree together.
const ROWS: usize = 16;
/// Rows whose sums run side by side.
const GROUP: usize = 4;

/// One visit: the node reads its parent's state in `from` (`None` is the pool's) and leaves its own in `to`, which
/// may be the same buffer. A leaf leaves none.
struct Step {
    node: usize,
    from: Option<usize>,
    to: Option<usize>,
}

/// A depth-first order and the buffers it needs. The heavy child comes last and takes over its parent's buffer, so
/// at most `log2(nodes) + 1` states are alive.
fn plan(tree: &DraftTree) -> (Vec<Step>, usize) {
    let (children, heavy) = (tree.children(), tree.heavy_children());
    let mut steps = Vec::with_capacity(tree.len());
    let (mut free, mut buffers) = (Vec::new(), 0);
    let mut stack = vec![(0, None, true)];
    while let Some((node, from, last)) = stack.pop() {
        let inherited = from.filter(|_| last);
        let to = match (heavy[node], inherited) {
            (None, _) => {
                free.extend(inherited);
                None
            }
            (Some(_), Some(buffer)) => Some(buffer),
            (Some(_), None) => Some(free.pop().unwrap_or_else(|| {
                buffers += 1;
                buffers - 1
            })),
        };
        steps.push(Step { node, from, to });
        stack.extend(heavy[node].map(|child| (child, to, true)));
        let light = children[node].iter().filter(|&&child| heavy[node] != Some(child));
        stack.extend(light.map(|&child| (child, to, false)));
    }
    (steps, buffers)
}

/// What one node brings to every row of the state.
#[derive(Clone, Copy)]
struct Node<'a> {
    decay: f32,
    beta: f32,
    k: &'a [f32],
    q: &'a [f32],
    kq: f32,
}

/// One value head of one tree: fills `u` and `o`, both `[nodes][Dv]`.
#[inline(always)]
pub(super) fn verify(head: Head<'_>, state: &[f32], o: &mut [&mut [f32]], u: &mut [&mut [f32]]) {
    let dims = head.dims;
    let (steps, buffers) = plan(head.tree);
    let nodes: Vec<Node<'_>> = (head.first..head.first + head.tree.len())
        .map(|row| {
            let (g, beta) = gate(dims, head.gates, row, head.v_head);
            let (k, q, kq) = head.units.row(dims.key_head(head.v_head), row);
            Node { decay: g.exp(), beta, k, q, kq }
        })
        .collect();
    let mut scratch = vec![0.0; buffers * ROWS * dims.dk];
    for (block, pool) in state.chunks(ROWS * dims.dk).enumerate() {
        let rows = block * ROWS..(block * ROWS + ROWS).min(dims.dv);
        for &Step { node, from, to } in &steps {
            let v = &head.v(node)[rows.clone()];
            let (o, u) = (&mut o[node][rows.clone()], &mut u[node][rows.clone()]);
            let size = pool.len();
            let at = |buffer: usize| buffer * ROWS * dims.dk;
            match (from, to) {
                (from, None) => {
                    let parent = from.map_or(pool, |buffer| &scratch[at(buffer)..][..size]);
                    read(nodes[node], parent, v, o, u);
                }
                (Some(from), Some(to)) if from == to => {
                    let own = &mut scratch[at(to)..][..size];
                    read(nodes[node], own, v, o, u);
                    write_in_place(nodes[node], u, own);
                }
                (from, Some(to)) => {
                    if let Some(from) = from {
                        scratch.copy_within(at(from)..at(from) + size, at(to));
                    } else {
                        scratch[at(to)..][..size].copy_from_slice(pool);
                    }
                    let own = &mut scratch[at(to)..][..size];
                    read(nodes[node], own, v, o, u);
                    write_in_place(nodes[node], u, own);
                }
            }
        }
    }
}

/// `u = beta (v - decay S k)` and `o = decay S q + u (k . q)` for the rows S of a parent's state.
#[inline(always)]
fn read(node: Node<'_>, parent: &[f32], v: &[f32], o: &mut [f32], u: &mut [f32]) {
    let dk = node.k.len();
    let mut finish = |row: usize, sk: f32, sq: f32| {
        u[row] = node.beta * (-node.decay).mul_add(sk, v[row]);
        o[row] = u[row].mul_add(node.kq, node.decay * sq);
    };
    let mut groups = parent.chunks_exact(GROUP * dk);
    let mut row = 0;
    for group in &mut groups {
        let rows: [&[f32]; GROUP] = std::array::from_fn(|r| &group[r * dk..][..dk]);
        let (sk, sq) = dots(rows, node.k, node.q);
        for r in 0..GROUP {
            finish(row + r, sk[r], sq[r]);
        }
        row += GROUP;
    }
    for single in groups.remainder().chunks_exact(dk) {
        let (sk, sq) = dots([single], node.k, node.q);
        finish(row, sk[0], sq[0]);
        row += 1;
    }
}

/// `S = decay S + u k^T` for rows S of a state.
#[inline(always)]
fn write_in_place(node: Node<'_>, u: &[f32], state: &mut [f32]) {
    for (state, &u) in state.chunks_exact_mut(node.k.len()).zip(u) {
        for (s, &k) in state.iter_mut().zip(node.k) {
            *s = k.mul_add(u, node.decay * *s);
        }
    }
}

/// Replays one accepted path on one value head's state, with the taped pseudo-values.
#[inline(always)]
pub(super) fn commit(head: HeadCommit<'_>) {
    let dims = head.dims;
    let path: Vec<(Node<'_>, &[f32])> = head
        .rows
        .iter()
        .map(|&row| {
            let (g, beta) = gate(dims, head.tape.gates, row as usize, head.v_head);
            let (k, q, kq) = head.units.row(dims.key_head(head.v_head), row as usize);
            (Node { decay: g.exp(), beta, k, q, kq }, head.u(row as usize))
        })
        .collect();
    for (block, state) in head.state.chunks_mut(ROWS * dims.dk).enumerate() {
        for (node, u) in &path {
            write_in_place(*node, &u[block * ROWS..], state);
        }
    }
}
