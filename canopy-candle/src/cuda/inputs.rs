//! What a pass reads besides weights and pools, side by side in one upload.

use std::sync::Arc;

use candle_core::backend::BackendStorage;
use candle_core::cuda_backend::cudarc::driver::{CudaSlice, CudaStream};
use candle_core::{Device, Result, Storage};
use canopy_kernels::cuda::{DeviceList, PathsLayout, Place, Words};
use canopy_kernels::top_tokens::row_words;
use canopy_kernels::tree_gdn::dispatch::Design;
use canopy_kernels::{drafted_tokens, tree_build};

use super::parts::{self, BatchLayout};
use super::{lists, view};
use crate::check::{Arg, arg};
use crate::recorded::{List, PassInputs, Placed};
use crate::wrap::WrapKernelErr;
use crate::{DevicePaths, DeviceTree};

const OP: &str = "pass";
const NAME: Arg = arg(OP, "drafts");

/// All that the launches of a pass depend on: passes of one key differ in what their lists hold.
#[derive(Clone, Debug, PartialEq, Eq, Hash)]
pub(crate) struct PassKey {
    batch: Option<BatchLayout>,
    designs: [Option<Design>; 2],
    /// Fewest and most rows of a sequence.
    counts: [usize; 2],
    paths: Option<PathsLayout>,
    lists: Vec<(List, Place)>,
    tag: Vec<u64>,
}

/// Inputs ready to be uploaded.
pub(crate) struct Staged {
    words: Words,
    key: PassKey,
}

impl Staged {
    /// Lays the lists out.
    pub(crate) fn new(stream: &Arc<CudaStream>, inputs: &PassInputs) -> Result<Self> {
        let mut words = Words::default();
        let (mut batch, mut designs, mut counts) = (None, [None, None], [0, 0]);
        if let Some((trees, dims)) = &inputs.batch {
            batch = Some(BatchLayout::new(stream, trees, &mut words).wrap()?);
            designs = parts::designs(stream, *dims, trees).wrap()?;
            let lens = || trees.trees().iter().map(|tree| tree.len());
            counts = [lens().min().unwrap_or(0), lens().max().unwrap_or(0)];
        }
        let paths = inputs.paths.as_ref().map(|paths| PathsLayout::new(paths, &mut words));
        let mut push =
            |(what, list): &(List, Arc<[i32]>)| (*what, words.push(list.iter().copied(), list.len()));
        let lists = inputs.lists.iter().map(&mut push).collect();
        let key = PassKey { batch, designs, counts, paths, lists, tag: inputs.tag.clone() };
        Ok(Self { words, key })
    }

    /// What the pass can share a recording with.
    pub(crate) fn key(&self) -> &PassKey {
        &self.key
    }

    /// A copy on the device.
    pub(crate) fn upload(&self, stream: &Arc<CudaStream>) -> Result<Arc<CudaSlice<u32>>> {
        self.words.upload(stream).wrap()
    }

    /// Replaces the upload of other inputs of the same key.
    pub(crate) fn replace(&self, stream: &Arc<CudaStream>, upload: &CudaSlice<u32>) -> Result<()> {
        self.words.replace(stream, upload).wrap()
    }

    /// The inputs as ops take them, over an upload of them.
    pub(crate) fn place(&self, inputs: &PassInputs, upload: &Arc<CudaSlice<u32>>) -> Placed {
        let device: &Device = &inputs.device;
        let tree = inputs.batch.as_ref().zip(self.key.batch.as_ref());
        let paths = inputs.paths.as_ref().zip(self.key.paths.as_ref());
        let lists =
            inputs.lists.iter().zip(&self.key.lists).map(|((what, host), (_, place))| lists::Placed {
                what: *what,
                host: host.clone(),
                on_device: DeviceList::new(upload, place.clone()),
            });
        Placed {
            tree: tree
                .map(|((batch, _), layout)| DeviceTree::placed(batch.clone(), device, layout.on(upload))),
            paths: paths.map(|(host, layout)| DevicePaths::placed(host.clone(), device, layout.on(upload))),
            lists: lists.collect(),
        }
    }
}

impl Placed {
    /// Puts what comes from a draft into its lists, in place and in the stream's order: ids, and trees.
    pub(crate) fn fill(&self, inputs: &PassInputs) -> Result<()> {
        let Some(best) = &inputs.drafted else { return Ok(()) };
        let (storage, layout) = best.storage_and_layout();
        let Storage::Cuda(storage) = &*storage else {
            return NAME.refuse(format_args!("best tokens on CUDA"), format_args!("others"));
        };
        let k = layout.dims().last().map_or(0, |words| words.saturating_sub(row_words(0)) / 2);
        let (stream, best) = (storage.device().cuda_stream(), view::<u32>(NAME, storage, layout)?);
        let ids = self.drafted_list(List::Ids)?;
        if let Ok(sources) = self.drafted_list(List::Sources) {
            let sources = (&*sources.host, &sources.on_device);
            drafted_tokens::launch::forward(&stream, k, &best, sources, &ids.on_device).wrap()?;
        }
        if inputs.built.is_empty() {
            return Ok(());
        }
        let list = |what| self.drafted_list(what).map(|placed| &placed.on_device);
        let tree = self.tree()?;
        let (drafts, nodes) = (list(List::Drafts)?, list(List::Nodes)?);
        let (lens, positions) = (list(List::Lens)?, list(List::Positions)?);
        let build = |tree_on_device| {
            let buffers = tree_build::launch::Buffers {
                best: &best,
                drafts,
                stated: list(List::LogProbs).ok(),
                lens,
                tokens: &ids.on_device,
                nodes,
                positions,
                tree: tree_on_device,
            };
            tree_build::launch::forward(&stream, k, &inputs.built, tree.host(), buffers).wrap()
        };
        build(tree.on_device(OP)?)?;
        match tree.parts(OP)? {
            // trees that are solved beside chains that are walked have lists of their own
            [Some(solved), Some(_)] => build(solved),
            _ => Ok(()),
        }
    }

    fn drafted_list(&self, what: List) -> Result<&lists::Placed> {
        match self.lists.iter().find(|placed| placed.what == what) {
            Some(placed) => Ok(placed),
            None => NAME.refuse(format_args!("{what:?} among the lists"), format_args!("none")),
        }
    }
}
