//! tree_build.

use super::Kernel;
use super::buffers::{Gpu, Guarded};
use crate::Result;
use crate::contract::Gate::{self, Nonfinite, Repeat, Shapes};
use crate::contract::bound::Bound;
use crate::contract::scene::Scene;
use crate::contract::subjects::build::{Drafted, K, Lists, read};
use crate::cuda::{DeviceList, TreeLayout, Words};
use crate::error::Error;
use crate::tree_build::Draft;
use crate::tree_build::launch::{self, Buffers};

const FAULTS: &[(Gate, &str)] = &[
    (Nonfinite, "swallow"),
    (Repeat, "touched"),
    (Shapes, "off_by_one"),
    (Shapes, "row_order"),
    (Shapes, "dropped_slice"),
    (Shapes, "missed_node"),
    (Shapes, "short_path"),
];

pub(super) fn kernels(gpu: &Gpu) -> Vec<Kernel> {
    let kernel = Kernel::new(gpu, "tree_build", "tree_build", Bound::Element(0.0), build);
    vec![kernel.planted("tree_build/", FAULTS)]
}

/// The lists that are written lie among others, which stay.
fn build(gpu: &Gpu, scene: &Scene, out: &mut [f32]) -> Result<()> {
    let drafted = Drafted::new(scene)?;
    let before = drafted.lists(u32::MAX);
    let best = Guarded::<u32>::exactly(gpu, "best", &drafted.best)?;
    let mut words = Words::default();
    let rows = before.tokens.len();
    words.push([u32::MAX; 4], 4);
    let tokens = words.push(before.tokens.iter().copied(), rows);
    let nodes = words.push(before.nodes.iter().copied(), rows);
    let positions = words.push(before.positions.iter().copied(), rows);
    let lens = words.push(scene.lens.iter().copied(), scene.lens.len());
    let drafts = Draft::words(&drafted.drafts);
    let drafts = words.push(drafts.iter().copied(), drafts.len());
    let layout = TreeLayout::new(&drafted.brooms, &mut words);
    words.push([u32::MAX; 4], 4);
    let upload = words.upload(&gpu.0)?;
    let list = |place: &std::ops::Range<usize>| DeviceList::<i32>::new(&upload, place.clone());
    let (tree, plan_words) = (layout.on(&upload), before.plans.len());
    let buffers = Buffers {
        best: &best.view(),
        drafts: &list(&drafts),
        stated: None,
        lens: &list(&lens),
        tokens: &list(&tokens),
        nodes: &list(&nodes),
        positions: &list(&positions),
        tree: &tree,
    };
    launch::forward(&gpu.0, K, &drafted.drafts, &drafted.brooms, buffers)?;
    best.untouched(gpu)?;
    let now = gpu.down(&upload)?;
    let (parents, mask) = (tree.parents.place(), tree.mask.place());
    let plans = tree.plans.place().start..tree.plans.place().start + plan_words;
    let written = [&tokens, &nodes, &positions, parents, mask, &plans];
    let stays = |at: &usize| !written.iter().any(|place| place.contains(at));
    if let Some(at) = (0..now.len()).find(|at| stays(at) && now[*at] != words.as_slice()[*at]) {
        let (expected, got) = ("the lists of nodes alone written".into(), format!("word {at} too"));
        return Err(Error::Value { op: "contract", arg: "lists", expected, got });
    }
    let signed = |place: &std::ops::Range<usize>| -> Vec<i32> {
        now[place.clone()].iter().map(|word| word.cast_signed()).collect()
    };
    let lists = Lists {
        positions: signed(&positions),
        parents: signed(parents),
        mask: now[mask.clone()].to_vec(),
        plans: now[plans.clone()].to_vec(),
        tokens: now[tokens].to_vec(),
        nodes: now[nodes].to_vec(),
    };
    read(&drafted, &lists, out);
    Ok(())
}
