//! The walk: node by node, each from its parent's state, with the very operations of serial decoding.
//!
//! The rows of a state `[Dv, Dk]` never meet, so the walk runs over a few rows at a time and keeps them in the
//! first-level cache for the whole tree.

use super::{Head, HeadCommit, gate};
use crate::DraftTree;
use crate::numeric::{Aligned, LANES, Lanes, Real, Simd, row_dots};

/// Rows of a state that walk the tree together.
const ROWS: usize = 20;
/// Rows that are written side by side.
const GROUP: usize = 4;
/// Rows that a commit replays side by side.
const REPLAYED: usize = 5;

/// One visit of the walk.
enum Step {
    /// `node` reads its parent's state in buffer `from` (`None` is the pool's): gives its u and o.
    Read { node: usize, from: Option<usize> },
    /// `node`, whose u is known, turns its parent's state in `from` into its own in `to`, which may be the same
    /// buffer; its child `child` reads the new state on the way.
    Advance { node: usize, from: Option<usize>, to: usize, child: usize },
}

/// A depth-first order and the buffers it needs. The heavy child comes last and takes over its parent's buffer, so
/// at most `log2(nodes) + 1` states are alive. Leaves leave no state.
fn plan(tree: &DraftTree) -> (Vec<Step>, usize) {
    let (children, heavy) = (tree.children(), tree.heavy_children());
    let mut steps = Vec::with_capacity(tree.len() + 1);
    steps.push(Step::Read { node: 0, from: None });
    let (mut free, mut buffers) = (Vec::new(), 0);
    let mut stack = vec![(0, None, true)];
    while let Some((node, from, last)) = stack.pop() {
        let inherited = from.filter(|_| last);
        let Some(child) = heavy[node] else {
            free.extend(inherited);
            continue;
        };
        let to = inherited.or_else(|| free.pop()).unwrap_or_else(|| {
            buffers += 1;
            buffers - 1
        });
        steps.push(Step::Advance { node, from, to, child });
        stack.push((child, Some(to), true));
        for &light in children[node].iter().filter(|&&light| light != child) {
            steps.push(Step::Read { node: light, from: Some(to) });
            stack.push((light, Some(to), false));
        }
    }
    (steps, buffers)
}

/// What one node brings to every row of the state.
#[derive(Clone, Copy)]
struct Node<'a, T> {
    decay: T,
    beta: T,
    k: &'a [T],
    q: &'a [T],
    kq: T,
}

impl<'a, T: Real> Node<'a, T> {
    fn new(head: &Head<'a, T>, row: usize) -> Self {
        let (g, beta) = gate(head.dims, head.gates, row, head.v_head);
        let (k, q, kq) = head.units.row(head.dims.key_head(head.v_head), row);
        Self { decay: g.exp(), beta, k, q, kq }
    }

    /// `u = beta (v - decay S k)` and `o = decay S q + u (k . q)` of some rows, given `[S k, S q]`.
    #[inline(always)]
    fn finish(&self, sums: &[[T; 2]; ROWS], rows: Rows<'_, T>) {
        let Rows { v, u, o } = rows;
        for (((u, o), &v), &[sk, sq]) in u.iter_mut().zip(o).zip(v).zip(sums) {
            *u = self.beta * (-self.decay).fma(sk, v);
            *o = u.fma(self.kq, self.decay * sq);
        }
    }
}

/// Some rows of one node's v, u and o.
struct Rows<'a, T> {
    v: &'a [T],
    u: &'a mut [T],
    o: &'a mut [T],
}

