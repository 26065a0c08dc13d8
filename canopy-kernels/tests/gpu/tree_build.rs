//! Trees built on the device: every list and plan equal to the CPU forward's (which equals all prefixes sorted), what lies around them untouched,
//! over random candidates, ties, forbidden tokens, broken rows, fewer candidates than nodes, and stated log-probabilities; and again in place.

use std::sync::Arc;

use canopy_kernels::cuda::{DeviceList, Place, TreeLayout, Words};
use canopy_kernels::top_tokens::{self, row_words};
use canopy_kernels::tree_build::launch::{self, Buffers};
use canopy_kernels::tree_build::{Draft, Input, MOST_DEPTH, Output, cpu};
use canopy_kernels::tree_gdn::{Plan, Schedule};
use canopy_kernels::{DraftTree, TreeBatch};
use cudarc::driver::CudaStream;

use crate::Check;
use crate::data::{Random, text};

pub const TESTS: &[(&str, Check)] = &[("tree_build::lists_are_those_of_the_cpu", equal)];

const VOCAB: usize = 150;

struct Case {
    k: usize,
    best: Vec<u32>,
    drafts: Vec<Option<Draft>>,
    stated: Option<Vec<f64>>,
    batch: TreeBatch,
    lens: Vec<i32>,
}

/// Logits of `kind` 0: any; 1: few different ones; 2: mostly forbidden; 3: some rows are broken.
fn logits(kind: usize, rows: usize, random: &mut Random) -> Vec<f32> {
    let mut logits = random.normals(rows * VOCAB);
    for row in logits.chunks_mut(VOCAB) {
        match kind {
            1 => row.iter_mut().for_each(|x| *x = x.round()),
            2 => {
                let kept = random.below(VOCAB);
                (0..VOCAB).filter(|&at| at != kept && at % 11 > 0).for_each(|at| row[at] = f32::NEG_INFINITY);
            }
            3 if random.below(6) == 0 => row[random.below(VOCAB)] = f32::NAN,
            _ => {}
        }
    }
    logits
}

impl Case {
    fn new(round: usize, random: &mut Random) -> Result<Self, String> {
        let trees = 1 + random.below([1, 4, 16][round % 3]);
        let most = [2, 17, 65, 256][round / 3 % 4];
        let k = 1 + random.below([3, 16, 64][round % 3]);
        let (mut drafts, mut shapes, mut rows) = (Vec::new(), Vec::new(), 0);
        for _ in 0..trees {
            let (nodes, depths) = (1 + random.below(most), 1 + random.below(MOST_DEPTH));
            let draft = (random.below(7) > 0).then_some(Draft { first: rows, depths });
            let other = || DraftTree::random(nodes, 3);
            shapes.push(draft.map_or_else(other, |_| DraftTree::broom(nodes, depths)).map_err(text)?);
            drafts.push(draft);
            rows += depths;
        }
        let mut best = vec![0; rows * row_words(k)];
        let logits = logits(round % 4, rows, random);
        top_tokens::cpu::forward(VOCAB, k, &logits, &mut best).map_err(text)?;
        // eighths, so that many sums are equal
        let ln = |at: usize| -((at % k) as f64 + (at / k % 2) as f64) / 8.0;
        let stated = round.is_multiple_of(5).then(|| (0..MOST_DEPTH * k).map(ln).collect());
        let slots = (0..trees as i32).collect();
        let batch = TreeBatch::new(shapes, slots).map_err(text)?;
        let lens = (0..trees).map(|_| random.below(9000) as i32).collect();
        Ok(Self { k, best, drafts, stated, batch, lens })
    }

