//! Launch of the CUDA kernel. Every argument is checked before the launch.

use std::sync::Arc;

use cudarc::driver::{CudaStream, CudaView, DeviceRepr, DeviceSlice, LaunchConfig};

use super::{Draft, Lens, OP, check, value};
use crate::cuda::early::Launch;
use crate::cuda::{DeviceList, TreeOnDevice};
use crate::error::expect_len;
use crate::{DraftTree, Result, TreeBatch};

const THREADS: u32 = 128;

#[repr(C)]
#[derive(Clone, Copy, Debug)]
struct BuildArgs {
    k: u32,
    stated: u32,
}
// SAFETY: repr(C), 4-byte fields only; build.cu asserts the size.
unsafe impl DeviceRepr for BuildArgs {}

/// Device lists of one call; shapes as on the room's page.
#[derive(Clone, Copy, Debug)]
pub struct Buffers<'a> {
    /// `[R, 2 + 2 k]`.
    pub best: &'a CudaView<'a, u32>,
    /// [`Draft::words`].
    pub drafts: &'a DeviceList<i32>,
    /// `[D, k]` f64, two words each.
    pub stated: Option<&'a DeviceList<i32>>,
    /// `[B]`.
    pub lens: &'a DeviceList<i32>,
    /// `[N]`.
    pub tokens: &'a DeviceList<i32>,
    /// `[N]`.
    pub nodes: &'a DeviceList<i32>,
    /// `[N]`.
    pub positions: &'a DeviceList<i32>,
    /// The lists of `batch`, whose parents, masks and plans are replaced.
    pub tree: &'a TreeOnDevice,
}

/// Builds the trees of `batch` that have a draft, in place and in the stream's order; the others' lists stay. In the batch a tree with a draft is a
/// [`DraftTree::broom`] of its depths, which has room for it.
///
/// # Errors
/// Any wrong length, k beyond 64, a draft outside `best` or of more than 15 depths, another tree than a broom, before the launch.
pub fn forward(
    stream: &Arc<CudaStream>,
    k: usize,
    drafts: &[Option<Draft>],
    batch: &TreeBatch,
    buffers: Buffers<'_>,
) -> Result<()> {
    let Buffers { best, drafts: on_device, stated, lens, tokens, nodes, positions, tree } = buffers;
    let counts = Lens {
        best: best.len(),
        stated: stated.map(|stated| stated.len() / 2),
        lens: lens.len(),
        tokens: tokens.len(),
        nodes: nodes.len(),
        positions: positions.len(),
        parents: tree.parents.len(),
        mask: tree.mask.len(),
    };
    check(k, drafts, batch.cu_nodes(), &counts)?;
    expect_len(OP, "drafts on the device", &[drafts.len(), 2], on_device.len())?;
    for (draft, tree) in drafts.iter().zip(batch.trees()) {
        let Some(Draft { depths, .. }) = *draft else { continue };
        if *tree != DraftTree::broom(tree.len(), depths)? {
            let expected = format!("a broom of {} nodes and depth {depths} for a draft", tree.len());
            return value("batch", expected, format!("{:?}", tree.parents()));
        }
    }
    if drafts.iter().all(Option::is_none) {
        return Ok(());
    }
    let args = BuildArgs { k: k as u32, stated: stated.is_some().into() };
    let mut launch = Launch::new(stream, OP, "tree_build/build", "tree_build")?;
    // without a model the kernel does not read its place
    launch.value(&args).read(best).read(on_device).read(stated.unwrap_or(on_device)).read(&tree.cu_nodes);
    launch.read(lens).read(&tree.plan_at).read(tokens).read(nodes).read(positions);
    launch.read(&tree.parents).read(&tree.mask).read(&tree.plans);
    let config = LaunchConfig {
        grid_dim: (drafts.len() as u32, 1, 1),
        block_dim: (THREADS, 1, 1),
        shared_mem_bytes: 0,
    };
    // SAFETY: lengths and drafts checked above, and a broom's plan is the longest; nothing but kernels of this stream reads the lists, before
    // or after this launch.
    unsafe { launch.launch(config) }
}

#[cfg(test)]
mod tests {
    use std::io::Write;
    use std::path::{Path, PathBuf};
    use std::process::{Command, Stdio};

    use crate::DraftTree;
    use crate::tree::SplitMix64;
    use crate::tree_build::MOST_DEPTH;
    use crate::tree_gdn::Plan;

    /// Words of room for every plan: that of a broom of 256 nodes is shorter.
    const ROOM: usize = 8192;

