//! Passes that run again and again with other contents in the same shapes: on CUDA they are recorded as graphs, so that a later run is one
//! launch.
//!
//! A pass gets what changes from run to run (trees, accepted paths, [`List`]s) as [`PassInputs`], which go to the device in one copy. The
//! second pass with launches like an earlier one's is recorded; from the third on the copy replaces the recording's inputs and its graph is
//! launched. A graph makes the launches that the pass made, over the same inputs, so its bits are the pass's.

use std::sync::Arc;

use candle_core::{DType, Device, Error, Result, Tensor};
use canopy_kernels::{AcceptedPaths, GdnDims, TreeBatch};

use crate::check::arg;
use crate::{CacheRows, DevicePaths, DeviceTree, TreeDraft};

/// The result of a caller's work, whose errors candle's turn into.
pub(crate) type Outcome<T, E> = std::result::Result<T, E>;

/// A list that ops take as a slice and read on the device.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash)]
pub enum List {
    /// Ids of a lookup.
    Ids,
    /// Positions of rows.
    Positions,
    /// Committed or context rows of every sequence.
    Lens,
    /// Where rows go in a pool.
    Destinations,
    /// Slots of draft blocks.
    Slots,
    /// Ranks and depths of nodes, where a model says what is accepted.
    Nodes,
    /// The ranks that it wants.
    Wanted,
    /// Where drafted ids come from.
    Sources,
    /// What trees are built from.
    Drafts,
    /// Stated log-probabilities of their candidates.
    LogProbs,
}

/// Trees that the device builds from a draft before a pass reads them.
#[derive(Clone, Copy, Debug)]
pub struct BuiltTrees<'a> {
    /// `[B]`: the rows of the best tokens that a tree is built from; those without are as they were given. A tree that is built is given as
    /// [`DraftTree::broom`](crate::DraftTree::broom) of its nodes and depths.
    pub drafts: &'a [Option<TreeDraft>],
    /// `[N]`: [`stated_node`](crate::stated_node) of every node of the other trees.
    pub nodes: &'a [u32],
    /// `[D, k]`: log-probabilities by depth and rank in place of the drafter's own.
    pub stated: Option<&'a [f64]>,
}

/// What a pass reads besides weights and pools.
#[derive(Debug)]
pub struct PassInputs {
    pub(crate) device: Device,
    pub(crate) batch: Option<(TreeBatch, GdnDims)>,
    pub(crate) paths: Option<AcceptedPaths>,
    pub(crate) lists: Vec<(List, Arc<[i32]>)>,
    /// Best tokens that ids and trees come from.
    #[cfg_attr(
        not(feature = "cuda"),
        expect(dead_code, reason = "the CPU's ops take ids from the host alone")
    )]
    pub(crate) drafted: Option<Tensor>,
    #[cfg_attr(
        not(feature = "cuda"),
        expect(dead_code, reason = "the CPU's ops take trees from the host alone")
    )]
    pub(crate) built: Vec<Option<TreeDraft>>,
    #[cfg_attr(
        not(feature = "cuda"),
        expect(dead_code, reason = "recordings depend on it, and are made on CUDA alone")
    )]
    pub(crate) tag: Vec<u64>,
}

impl PassInputs {
    /// Nothing yet.
    pub fn new(device: &Device) -> Self {
        Self {
            device: device.clone(),
            batch: None,
            paths: None,
            lists: Vec::new(),
            drafted: None,
            built: Vec::new(),
            tag: Vec::new(),
        }
    }

    /// Trees, verified by layers of these sizes.
    #[must_use]
    pub fn with_trees(self, batch: TreeBatch, dims: GdnDims) -> Self {
        Self { batch: Some((batch, dims)), ..self }
    }

    /// Accepted paths.
    #[must_use]
    pub fn with_paths(self, paths: AcceptedPaths) -> Self {
        Self { paths: Some(paths), ..self }
    }

    /// A list; the CPU needs none of them.
    #[must_use]
    pub fn with_list(mut self, what: List, list: &[i32]) -> Self {
        if !self.device.is_cpu() {
            self.lists.push((what, list.into()));
        }
        self
    }

    /// Token ids, as a list.
    #[must_use]
    pub fn with_ids(self, ids: &[u32]) -> Self {
        if self.device.is_cpu() {
            return self;
        }
        let ids: Vec<i32> = ids.iter().map(|id| id.cast_signed()).collect();
        self.with_list(List::Ids, &ids)
    }

    /// Has the ids come from a draft before the pass reads them: `best` is what [`top_tokens`](crate::top_tokens) gave, and
    /// [`drafted_source`](crate::drafted_source) or -1, which keeps an id, is a source. The CPU's ops take ids from the host alone.
    #[must_use]
    pub fn with_drafted_ids(self, best: &Tensor, sources: &[i32]) -> Self {
        Self { drafted: Some(best.clone()), ..self.with_list(List::Sources, sources) }
    }