    /// The words of all lists before, and after a build on each side.
    fn check(&self, stream: &Arc<CudaStream>) -> Result<(), String> {
        let (rows, mut words) = (self.batch.rows(), Words::default());
        let before = |from: u32| (0..rows as u32).map(move |row| from + row);
        let tokens = words.push(before(50_000), rows);
        let nodes = words.push(before(60_000), rows);
        let positions = words.push(before(70_000), rows);
        let lens = words.push(self.lens.iter().copied(), self.lens.len());
        let drafts = Draft::words(&self.drafts);
        let drafts = words.push(drafts.iter().copied(), drafts.len());
        let stated = self.stated.as_ref().map(|stated| {
            let list = stated.iter().flat_map(|ln| [ln.to_bits() as u32, (ln.to_bits() >> 32) as u32]);
            words.push(list, 2 * stated.len())
        });
        let layout = TreeLayout::new(&self.batch, &mut words);
        let upload = words.upload(stream).map_err(text)?;
        let list = |place: &Place| DeviceList::<i32>::new(&upload, place.clone());
        let (tree, best) = (layout.on(&upload), stream.clone_htod(&self.best).map_err(text)?);
        let (drafts, stated) = (list(&drafts), stated.as_ref().map(list));
        let buffers = Buffers {
            best: &best.slice(..),
            drafts: &drafts,
            stated: stated.as_ref(),
            lens: &list(&lens),
            tokens: &list(&tokens),
            nodes: &list(&nodes),
            positions: &list(&positions),
            tree: &tree,
        };
        let want = self.on_cpu(
            &words,
            [&tokens, &nodes, &positions],
            [tree.parents.place(), tree.mask.place(), tree.plans.place()],
        )?;
        for again in [false, true] {
            launch::forward(stream, self.k, &self.drafts, &self.batch, buffers).map_err(text)?;
            let got = stream.clone_dtoh(&*upload).map_err(text)?;
            if let Some(at) = (0..want.len()).find(|&at| got[at] != want[at]) {
                return Err(format!(
                    "word {at} is {:#x}, on the CPU {:#x}, again: {again}",
                    got[at], want[at]
                ));
            }
        }
        Ok(())
    }

    fn on_cpu(
        &self,
        words: &Words,
        [tokens, nodes, positions]: [&Place; 3],
        [parents, mask, plans]: [&Place; 3],
    ) -> Result<Vec<u32>, String> {
        let mut all = words.as_slice().to_vec();
        let of = |place: &Place, all: &[u32]| all[place.clone()].to_vec();
        let signed = |place: &Place, all: &[u32]| {
            all[place.clone()].iter().map(|word| word.cast_signed()).collect::<Vec<i32>>()
        };
        let mut plan_at = vec![0];
        for tree in self.batch.trees() {
            let plan = Plan::new(tree, Schedule::for_tree(tree));
            plan_at.push(plan_at[plan_at.len() - 1] + plan.words().len() as i32);
        }
        let (mut to_tokens, mut to_nodes, mut to_mask, mut to_plans) =
            (of(tokens, &all), of(nodes, &all), of(mask, &all), of(plans, &all));
        let (mut to_positions, mut to_parents) = (signed(positions, &all), signed(parents, &all));
        let input = Input {
            k: self.k,
            best: &self.best,
            drafts: &self.drafts,
            stated: self.stated.as_deref(),
            cu_nodes: self.batch.cu_nodes(),
            lens: &self.lens,
        };
        let out = Output {
            tokens: &mut to_tokens,
            nodes: &mut to_nodes,
            positions: &mut to_positions,
            parents: &mut to_parents,
            mask: &mut to_mask,
            plans: &mut to_plans,
            plan_at: &plan_at,
        };
        cpu::forward(input, out).map_err(text)?;
        let bits = |list: &[i32]| list.iter().map(|word| word.cast_unsigned()).collect::<Vec<u32>>();
        for (place, list) in [
            (tokens, to_tokens),
            (nodes, to_nodes),
            (positions, bits(&to_positions)),
            (parents, bits(&to_parents)),
            (mask, to_mask),
            (plans, to_plans),
        ] {
            all[place.clone()].copy_from_slice(&list);
        }
        Ok(all)
    }
}

fn equal(stream: &Arc<CudaStream>) -> Result<(), String> {
    let mut random = Random::new(37);
    let mut depth_first = 0;
    for round in 0..240 {
        let case = Case::new(round, &mut random)?;
        let drafted = case.batch.trees().iter().zip(&case.drafts).filter(|(_, draft)| draft.is_some());
        depth_first += drafted.filter(|(tree, _)| tree.len() > 32).count();
        case.check(stream).map_err(|error| format!("round {round}, k {}: {error}", case.k))?;
    }
    if depth_first < 100 {
        return Err(format!("{depth_first} plans that do not count in rows' order show little"));
    }
    Ok(())
}