/// One value head of one tree: fills `u` and `o`, both `[nodes][Dv]`.
#[inline(always)]
pub(super) fn verify<S: Simd, T: Real>(
    head: Head<'_, T>,
    state: &[T],
    o: &mut [&mut [T]],
    u: &mut [&mut [T]],
) {
    let dims = head.dims;
    let (steps, buffers) = plan(head.tree);
    let nodes: Vec<Node<'_, T>> =
        (0..head.tree.len()).map(|node| Node::new(&head, head.first + node)).collect();
    let mut scratch = Aligned::new(buffers * ROWS * dims.dk);
    for (block, pool) in state.chunks(ROWS * dims.dk).enumerate() {
        let rows = block * ROWS..(block * ROWS + ROWS).min(dims.dv);
        let size = pool.len();
        let at = |buffer: usize| buffer * ROWS * dims.dk..buffer * ROWS * dims.dk + size;
        for step in &steps {
            let (Step::Read { node: reader, .. } | Step::Advance { child: reader, .. }) = *step;
            let mut own_u = [T::ZERO; ROWS];
            if let Step::Advance { node, from, to, .. } = *step {
                own_u[..rows.len()].copy_from_slice(&u[node][rows.clone()]);
                match from {
                    Some(from) if from == to => {}
                    Some(from) => scratch.copy_within(at(from), at(to).start),
                    None => scratch[at(to)].copy_from_slice(pool),
                }
            }
            let reads = Rows {
                v: &head.v(reader)[rows.clone()],
                u: &mut u[reader][rows.clone()],
                o: &mut o[reader][rows.clone()],
            };
            match *step {
                Step::Read { from: None, .. } => read::<S, T>(nodes[reader], pool, reads),
                Step::Read { from: Some(from), .. } => read::<S, T>(nodes[reader], &scratch[at(from)], reads),
                Step::Advance { node, to, .. } => {
                    advance::<S, T>(nodes[node], &own_u, nodes[reader], &mut scratch[at(to)], reads);
                }
            }
        }
    }
}

/// `node` reads some rows of its parent's state.
#[inline(always)]
fn read<S: Simd, T: Real>(node: Node<'_, T>, parent: &[T], rows: Rows<'_, T>) {
    let mut sums = [[T::ZERO; 2]; ROWS];
    row_dots::<S, T>(parent, node.k, node.q, &mut sums[..rows.v.len()]);
    node.finish(&sums, rows);
}

/// `node` writes its u into some rows of its state, and `child` reads them.
#[inline(always)]
fn advance<S: Simd, T: Real>(
    node: Node<'_, T>,
    own_u: &[T; ROWS],
    child: Node<'_, T>,
    state: &mut [T],
    rows: Rows<'_, T>,
) {
    let dk = node.k.len();
    if !dk.is_multiple_of(LANES) {
        write(node, own_u, state);
        return read::<S, T>(child, state, rows);
    }
    let mut sums = [[T::ZERO; 2]; ROWS];
    let mut groups = state.chunks_exact_mut(GROUP * dk);
    let (us, outs) = (own_u.as_chunks::<GROUP>().0, sums.as_chunks_mut::<GROUP>().0);
    for ((group, u), out) in (&mut groups).zip(us).zip(outs) {
        *out = write4::<S, T>(node, *u, child, group);
    }
    let (rest, row) = (groups.into_remainder(), rows.v.len() / GROUP * GROUP);
    if !rest.is_empty() {
        write(node, &own_u[row..], rest);
        row_dots::<S, T>(rest, child.k, child.q, &mut sums[row..rows.v.len()]);
    }
    child.finish(&sums, rows);
}

/// [`write`] of four rows, returning [`row_dots`] of the new rows with the child's k and q.
#[inline(always)]
fn write4<S: Simd, T: Real>(
    node: Node<'_, T>,
    u: [T; 4],
    child: Node<'_, T>,
    state: &mut [T],
) -> [[T; 2]; 4] {
    type L<S, T> = <T as Real>::Lanes<S>;
    let dk = node.k.len();
    let decay = L::<S, T>::splat(node.decay);
    let u = u.map(L::<S, T>::splat);
    let (mut sum_k, mut sum_q) = ([L::<S, T>::zero(); 4], [L::<S, T>::zero(); 4]);
    let [k, child_k, child_q] = [node.k, child.k, child.q].map(|x| x.as_chunks::<LANES>().0);
    let (low, high) = state.split_at_mut(2 * dk);
    let ((r0, r1), (r2, r3)) = (low.split_at_mut(dk), high.split_at_mut(dk));
    let [r0, r1, r2, r3] = [r0, r1, r2, r3].map(|row| row.as_chunks_mut::<LANES>().0.iter_mut());
    let keys = k.iter().zip(child_k).zip(child_q);
    for ((((((k, x), y), s0), s1), s2), s3) in keys.zip(r0).zip(r1).zip(r2).zip(r3) {
        let (k, x, y) = (L::<S, T>::load(k), L::<S, T>::load(x), L::<S, T>::load(y));
        for (r, s) in [s0, s1, s2, s3].into_iter().enumerate() {
            let new = L::<S, T>::load(s).fma(decay, k.mul(u[r]));
            new.store(s);
            sum_k[r] = new.fma(x, sum_k[r]);
            sum_q[r] = new.fma(y, sum_q[r]);
        }
    }
    std::array::from_fn(|r| L::<S, T>::sum2(sum_k[r], sum_q[r]))
}

