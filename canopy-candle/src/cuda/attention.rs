//! Launches of tree_attention and block_attention: bf16 queries and pools.

use candle_core::backend::BackendStorage;
use candle_core::cuda_backend::cudarc::driver::CudaView;
use candle_core::{CudaStorage, Layout, Result, Shape};
use canopy_kernels::AttnDims;
use canopy_kernels::block_attention::cpu::{BlockMask, DraftBlocks};
use canopy_kernels::block_attention::launch::{self as block, AttentionBuffers, Blocks};
use canopy_kernels::tree_attention::launch as tree;
use half::bf16;

use super::gdn::Source;
use super::{lists, memory, output, storage, view};
use crate::check::arg;
use crate::wrap::WrapKernelErr;
use crate::{DeviceTree, List};

/// What both attentions read; shapes are checked.
pub(crate) struct Operands<'a> {
    pub op: &'static str,
    pub dims: AttnDims,
    pub q: Source<'a>,
    pub k: Source<'a>,
    pub v: Source<'a>,
}

impl Operands<'_> {
    /// Attention of a batch of draft trees over `lens` committed rows.
    pub(crate) fn tree(&self, on_device: &DeviceTree, lens: &[i32]) -> Result<(CudaStorage, Shape)> {
        let batch = on_device.host();
        let stream = self.q.0.device().cuda_stream();
        self.run(tree::scratch_len(self.dims, batch), lens, |buffers| {
            tree::verify(&stream, self.dims, batch, on_device.on_device(self.op)?, buffers).wrap()
        })
    }

    /// Attention of draft blocks.
    pub(crate) fn blocks(&self, blocks: &DraftBlocks, mask: BlockMask) -> Result<(CudaStorage, Shape)> {
        let DraftBlocks { block_size, slots, context_lens } = blocks;
        let device = self.q.0.device();
        let on_device = lists::on_device(device, List::Slots, slots)?;
        let list = Blocks { block_size: *block_size, slots, on_device: on_device.first(slots.len()) };
        let scratch = block::scratch_len(self.dims, *block_size, slots.len());
        self.run(scratch, context_lens, |buffers| {
            block::forward(&device.cuda_stream(), self.dims, list, mask, None, buffers).wrap()
        })
    }

    fn run(
        &self,
        scratch: usize,
        lens: &[i32],
        launch: impl FnOnce(AttentionBuffers<'_, bf16>) -> Result<()>,
    ) -> Result<(CudaStorage, Shape)> {
        let (device, shape) = (self.q.0.device(), self.q.1.shape());
        let on_device = lists::on_device(device, List::Lens, lens)?;
        let mut scratch = output::<f32>(device, scratch)?;
        let mut out = output::<bf16>(device, shape.elem_count())?;
        launch(AttentionBuffers {
            q: self.view("q", self.q)?,
            k_cache: self.view("k_cache", self.k)?,
            v_cache: self.view("v_cache", self.v)?,
            capacity: self.k.1.dims()[1],
            lens: on_device.first(lens.len()),
            scratch: &mut scratch,
            out: out.slice_mut(..shape.elem_count()),
        })?;
        memory::keep(scratch);
        Ok(storage(device, out, shape.clone()))
    }

    fn view<'a>(
        &self,
        name: &'static str,
        (storage, layout): (&'a CudaStorage, &Layout),
    ) -> Result<CudaView<'a, bf16>> {
        view(arg(self.op, name), storage, layout)
    }
}