    /// The planner of a CTA for threads of the host, by the compiler that nvcc needs too.
    fn compiled() -> PathBuf {
        let room = Path::new(env!("CARGO_MANIFEST_DIR"));
        let program = Path::new(env!("OUT_DIR")).join("plan_on_host");
        let compiler = std::env::var_os("CXX").unwrap_or_else(|| "c++".into());
        let output = Command::new(&compiler)
            .args(["-std=c++20", "-O1", "-Wall", "-Wextra", "-Werror", "-pthread", "-I"])
            .args([&room.join("include"), &room.join("src/tree_build/plan_on_host.cpp")])
            .arg("-o")
            .arg(&program)
            .output()
            .unwrap_or_else(|error| panic!("no C++ compiler, {compiler:?} ($CXX, else c++): {error}"));
        assert!(output.status.success(), "{}", String::from_utf8_lossy(&output.stderr));
        program
    }

    /// The plans of trees, or several trees, by a team of so many threads.
    fn planned(program: &Path, threads: usize, trees: &[Vec<i32>]) -> Vec<Vec<u32>> {
        let arguments = [threads.to_string(), ROOM.to_string()];
        let command =
            Command::new(program).args(arguments).stdin(Stdio::piped()).stdout(Stdio::piped()).spawn();
        let mut running = command.expect("the planner runs");
        let mut input = running.stdin.take().expect("piped");
        let lines: String = trees
            .iter()
            .map(|parents| {
                let parents: Vec<String> = parents.iter().map(i32::to_string).collect();
                format!("{} {}\n", parents.len(), parents.join(" "))
            })
            .collect();
        // its output may fill the pipe before it has read all
        let writer = std::thread::spawn(move || input.write_all(lines.as_bytes()));
        let output = running.wait_with_output().expect("the planner ends");
        assert!(output.status.success(), "{}", output.status);
        writer.join().expect("no panic").expect("all is read");
        let text = String::from_utf8(output.stdout).expect("numbers");
        let words = |line: &str| line.split_whitespace().map(|word| word.parse().expect("a word")).collect();
        text.lines().map(words).collect()
    }

    /// Trees as the builder takes them, best first: with rows that are left over in every third.
    fn built(random: &mut SplitMix64, number: usize) -> Vec<i32> {
        let nodes = 1 + random.below(DraftTree::MAX_NODES);
        let taken = if number.is_multiple_of(3) { 1 + random.below(nodes) } else { nodes };
        let (mut parents, mut depths) = (vec![-1], vec![0]);
        while parents.len() < taken {
            let deep = random.below(3) > 0;
            let parent = if deep { parents.len() - 1 } else { random.below(parents.len()) };
            if depths[parent] < MOST_DEPTH {
                parents.push(parent as i32);
                depths.push(depths[parent] + 1);
            }
        }
        parents.resize(nodes, -1);
        parents
    }

    #[test]
    fn a_ctas_plans_are_those_of_the_host_word_for_word() {
        let mut trees: Vec<Vec<i32>> = Vec::new();
        for nodes in [1, 2, 16, 31, 32, 33, 48, 64, 65, 100, 127, 128, 129, 200, 255, 256] {
            let mut shapes = vec![
                DraftTree::random(nodes, 5),
                DraftTree::broom(nodes, MOST_DEPTH),
                DraftTree::broom(nodes, 1),
            ];
            if nodes >= 16 {
                shapes.extend([DraftTree::bole(nodes, 3), DraftTree::bole(nodes, nodes as u64)]);
            }
            let shapes = shapes.into_iter().map(|tree| tree.expect("nodes within the limits"));
            trees.extend(
                shapes.filter(|tree| tree.max_depth() <= MOST_DEPTH).map(|tree| tree.parents().to_vec()),
            );
        }
        trees.extend((1..=MOST_DEPTH).map(|depth| (0..=depth as i32).map(|node| node - 1).collect()));
        let mut random = SplitMix64::new(11);
        trees.extend((0..120).map(|number| built(&mut random, number)));
        let moved = |parents: &&Vec<i32>| {
            let plan = Plan::levels(parents);
            let rows = plan.words()[4..].iter().flat_map(|word| word.to_le_bytes()).take(parents.len());
            rows.enumerate().any(|(node, row)| node != usize::from(row))
        };
        let of_many = trees.iter().filter(moved).count();
        assert!(of_many > 100, "{of_many} of {} trees are counted in another order", trees.len());
        let program = compiled();
        for threads in [1, 7, 128] {
            let got = planned(&program, threads, &trees);
            assert_eq!(got.len(), trees.len());
            for (got, parents) in got.iter().zip(&trees) {
                let want = Plan::levels(parents);
                let (of_plan, behind) = got.split_at(want.words().len());
                assert_eq!(of_plan, want.words(), "{threads} threads, {parents:?}");
                assert!(behind.len() == ROOM - of_plan.len() && behind.iter().all(|&word| word == 0));
            }
        }
    }
}