/// `S = decay S + u k^T` for rows S of a state.
#[inline(always)]
fn write<T: Real>(node: Node<'_, T>, u: &[T], state: &mut [T]) {
    for (state, &u) in state.chunks_exact_mut(node.k.len()).zip(u) {
        for (s, &k) in state.iter_mut().zip(node.k) {
            *s = s.fma(node.decay, k * u);
        }
    }
}

/// Replays one accepted path on one value head's state, with the taped pseudo-values.
#[inline(always)]
pub(super) fn commit<S: Simd, T: Real>(head: HeadCommit<'_, T>) {
    let dk = head.dims.dk;
    let path: Vec<(T, &[T], &[T])> = head
        .rows
        .iter()
        .map(|&row| {
            let row = row as usize;
            let (g, _) = gate(head.dims, head.gates, row, head.v_head);
            let (k, _, _) = head.units.row(head.dims.key_head(head.v_head), row);
            (g.exp(), k, head.u(row))
        })
        .collect();
    let mut groups = head.state.chunks_exact_mut(REPLAYED * dk);
    let mut row = 0;
    let mut writes = vec![(T::ZERO, [T::ZERO; REPLAYED]); path.len()];
    for group in &mut groups {
        for (write, (decay, _, u)) in writes.iter_mut().zip(&path) {
            *write = (*decay, std::array::from_fn(|r| u[row + r]));
        }
        replay::<S, T>(&writes, &path, group);
        row += REPLAYED;
    }
    for state in groups.into_remainder().chunks_exact_mut(dk) {
        for &(decay, k, u) in &path {
            for (s, &k) in state.iter_mut().zip(k) {
                *s = s.fma(decay, k * u[row]);
            }
        }
        row += 1;
    }
}

/// Replays a path on five rows, a few columns at a time, which stay in registers.
#[inline(always)]
fn replay<S: Simd, T: Real>(writes: &[(T, [T; REPLAYED])], path: &[(T, &[T], &[T])], state: &mut [T]) {
    type L<S, T> = <T as Real>::Lanes<S>;
    const COLUMNS: usize = 2 * LANES;
    let dk = state.len() / REPLAYED;
    let whole = dk / COLUMNS * COLUMNS;
    for column in (0..whole).step_by(COLUMNS) {
        let mut tile: [[L<S, T>; 2]; REPLAYED] = std::array::from_fn(|r| {
            let row = &state[r * dk + column..][..COLUMNS].as_chunks::<LANES>().0;
            [L::<S, T>::load(&row[0]), L::<S, T>::load(&row[1])]
        });
        for ((decay, u), (_, k, _)) in writes.iter().zip(path) {
            let k = k[column..column + COLUMNS].as_chunks::<LANES>().0;
            let (k, decay) = ([L::<S, T>::load(&k[0]), L::<S, T>::load(&k[1])], L::<S, T>::splat(*decay));
            for r in 0..REPLAYED {
                let u = L::<S, T>::splat(u[r]);
                tile[r] = [tile[r][0].fma(decay, k[0].mul(u)), tile[r][1].fma(decay, k[1].mul(u))];
            }
        }
        for r in 0..REPLAYED {
            let row = state[r * dk + column..][..COLUMNS].as_chunks_mut::<LANES>().0;
            tile[r][0].store(&mut row[0]);
            tile[r][1].store(&mut row[1]);
        }
    }
    for (r, state) in state.chunks_exact_mut(dk).enumerate() {
        for ((decay, u), (_, k, _)) in writes.iter().zip(path) {
            for (s, &k) in state[whole..].iter_mut().zip(&k[whole..]) {
                *s = s.fma(*decay, k * u[r]);
            }
        }
    }
}