    /// Has trees come from a draft before the pass reads them: `best` is what [`top_tokens`](crate::top_tokens) gave. Ids, positions and
    /// committed rows must be among the lists, and are replaced with parents and masks. The CPU's ops take trees from the host alone.
    #[must_use]
    pub fn with_built_trees(self, best: &Tensor, trees: BuiltTrees<'_>) -> Self {
        let BuiltTrees { drafts, nodes, stated } = trees;
        let nodes: Vec<i32> = nodes.iter().map(|node| node.cast_signed()).collect();
        let inputs = self.with_list(List::Nodes, &nodes).with_list(List::Drafts, &TreeDraft::words(drafts));
        let words = |ln: &f64| [ln.to_bits() as i32, (ln.to_bits() >> 32) as i32];
        let log_probs = stated.map(|stated| stated.iter().flat_map(words).collect::<Vec<_>>());
        let inputs = match log_probs {
            Some(log_probs) => inputs.with_list(List::LogProbs, &log_probs),
            None => inputs,
        };
        Self { drafted: Some(best.clone()), built: drafts.to_vec(), ..inputs }
    }

    /// Where rows go in pools of `capacity` rows a slot, as a list.
    #[must_use]
    pub fn with_destinations(self, rows: CacheRows<'_>, capacity: usize) -> Self {
        if self.device.is_cpu() {
            return self;
        }
        self.with_list(List::Destinations, &rows.destinations(capacity))
    }

    /// What the pass's launches depend on besides the shapes above.
    #[must_use]
    pub fn tagged(self, tag: impl Into<Vec<u64>>) -> Self {
        Self { tag: tag.into(), ..self }
    }

    /// The trees.
    pub fn batch(&self) -> Option<&TreeBatch> {
        self.batch.as_ref().map(|(batch, _)| batch)
    }

    /// Puts everything on the device.
    fn place(&self) -> Result<Placed> {
        #[cfg(feature = "cuda")]
        if let Device::Cuda(device) = &self.device {
            let stream = device.cuda_stream();
            let staged = crate::cuda::inputs::Staged::new(&stream, self)?;
            let placed = staged.place(self, &staged.upload(&stream)?);
            placed.fill(self)?;
            return Ok(placed);
        }
        let tree = self.batch().map(|batch| DeviceTree::new(batch.clone(), &self.device));
        let paths = self.paths.clone().map(|paths| DevicePaths::new(paths, &self.device));
        Ok(Placed {
            tree: tree.transpose()?,
            paths: paths.transpose()?,
            #[cfg(feature = "cuda")]
            lists: Vec::new(),
        })
    }
}

/// [`PassInputs`] on their device.
#[derive(Debug)]
pub struct Placed {
    pub(crate) tree: Option<DeviceTree>,
    pub(crate) paths: Option<DevicePaths>,
    #[cfg(feature = "cuda")]
    pub(crate) lists: Vec<crate::cuda::lists::Placed>,
}

impl Placed {
    /// The trees.
    ///
    /// # Errors
    /// When the inputs had none.
    pub fn tree(&self) -> Result<&DeviceTree> {
        self.tree.as_ref().map_or_else(|| missing("trees"), Ok)
    }

    /// The accepted paths.
    ///
    /// # Errors
    /// When the inputs had none.
    pub fn paths(&self) -> Result<&DevicePaths> {
        self.paths.as_ref().map_or_else(|| missing("paths"), Ok)
    }

    /// Copies a list from the device, as what the device put into it is; `None` when it is not there. Waits for everything launched.
    ///
    /// # Errors
    /// From the driver.
    pub fn read(&self, what: List) -> Result<Option<Vec<i32>>> {
        #[cfg(feature = "cuda")]
        if let Some(placed) = self.lists.iter().find(|placed| placed.what == what) {
            return placed.read().map(Some);
        }
        let _ = what;
        Ok(None)
    }

    /// Runs `work`, whose ops find the lists on the device: a pass's own work, and what follows it over the same inputs.
    pub fn scope<T>(&self, work: impl FnOnce() -> T) -> T {
        #[cfg(feature = "cuda")]
        return crate::cuda::lists::with(self.lists.clone(), work);
        #[cfg(not(feature = "cuda"))]
        work()
    }
}

/// An op's result, which a pass that is being recorded keeps until it has been.
pub(crate) fn kept(made: Tensor) -> Result<Tensor> {
    #[cfg(feature = "cuda")]
    return crate::cuda::memory::kept(made);
    #[cfg(not(feature = "cuda"))]
    Ok(made)
}

