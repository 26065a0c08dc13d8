//! tree_build: logits by slot, whose candidates give a tree of as many nodes as the scene's; places of the nodes, who sees whom and the plan as
//! numbers. A row that is left over has no number for a token.

use super::{Bound, Plane, Scene, Shape, Subject};
use crate::accept_walk::stated_node;
use crate::tree_build::{Draft, Input, Output, cpu, oracle};
use crate::tree_gdn::{Plan, Schedule};
use crate::{DraftTree, Result, TreeBatch, top_tokens};

/// Depths of a draft, logits of a row, and candidates of it.
const DEPTHS: usize = 3;
const VOCAB: usize = 9;
pub(in super::super) const K: usize = 8;

const MASK_WORDS: usize = DraftTree::MAX_NODES / 32;
/// Numbers of a node besides its mask: token, parent, rank and depth, position.
const OF_NODE: usize = 4;

pub(super) fn subjects() -> Vec<Box<dyn Subject>> {
    vec![Box::new(TreeBuild)]
}

struct TreeBuild;

/// What the kernels read of a scene.
pub(in super::super) struct Drafted {
    pub best: Vec<u32>,
    pub drafts: Vec<Option<Draft>>,
    /// What stands for the trees.
    pub brooms: TreeBatch,
    pub plan_at: Vec<i32>,
}

/// What they write, as the lists are before.
pub(in super::super) struct Lists {
    pub tokens: Vec<u32>,
    pub nodes: Vec<u32>,
    pub positions: Vec<i32>,
    pub parents: Vec<i32>,
    pub mask: Vec<u32>,
    pub plans: Vec<u32>,
}

impl Drafted {
    /// Hard scenes have few different logits, and thus ties.
    pub fn new(scene: &Scene) -> Result<Self> {
        let logit = |&x: &f32| if scene.shape.hard { x.round() } else { x };
        let logits: Vec<f32> = scene.input(0).iter().map(logit).collect();
        let mut best = vec![0; logits.len() / VOCAB * top_tokens::row_words(K)];
        top_tokens::cpu::forward(VOCAB, K, &logits, &mut best)?;
        let draft = |&slot: &i32| Some(Draft { first: slot as usize * DEPTHS, depths: DEPTHS });
        let broom = |tree: &DraftTree| DraftTree::broom(tree.len(), DEPTHS);
        let trees = scene.batch.trees().iter().map(broom).collect::<Result<Vec<_>>>()?;
        let mut plan_at = vec![0];
        for tree in &trees {
            let words = Plan::new(tree, Schedule::Levels).words().len() as i32;
            plan_at.push(plan_at[plan_at.len() - 1] + words);
        }
        Ok(Self {
            best,
            drafts: scene.batch.slots().iter().map(draft).collect(),
            brooms: TreeBatch::new(trees, scene.batch.slots().to_vec())?,
            plan_at,
        })
    }

    /// Lists of `word` everywhere, but for the roots' tokens.
    pub fn lists(&self, word: u32) -> Lists {
        let rows = self.brooms.rows();
        let mut tokens = vec![word; rows];
        self.brooms.iter().for_each(|(first, ..)| tokens[first] = root(self.brooms.cu_nodes(), first));
        Lists {
            tokens,
            nodes: vec![word; rows],
            positions: vec![word.cast_signed(); rows],
            parents: vec![word.cast_signed(); rows],
            mask: vec![word; rows * MASK_WORDS],
            plans: vec![word; self.plan_at[self.plan_at.len() - 1] as usize],
        }
    }
}

/// The token of a root: the nodes of its tree.
fn root(cu_nodes: &[i32], first: usize) -> u32 {
    let b = cu_nodes.iter().position(|&row| row as usize == first).unwrap_or(0);
    (cu_nodes[b + 1] - cu_nodes[b]) as u32
}

/// A number that stands for a plan, without the zeros behind it.
fn digest(plan: &[u32]) -> f32 {
    let end = plan.iter().rposition(|&word| word != 0).map_or(0, |last| last + 1);
    let mixed = plan[..end].iter().fold(1u64, |sum, &word| (sum * 31 + u64::from(word)) % 16_777_213);
    mixed as f32
}

