//! The accept walk as an op, and the copy of what it found that the host reads while the device goes on.

#[cfg(feature = "cuda")]
use candle_core::Storage;
use candle_core::{DType, Result, Tensor};
use canopy_kernels::AcceptedPaths;
use canopy_kernels::accept_walk::{self as kernel, Input, Output, Row, Stated};

use crate::check::arg;
use crate::wrap::WrapKernelErr;
use crate::{DevicePaths, DeviceTree};

const OP: &str = "accept-walk";

/// A model that says which children are accepted, in place of the target.
#[derive(Clone, Copy, Debug)]
pub struct StatedWalk<'a> {
    /// `[N]`: [`stated_node`](crate::stated_node) of every node.
    pub nodes: &'a [u32],
    /// `[B, 2, most]`: the ranks wanted by depth, behind nodes of rank 0 alone and behind others; -1 for none.
    pub wanted: &'a [i32],
}

/// What a walk found, where it was found.
#[derive(Debug)]
pub struct AcceptWalk {
    paths: DevicePaths,
    most: usize,
    words: Words,
}

#[derive(Debug)]
enum Words {
    Host(Vec<u32>),
    #[cfg(feature = "cuda")]
    Device(crate::cuda::walk::Copied),
}

impl AcceptWalk {
    /// The accepted paths, which commits take as they are. Trees whose walk failed have none.
    pub fn paths(&self) -> &DevicePaths {
        &self.paths
    }

    /// Waits for the walk, and for nothing that was launched behind it; one entry per tree.
    ///
    /// # Errors
    /// From the driver.
    #[cfg_attr(
        not(feature = "cuda"),
        expect(clippy::infallible_destructuring_match, reason = "there are words of two kinds on CUDA")
    )]
    pub fn wait(self) -> Result<Vec<Row>> {
        let words = match self.words {
            Words::Host(words) => words,
            #[cfg(feature = "cuda")]
            Words::Device(copied) => copied.wait()?,
        };
        words.chunks(kernel::row_words(self.most)).map(|words| Row::new(words).wrap()).collect()
    }
}

/// Walks the trees of `tree`, whose nodes carry `tokens`, by `best`, what [`top_tokens`](crate::top_tokens) gives for k = 1 of their rows'
/// logits; `most` nodes of a tree are visited at most. Within a pass's [`scope`](crate::Placed::scope) the tokens are those of its ids.
///
/// ```
/// use canopy_candle::{DeviceTree, DraftTree, TreeBatch, accept_walk, top_tokens};
/// use candle_core::{Device, Tensor};
///
/// // The root's children carry tokens 2 and 1; the target wants 1, then 0.
/// let tree = DraftTree::new(vec![-1, 0, 0]).unwrap();
/// let tree = DeviceTree::new(TreeBatch::single(tree, 0), &Device::Cpu)?;
/// let logits = Tensor::new(&[[0f32, 9., 1.], [0., 0., 9.], [9., 0., 1.]], &Device::Cpu)?;
/// let walk = accept_walk(&tree, &[0, 2, 1], &top_tokens(&logits, 1)?, 2, None)?;
/// let found = walk.wait()?;
/// assert_eq!((&found[0].path[..], &found[0].tokens[..]), (&[0, 2][..], &[1, 0][..]));
/// # Ok::<(), candle_core::Error>(())
/// ```
///
/// # Errors
/// Arguments whose lengths, dtypes or devices do not fit.
pub fn accept_walk(
    tree: &DeviceTree,
    tokens: &[u32],
    best: &Tensor,
    most: usize,
    stated: Option<StatedWalk<'_>>,
) -> Result<AcceptWalk> {
    tree.check_devices(OP, &[("best", best)])?;
    arg(OP, "best").dtype(best.dtype(), DType::U32)?;
    arg(OP, "best").shape(best.layout(), &[tree.host().rows(), kernel::BEST_WORDS])?;
    arg(OP, "best").contiguous(best.layout())?;
    arg(OP, "tokens").count(tokens.len(), tree.host().rows())?;
    #[cfg(feature = "cuda")]
    if let (Storage::Cuda(storage), layout) = (&*best.storage_and_layout().0, best.layout()) {
        let walk = crate::cuda::walk::Walk { op: OP, tree, tokens, best: (storage, layout), most, stated };
        let (paths, copied) = walk.run()?;
        return Ok(AcceptWalk { paths, most, words: Words::Device(copied) });
    }
    on_host(tree, tokens, &best.flatten_all()?.to_vec1()?, most, stated)
}

fn on_host(
    tree: &DeviceTree,
    tokens: &[u32],
    best: &[u32],
    most: usize,
    stated: Option<StatedWalk<'_>>,
) -> Result<AcceptWalk> {
    let batch = tree.host();
    let parents: Vec<i32> = batch.trees().iter().flat_map(|tree| tree.parents()).copied().collect();
    let stated = stated.map(|StatedWalk { nodes, wanted }| Stated { nodes, wanted });
    let input = Input { parents: &parents, tokens, cu_nodes: batch.cu_nodes(), best, stated, most };
    let mut words = vec![0; batch.sequences() * kernel::row_words(most)];
    let (mut rows, mut cu_rows) = (vec![0; batch.rows()], vec![0; batch.sequences() + 1]);
    let out = Output { words: &mut words, rows: &mut rows, cu_rows: &mut cu_rows };
    kernel::cpu::forward(input, out).wrap()?;
    let path = |words: &[u32]| Row::new(words).map(|row| if row.failed { Vec::new() } else { row.path });
    let paths = words.chunks(kernel::row_words(most)).map(path).collect::<canopy_kernels::Result<Vec<_>>>();
    let paths = AcceptedPaths::new(batch, &paths.wrap()?).wrap()?;
    Ok(AcceptWalk { paths: DevicePaths::new(paths, tree.device())?, most, words: Words::Host(words) })
}
