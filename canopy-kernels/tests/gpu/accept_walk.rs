//! The accept walk: words and packed paths equal to the CPU forward's (which equals the oracle) over random trees, tokens and models.

use std::sync::Arc;

use canopy_kernels::DraftTree;
use canopy_kernels::accept_walk::launch::{self, Buffers};
use canopy_kernels::accept_walk::{Input, Output, Stated, cpu, row_words, stated_node};
use cudarc::driver::CudaStream;

use crate::Check;
use crate::data::{Random, text};

pub const TESTS: &[(&str, Check)] =
    &[("accept_walk::walks_equal_those_on_the_cpu", equal), ("accept_walk::a_whole_chain_is_walked", chain)];

/// Words, rows and where each path starts.
type Found = (Vec<u32>, Vec<i32>, Vec<i32>);

struct Case {
    parents: Vec<i32>,
    tokens: Vec<u32>,
    cu_nodes: Vec<i32>,
    best: Vec<u32>,
    nodes: Vec<u32>,
    wanted: Vec<i32>,
    most: usize,
}

impl Case {
    /// Trees of few tokens, siblings with different ones; the best tokens are right in two of three rows.
    fn new(trees: &[DraftTree], most: usize, random: &mut Random) -> Self {
        let mut case = Self {
            parents: Vec::new(),
            tokens: Vec::new(),
            cu_nodes: vec![0],
            best: Vec::new(),
            nodes: Vec::new(),
            wanted: (0..trees.len() * 2 * most).map(|_| random.below(3) as i32 - 1).collect(),
            most,
        };
        for tree in trees {
            let mut siblings = vec![0u32; tree.len()];
            for node in 0..tree.len() {
                let rank = tree.parent(node).map_or(0, |parent| {
                    siblings[parent] += 1;
                    siblings[parent] - 1
                });
                case.tokens.push(100 + rank);
                case.nodes.push(stated_node(rank, tree.depths()[node]));
                let flags = u32::from(random.below(25) == 0);
                case.best.extend([flags, 1, 2, 100 + random.below(4) as u32 / 2]);
            }
            case.parents.extend_from_slice(tree.parents());
            case.cu_nodes.push(case.parents.len() as i32);
        }
        case
    }

    fn on_cpu(&self, stated: bool) -> Result<Found, String> {
        let trees = self.cu_nodes.len() - 1;
        let mut words = vec![0; trees * row_words(self.most)];
        let (mut rows, mut cu_rows) = (vec![0; self.parents.len()], vec![0; trees + 1]);
        let input = Input {
            parents: &self.parents,
            tokens: &self.tokens,
            cu_nodes: &self.cu_nodes,
            best: &self.best,
            stated: stated.then_some(Stated { nodes: &self.nodes, wanted: &self.wanted }),
            most: self.most,
        };
        cpu::forward(input, Output { words: &mut words, rows: &mut rows, cu_rows: &mut cu_rows })
            .map_err(text)?;
        Ok((words, rows, cu_rows))
    }

    fn on_device(&self, stream: &Arc<CudaStream>, stated: bool) -> Result<Found, String> {
        let trees = self.cu_nodes.len() - 1;
        let parents = stream.clone_htod(&self.parents).map_err(text)?;
        let tokens = stream.clone_htod(&self.tokens).map_err(text)?;
        let cu_nodes = stream.clone_htod(&self.cu_nodes).map_err(text)?;
        let best = stream.clone_htod(&self.best).map_err(text)?;
        let nodes = stream.clone_htod(&self.nodes).map_err(text)?;
        let wanted = stream.clone_htod(&self.wanted).map_err(text)?;
        let mut words = stream.clone_htod(&vec![u32::MAX; trees * row_words(self.most)]).map_err(text)?;
        let mut rows = stream.clone_htod(&vec![i32::MAX; self.parents.len()]).map_err(text)?;
        let mut cu_rows = stream.clone_htod(&vec![i32::MAX; trees + 1]).map_err(text)?;
        let buffers = Buffers {
            parents: parents.slice(..),
            tokens: tokens.slice(..),
            cu_nodes: cu_nodes.slice(..),
            best: best.slice(..),
            stated: stated.then(|| (nodes.slice(..), wanted.slice(..))),
            words: words.as_view_mut(),
            rows: rows.as_view_mut(),
            cu_rows: cu_rows.as_view_mut(),
        };
        launch::forward(stream, &self.cu_nodes, self.most, buffers).map_err(text)?;
        Ok((
            stream.clone_dtoh(&words).map_err(text)?,
            stream.clone_dtoh(&rows).map_err(text)?,
            stream.clone_dtoh(&cu_rows).map_err(text)?,
        ))
    }
}

fn equal(stream: &Arc<CudaStream>) -> Result<(), String> {
    let mut random = Random::new(71);
    for round in 0..60 {
        let trees = [1, 2, 3, 16, 17, 40][round % 6];
        let most_nodes = [1, 16, 64, 256][round % 4];
        let shapes =
            (0..trees).map(|_| DraftTree::random(1 + random.below(most_nodes), random.below(1 << 20) as u64));
        let shapes = shapes.collect::<Result<Vec<_>, _>>().map_err(text)?;
        let case = Case::new(&shapes, 1 + random.below(20), &mut random);
        for stated in [false, true] {
            if case.on_device(stream, stated)? != case.on_cpu(stated)? {
                return Err(format!(
                    "round {round}: {trees} trees, stated {stated}: other words than on the CPU"
                ));
            }
        }
    }
    Ok(())
}

fn chain(stream: &Arc<CudaStream>) -> Result<(), String> {
    let shape = DraftTree::chain(256).map_err(text)?;
    let mut case = Case::new(std::slice::from_ref(&shape), 256, &mut Random::new(5));
    for (row, best) in case.best.chunks_mut(4).enumerate() {
        (best[0], best[3]) = (0, case.tokens.get(row + 1).copied().unwrap_or(7));
    }
    let (words, rows, _) = case.on_device(stream, false)?;
    match words[0] == 256 && rows.iter().copied().eq(0..256) && words[2 + 256 + 255] == 7 {
        true => Ok(()),
        false => Err(format!("{} nodes visited", words[0])),
    }
}
