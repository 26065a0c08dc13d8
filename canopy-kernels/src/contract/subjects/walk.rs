//! The steps of a round between two passes. The accept walk: a best token per row, which may not be finite; places on the path and how each
//! tree ended. Drafted tokens: words that are moved, as numbers of the same bits.

use super::{Bound, Plane, Scene, Shape, Subject};
use crate::accept_walk::{Input, Output, Row, cpu, oracle, row_words};
use crate::drafted_tokens::{self, source};
use crate::{DraftTree, Result, top_tokens};

pub(super) fn subjects() -> Vec<Box<dyn Subject>> {
    vec![Box::new(AcceptWalk), Box::new(DraftedTokens)]
}

struct AcceptWalk;
struct DraftedTokens;

/// What the kernels read of a scene.
pub(in super::super) struct Words {
    pub parents: Vec<i32>,
    pub tokens: Vec<u32>,
    pub best: Vec<u32>,
    pub most: usize,
}

impl Words {
    /// A node's token is its place among its siblings; the best ones are mostly the first.
    pub fn new(scene: &Scene) -> Self {
        let (mut parents, mut tokens) = (Vec::new(), Vec::new());
        for tree in scene.batch.trees() {
            let mut siblings = vec![0; tree.len()];
            tokens.extend((0..tree.len()).map(|node| {
                let before = tree.parent(node).map_or(0, |parent| {
                    siblings[parent] += 1;
                    siblings[parent] - 1
                });
                before as u32
            }));
            parents.extend_from_slice(tree.parents());
        }
        let row = |&x: &f32| match x.is_finite() {
            true => [top_tokens::FINITE, 0, 0, u32::from(x > 0.8)],
            false => [top_tokens::NO_DISTRIBUTION, 0, 0, 0],
        };
        Self {
            parents,
            tokens,
            best: scene.input(0).iter().flat_map(row).collect(),
            most: scene.batch.trees().iter().map(DraftTree::max_depth).max().unwrap_or(0) + 1,
        }
    }

    pub fn input<'a>(&'a self, scene: &'a Scene) -> Input<'a> {
        let Self { parents, tokens, best, most } = self;
        Input { parents, tokens, cu_nodes: scene.batch.cu_nodes(), best, stated: None, most: *most }
    }
}

/// Places on the paths, from 1, 0 off them; then how many nodes each tree visited, and its token behind them, which a failed one has not.
pub(in super::super) fn read(
    scene: &Scene,
    most: usize,
    (words, rows, cu_rows): (&[u32], &[i32], &[i32]),
    out: &mut [f32],
) -> Result<()> {
    let (places, ends) = out.split_at_mut(scene.batch.rows());
    places.fill(0.0);
    for (b, words) in words.chunks(row_words(most)).enumerate() {
        let row = Row::new(words)?;
        let path = rows.get(cu_rows[b] as usize..cu_rows[b + 1] as usize).unwrap_or_default();
        for (place, &row) in path.iter().enumerate() {
            places[row as usize] = (place + 1) as f32;
        }
        let slot = 2 * scene.batch.slots()[b] as usize;
        ends[slot] = row.path.len() as f32;
        ends[slot + 1] = end(&row) as f32;
    }
    Ok(())
}

fn end(row: &Row) -> f64 {
    row.tokens.last().filter(|_| !row.failed).map_or(f64::NAN, |&token| f64::from(token))
}

impl Subject for AcceptWalk {
    fn name(&self) -> String {
        "accept_walk".into()
    }

    fn bound(&self) -> Bound {
        Bound::Element(0.0)
    }

    fn scene(&self, shape: &Shape) -> Result<Scene> {
        Ok(Scene::new(shape)?.with_rows("best", 1, 0.0, 1.0))
    }

    fn planes(&self, scene: &Scene) -> Vec<Plane> {
        vec![Plane::rows("places", scene, 1), Plane::slots("ends", scene, 2)]
    }

    fn run(&self, scene: &Scene, out: &mut [f32]) -> Result<()> {
        let of = Words::new(scene);
        let (trees, rows) = (scene.batch.sequences(), scene.batch.rows());
        let mut words = vec![0; trees * row_words(of.most)];
        let (mut packed, mut cu_rows) = (vec![0; rows], vec![0; trees + 1]);
        let output = Output { words: &mut words, rows: &mut packed, cu_rows: &mut cu_rows };
        cpu::forward(of.input(scene), output)?;
        read(scene, of.most, (&words, &packed, &cu_rows), out)
    }

    fn oracle(&self, scene: &Scene) -> Vec<f64> {
        let of = Words::new(scene);
        let mut out = vec![0.0; scene.batch.rows() + 2 * scene.batch.sequences()];
        for (b, (first, _, slot)) in scene.batch.iter().enumerate() {
            let row = oracle::walk(&of.input(scene), b);
            if !row.failed {
                row.path.iter().enumerate().for_each(|(place, &node)| out[first + node] = (place + 1) as f64);
            }
            let ends = scene.batch.rows() + 2 * slot.unwrap_or(0);
            (out[ends], out[ends + 1]) = (row.path.len() as f64, end(&row));
        }
        out
    }
}

/// Candidates of a drafted row.
pub(in super::super) const CANDIDATES: usize = 3;

/// The candidates as [`top_tokens`] gives them, and what names one for every node: of its own row, by its depth.
pub(in super::super) fn drafted(scene: &Scene) -> (Vec<u32>, Vec<i32>) {
    let row = |tokens: &[f32]| {
        let head = [0; top_tokens::row_words(CANDIDATES) - CANDIDATES];
        head.into_iter().chain(tokens.iter().map(|token| token.to_bits())).collect::<Vec<_>>()
    };
    let depths = scene.batch.trees().iter().flat_map(|tree| tree.depths());
    let sources =
        depths.enumerate().map(|(row, &depth)| source(row, depth as usize % CANDIDATES, CANDIDATES));
    (scene.input(0).chunks(CANDIDATES).flat_map(row).collect(), sources.collect())
}

impl Subject for DraftedTokens {
    fn name(&self) -> String {
        "drafted_tokens".into()
    }

    fn bound(&self) -> Bound {
        Bound::Element(0.0)
    }

    fn scene(&self, shape: &Shape) -> Result<Scene> {
        Ok(Scene::new(shape)?.with_rows("best", CANDIDATES, -1.0, 1.0))
    }

    fn planes(&self, scene: &Scene) -> Vec<Plane> {
        vec![Plane::rows("tokens", scene, 1)]
    }

    fn run(&self, scene: &Scene, out: &mut [f32]) -> Result<()> {
        let (best, sources) = drafted(scene);
        let mut tokens = vec![0; out.len()];
        drafted_tokens::cpu::forward(CANDIDATES, &best, &sources, &mut tokens)?;
        out.iter_mut().zip(tokens).for_each(|(out, token)| *out = f32::from_bits(token));
        Ok(())
    }

    fn oracle(&self, scene: &Scene) -> Vec<f64> {
        let depths = scene.batch.trees().iter().flat_map(|tree| tree.depths());
        let token = |(row, &depth): (&[f32], &u32)| f64::from(row[depth as usize % CANDIDATES]);
        scene.input(0).chunks(CANDIDATES).zip(depths).map(token).collect()
    }
}