/// `x` in f32; on CUDA, of contiguous bf16, in memory that a recorded pass keeps, as that of `Tensor::to_dtype` is not.
///
/// # Errors
/// From the device.
pub fn widened(x: &Tensor) -> Result<Tensor> {
    #[cfg(feature = "cuda")]
    if x.device().is_cuda() && x.dtype() == DType::BF16 && x.is_contiguous() && x.elem_count() > 0 {
        return x.apply_op1_no_bwd(&crate::cuda::cast::ToF32).and_then(kept);
    }
    x.to_dtype(DType::F32)
}

fn missing<T>(name: &'static str) -> Result<T> {
    arg("pass", name).refuse(format_args!("some among its inputs"), format_args!("none"))
}

/// What a pass gave.
#[derive(Debug)]
pub struct Ran<T> {
    /// Its value; a recording's is the same one at every run, and what lies on the device in it is that run's until the next run of any
    /// pass of the same [`Passes`].
    pub value: Arc<T>,
    /// Whether a recording ran.
    pub recording: bool,
    /// Why a pass that was due could not be recorded; it ran nevertheless.
    pub refused: Option<String>,
    /// Its inputs, for what follows it; a recording's are this run's until its next one.
    pub placed: Placed,
}

/// How passes ran.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub struct PassCounts {
    /// Launched as a graph.
    pub replayed: u64,
    /// Recorded, and then launched for the first time.
    pub recorded: u64,
    /// Launched kernel by kernel.
    pub plain: u64,
    /// Recordings that failed; the pass ran kernel by kernel.
    pub refused: u64,
    /// Recordings kept.
    pub kept: usize,
    /// Bytes of device memory that the recordings share.
    pub bytes: usize,
}

impl std::ops::AddAssign for PassCounts {
    fn add_assign(&mut self, other: Self) {
        self.replayed += other.replayed;
        self.recorded += other.recorded;
        self.plain += other.plain;
        self.refused += other.refused;
        self.kept += other.kept;
        self.bytes += other.bytes;
    }
}

/// Runs passes of one kind, and records those that come again where the device can.
pub struct Passes<T> {
    #[cfg(feature = "cuda")]
    recordings: Option<crate::cuda::passes::Recordings<T>>,
    #[cfg(not(feature = "cuda"))]
    value: std::marker::PhantomData<fn() -> T>,
}

impl<T> std::fmt::Debug for Passes<T> {
    fn fmt(&self, f: &mut std::fmt::Formatter<'_>) -> std::fmt::Result {
        f.debug_tuple("Passes").field(&self.counts()).finish()
    }
}

impl<T> Passes<T> {
    /// Passes that are never recorded.
    pub fn plain() -> Self {
        Self {
            #[cfg(feature = "cuda")]
            recordings: None,
            #[cfg(not(feature = "cuda"))]
            value: std::marker::PhantomData,
        }
    }

    /// Passes of which the `most` last used recordings are kept; on the CPU, [`Self::plain`].
    ///
    /// # Errors
    /// From the driver.
    pub fn recorded(device: &Device, most: usize) -> Result<Self> {
        #[cfg(feature = "cuda")]
        if let Device::Cuda(device) = device {
            return Ok(Self { recordings: Some(crate::cuda::passes::Recordings::new(device, most)?) });
        }
        let _ = (device, most);
        Ok(Self::plain())
    }

    /// How passes ran so far.
    pub fn counts(&self) -> PassCounts {
        #[cfg(feature = "cuda")]
        if let Some(recordings) = &self.recordings {
            return recordings.counts();
        }
        PassCounts::default()
    }

    /// Forgets all recordings, as when `work` has changed.
    pub fn clear(&mut self) {
        #[cfg(feature = "cuda")]
        if let Some(recordings) = &mut self.recordings {
            recordings.clear();
        }
    }

    /// Runs a pass: `work` over its inputs, or a recording of it. `work` must launch the same kernels over the same weights and pools whenever
    /// the inputs' shapes and tag are the same, read nothing from the device, and check on the host what a recording will not check again.
    ///
    /// # Errors
    /// Those of `work`; what a recording cannot hold is no error, the pass runs without.
    pub fn run<E: From<Error> + std::fmt::Display>(
        &mut self,
        inputs: &PassInputs,
        work: impl Fn(&Placed) -> Outcome<T, E>,
    ) -> Outcome<Ran<T>, E> {
        #[cfg(feature = "cuda")]
        if let Some(recordings) = &mut self.recordings {
            return recordings.run(inputs, work);
        }
        let placed = inputs.place()?;
        let value = Arc::new(placed.scope(|| work(&placed))?);
        Ok(Ran { value, recording: false, refused: None, placed })
    }
}