/// The planes of what was written.
pub(in super::super) fn read(drafted: &Drafted, lists: &Lists, out: &mut [f32]) {
    let rows = drafted.brooms.rows();
    let (of_nodes, rest) = out.split_at_mut(rows * OF_NODE);
    let (masks, plans) = rest.split_at_mut(rows * 2 * MASK_WORDS);
    for (row, out) in of_nodes.chunks_mut(OF_NODE).enumerate() {
        let is_root = drafted.brooms.cu_nodes().contains(&(row as i32));
        let is_left_over = lists.parents[row] < 0 && !is_root;
        out[0] = if is_left_over { f32::NAN } else { lists.tokens[row] as f32 };
        out[1] = lists.parents[row] as f32;
        out[2] = lists.nodes[row] as f32;
        out[3] = lists.positions[row] as f32;
    }
    for (out, word) in masks.chunks_mut(2).zip(&lists.mask) {
        (out[0], out[1]) = ((word & 0xffff) as f32, (word >> 16) as f32);
    }
    for (b, ends) in drafted.plan_at.windows(2).enumerate() {
        let slot = drafted.brooms.slots()[b] as usize;
        plans[slot] = digest(&lists.plans[ends[0] as usize..ends[1] as usize]);
    }
}

impl Subject for TreeBuild {
    fn name(&self) -> String {
        "tree_build".into()
    }

    fn bound(&self) -> Bound {
        Bound::Element(0.0)
    }

    fn scene(&self, shape: &Shape) -> Result<Scene> {
        Ok(Scene::new(shape)?.with_slots("logits", DEPTHS * VOCAB, -2.0, 2.0))
    }

    fn planes(&self, scene: &Scene) -> Vec<Plane> {
        vec![
            Plane::rows("nodes", scene, OF_NODE),
            Plane::rows("mask", scene, 2 * MASK_WORDS),
            Plane::slots("plan", scene, 1),
        ]
    }

    fn run(&self, scene: &Scene, out: &mut [f32]) -> Result<()> {
        let drafted = Drafted::new(scene)?;
        let mut lists = drafted.lists(u32::MAX);
        let input = Input {
            k: K,
            best: &drafted.best,
            drafts: &drafted.drafts,
            stated: None,
            cu_nodes: scene.batch.cu_nodes(),
            lens: &scene.lens,
        };
        let Lists { tokens, nodes, positions, parents, mask, plans } = &mut lists;
        let plan_at = &drafted.plan_at;
        cpu::forward(input, Output { tokens, nodes, positions, parents, mask, plans, plan_at })?;
        read(&drafted, &lists, out);
        Ok(())
    }

    fn oracle(&self, scene: &Scene) -> Vec<f64> {
        let drafted = Drafted::new(scene).expect("a scene's candidates");
        let mut lists = drafted.lists(0);
        for (b, (first, tree, _)) in scene.batch.iter().enumerate() {
            let draft = drafted.drafts[b].expect("a draft of every tree");
            let taken = oracle::prefixes(K, &drafted.best, draft, None, tree.len() - 1);
            let number = |ranks: &[u32]| taken.iter().position(|other| other.ranks == ranks);
            for node in 0..tree.len() {
                let prefix = node.checked_sub(1).and_then(|at| taken.get(at));
                let ranks = prefix.map_or(&[][..], |prefix| &prefix.ranks);
                let above = ranks.split_last().map(|(_, above)| number(above).map_or(0, |at| at + 1));
                let row = first + node;
                lists.parents[row] = above.map_or(-1, |above| above as i32);
                let (rank, depth) = (ranks.last().copied().unwrap_or(0), ranks.len() as u32);
                lists.nodes[row] = stated_node(rank, depth);
                lists.positions[row] = scene.lens[b] + depth as i32;
                if let Some(prefix) = prefix {
                    lists.tokens[row] = prefix.tokens[prefix.tokens.len() - 1];
                }
                let seen = (1..=ranks.len()).filter_map(|depth| number(&ranks[..depth])).map(|at| at + 1);
                let own = if ranks.is_empty() { node } else { 0 };
                for other in seen.chain([own]) {
                    lists.mask[row * MASK_WORDS + other / 32] |= 1 << (other % 32);
                }
            }
            let plan = Plan::levels(&lists.parents[first..first + tree.len()]);
            lists.plans[drafted.plan_at[b] as usize..][..plan.words().len()].copy_from_slice(plan.words());
        }
        let mut out = vec![0.0; self.out_len(scene)];
        read(&drafted, &lists, &mut out);
        super::widened(&out)
    }
}
