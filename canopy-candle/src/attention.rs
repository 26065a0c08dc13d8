//! tree_attention and block_attention as ops.

use std::borrow::Cow;

#[cfg(feature = "cuda")]
use candle_core::CudaStorage;
use candle_core::backend::BackendStorage;
use candle_core::{CpuStorage, CustomOp3, DType, Layout, Result, Shape, Tensor};
use canopy_kernels::block_attention::cpu::{BlockMask, DraftBlocks};
use canopy_kernels::tree_attention::cpu::AttentionInput;
use canopy_kernels::{AttnDims, TreeBatch, block_attention as block_kernel, tree_attention as tree_kernel};

use crate::DeviceTree;
use crate::check::{Arg, arg};
use crate::recorded::kept;
use crate::slices::{row_major, storage_from, values};
use crate::tree::check_devices;
use crate::wrap::WrapKernelErr;

const TREE: &str = "tree-attention";
const BLOCK: &str = "block-attention";

/// Attention of every drafted row over its sequence's committed keys and then its own root-to-row path.
///
/// `q` `[N, Hq, D]` (RoPE applied); `k_cache`, `v_cache` `[slots, capacity, Hkv, D]` with this round's rows already
/// at `prefix_lens[b] + node`; f32, bf16 or f16 in any layout. Contiguous f32 caches are read where they are; of
/// others the rows in use are widened to f32 once per call. On CUDA the caches are contiguous bf16 and q is rounded to bf16. Gives
/// `[N, Hq, D]` in q's dtype.
///
/// ```
/// use canopy_candle::{AttnDims, DeviceTree, DraftTree, TreeBatch, tree_attention};
/// use candle_core::{DType, Device, Tensor};
///
/// let (dev, dims) = (Device::Cpu, AttnDims::new(1, 1, 2).unwrap());
/// let tree = DraftTree::new(vec![-1, 0, 0]).unwrap();
/// let tree = DeviceTree::new(TreeBatch::single(tree, 0), &dev)?;
/// let q = Tensor::zeros((3, 1, 2), DType::F32, &dev)?; // equal scores: the mean of the visible values
/// let k = Tensor::zeros((1, 4, 1, 2), DType::F32, &dev)?;
/// let v = Tensor::new(&[[8f32, 0.], [2., 0.], [5., 0.], [50., 0.]], &dev)?.reshape((1, 4, 1, 2))?;
/// let o = tree_attention(&tree, dims, &[1], &q, &k, &v)?.flatten_all()?.to_vec1::<f32>()?;
/// assert!((o[0] - 5.).abs() < 1e-5 && (o[2] - 5.).abs() < 1e-5 && (o[4] - 20.).abs() < 1e-5);
/// # Ok::<(), candle_core::Error>(())
/// ```
///
/// # Errors
/// A shape, dtype or device that differs from the above, a slot outside the pool, or rows beyond its capacity.
pub fn tree_attention(
    tree: &DeviceTree,
    dims: AttnDims,
    prefix_lens: &[i32],
    q: &Tensor,
    k_cache: &Tensor,
    v_cache: &Tensor,
) -> Result<Tensor> {
    tree.check_devices(TREE, &[("q", q), ("k_cache", k_cache), ("v_cache", v_cache)])?;
    let op = TreeAttention { tree, dims, prefix_lens };
    on_device(q, |q| q.apply_op3_no_bwd(k_cache, v_cache, &op).and_then(kept))
}

struct TreeAttention<'a> {
    tree: &'a DeviceTree,
    dims: AttnDims,
    prefix_lens: &'a [i32],
}

impl TreeAttention<'_> {
    /// Both devices' checks; returns how many rows of every sequence's slot are read.
    fn check(&self, q: (DType, &Layout), k: (DType, &Layout), v: (DType, &Layout)) -> Result<Vec<usize>> {
        let batch = self.tree.host();
        check_operands(TREE, self.dims, batch.rows(), q, k, v)?;
        batch.check_slots(TREE, k.1.dims()[0]).wrap()?;
        arg(TREE, "prefix_lens").count(self.prefix_lens.len(), batch.sequences())?;
        let nodes = batch.trees().iter().map(|tree| tree.len());
        check_lens(arg(TREE, "prefix_lens"), self.prefix_lens, batch.slots(), nodes, k.1.dims()[1])
    }
}

impl CustomOp3 for TreeAttention<'_> {
    fn name(&self) -> &'static str {
        TREE
    }

    fn cpu_fwd(
        &self,
        q: &CpuStorage,
        q_l: &Layout,
        k: &CpuStorage,
        k_l: &Layout,
        v: &CpuStorage,
        v_l: &Layout,
    ) -> Result<(CpuStorage, Shape)> {
        let lens = self.check((q.dtype(), q_l), (k.dtype(), k_l), (v.dtype(), v_l))?;
        let queries = values(arg(TREE, "q"), q, q_l)?;
        let batch = self.tree.host();
        let caches = Caches::new(TREE, (k, k_l), (v, v_l), batch.slots(), &lens)?;
        let mut out = vec![0f32; queries.len()];
        let run = |batch: &TreeBatch, out: &mut [f32]| {
            tree_kernel::cpu::verify(self.dims, batch, self.prefix_lens, caches.input(&queries), out).wrap()
        };
        match &caches.slots {
            None => run(batch, &mut out)?,
            Some(slots) => run(&TreeBatch::new(batch.trees().to_vec(), slots.clone()).wrap()?, &mut out)?,
        }
        Ok((storage_from(out, q.dtype()), q_l.shape().clone()))
    }

    #[cfg(feature = "cuda")]
    fn cuda_fwd(
        &self,
        q: &CudaStorage,
        q_l: &Layout,
        k: &CudaStorage,
        k_l: &Layout,
        v: &CudaStorage,
        v_l: &Layout,
    ) -> Result<(CudaStorage, Shape)> {
        self.check((q.dtype(), q_l), (k.dtype(), k_l), (v.dtype(), v_l))?;
        let Self { tree, dims, prefix_lens } = *self;
        let operands =
            crate::cuda::attention::Operands { op: TREE, dims, q: (q, q_l), k: (k, k_l), v: (v, v_l) };
        operands.tree(tree, prefix_lens)
    }
}

/// Attention of every draft block's rows over the sequence's context (optionally a window of it) and then the block
/// itself, causal or not.
///
/// `q` `[B block_size, Hq, D]`; `k_cache`, `v_cache` `[slots, capacity, Hkv, D]` with the block's own rows right
/// after its context; dtypes and layouts as in [`tree_attention`]. Gives `[B block_size, Hq, D]` in q's dtype.
///
/// ```
/// use canopy_candle::{AttnDims, BlockMask, DraftBlocks, block_attention};
/// use candle_core::{DType, Device, Tensor};
///
/// let (dev, dims) = (Device::Cpu, AttnDims::new(1, 1, 2).unwrap());
/// let blocks = DraftBlocks { block_size: 2, slots: vec![0], context_lens: vec![1] };
/// let q = Tensor::zeros((2, 1, 2), DType::F32, &dev)?;
/// let k = Tensor::zeros((1, 3, 1, 2), DType::F32, &dev)?;
/// let v = Tensor::new(&[[3f32, 0.], [6., 0.], [9., 0.]], &dev)?.reshape((1, 3, 1, 2))?;
/// let mask = BlockMask { window: None, causal: false };
/// let o = block_attention(&blocks, mask, dims, &q, &k, &v)?.flatten_all()?.to_vec1::<f32>()?;
/// assert!((o[0] - 6.).abs() < 1e-5 && (o[2] - 6.).abs() < 1e-5);
/// # Ok::<(), candle_core::Error>(())
/// ```
///
/// # Errors
/// A shape, dtype or device that differs from the above, a slot outside the pool, or rows beyond its capacity.
pub fn block_attention(
    blocks: &DraftBlocks,
    mask: BlockMask,
    dims: AttnDims,
    q: &Tensor,
    k_cache: &Tensor,
    v_cache: &Tensor,
) -> Result<Tensor> {
    check_devices(BLOCK, q.device(), &[("k_cache", k_cache), ("v_cache", v_cache)])?;
    let op = BlockAttention { blocks, mask, dims };
    on_device(q, |q| q.apply_op3_no_bwd(k_cache, v_cache, &op).and_then(kept))
}

struct BlockAttention<'a> {
    blocks: &'a DraftBlocks,
    mask: BlockMask,
    dims: AttnDims,
}

impl BlockAttention<'_> {
    /// Both devices' checks; returns how many rows of every sequence's slot are read.
    fn check(&self, q: (DType, &Layout), k: (DType, &Layout), v: (DType, &Layout)) -> Result<Vec<usize>> {
        let DraftBlocks { block_size, slots, context_lens } = self.blocks;
        check_operands(BLOCK, self.dims, slots.len() * block_size, q, k, v)?;
        canopy_kernels::check_slots(slots, BLOCK, k.1.dims()[0]).wrap()?;
        arg(BLOCK, "context_lens").count(context_lens.len(), slots.len())?;
        let rows = slots.iter().map(|_| *block_size);
        check_lens(arg(BLOCK, "context_lens"), context_lens, slots, rows, k.1.dims()[1])
    }
}

impl CustomOp3 for BlockAttention<'_> {
    fn name(&self) -> &'static str {
        BLOCK
    }

    fn cpu_fwd(
        &self,
        q: &CpuStorage,
        q_l: &Layout,
        k: &CpuStorage,
        k_l: &Layout,
        v: &CpuStorage,
        v_l: &Layout,
    ) -> Result<(CpuStorage, Shape)> {
        let lens = self.check((q.dtype(), q_l), (k.dtype(), k_l), (v.dtype(), v_l))?;
        let queries = values(arg(BLOCK, "q"), q, q_l)?;
        let caches = Caches::new(BLOCK, (k, k_l), (v, v_l), &self.blocks.slots, &lens)?;
        let mut out = vec![0f32; queries.len()];
        let blocks = match &caches.slots {
            None => Cow::Borrowed(self.blocks),
            Some(slots) => Cow::Owned(DraftBlocks { slots: slots.clone(), ..self.blocks.clone() }),
        };
        block_kernel::cpu::forward(self.dims, &blocks, self.mask, caches.input(&queries), &mut out).wrap()?;
        Ok((storage_from(out, q.dtype()), q_l.shape().clone()))
    }

    #[cfg(feature = "cuda")]
    fn cuda_fwd(
        &self,
        q: &CudaStorage,
        q_l: &Layout,
        k: &CudaStorage,
        k_l: &Layout,
        v: &CudaStorage,
        v_l: &Layout,
    ) -> Result<(CudaStorage, Shape)> {
        self.check((q.dtype(), q_l), (k.dtype(), k_l), (v.dtype(), v_l))?;
        let Self { blocks, mask, dims } = *self;
        let operands =
            crate::cuda::attention::Operands { op: BLOCK, dims, q: (q, q_l), k: (k, k_l), v: (v, v_l) };
        operands.blocks(blocks, mask)
    }
}

/// The op on q as the device's kernels take it (bf16 on CUDA, as their pools are), its result in q's dtype.
fn on_device(q: &Tensor, op: impl FnOnce(&Tensor) -> Result<Tensor>) -> Result<Tensor> {
    match q.device().is_cpu() {
        true => op(q),
        false => op(&row_major(&q.to_dtype(DType::BF16)?)?)?.to_dtype(q.dtype()),
    }
}

/// The three operands' dtypes and shapes.
fn check_operands(
    op: &'static str,
    dims: AttnDims,
    rows: usize,
    q: (DType, &Layout),
    k: (DType, &Layout),
    v: (DType, &Layout),
) -> Result<()> {
    arg(op, "q").float(q.0)?;
    arg(op, "q").shape(q.1, &[rows, dims.q_heads, dims.head_dim])?;
    arg(op, "k_cache").float(k.0)?;
    match k.1.dims() {
        &[_, _, kv_heads, head_dim] if kv_heads == dims.kv_heads && head_dim == dims.head_dim => {}
        got => {
            let expected = format_args!("[slots, capacity, {}, {}]", dims.kv_heads, dims.head_dim);
            return arg(op, "k_cache").refuse(expected, format_args!("{got:?}"));
        }
    }
    arg(op, "v_cache").dtype(v.0, k.0)?;
    arg(op, "v_cache").shape(v.1, k.1.dims())
}

/// Committed rows plus this round's rows of every sequence, which must fit the pool's capacity; 0 for padding.
fn check_lens(
    arg: Arg,
    committed: &[i32],
    slots: &[i32],
    rows: impl Iterator<Item = usize>,
    capacity: usize,
) -> Result<Vec<usize>> {
    let sum = |(b, (&len, rows)): (usize, (&i32, usize))| match usize::try_from(len) {
        _ if slots[b] < 0 => Ok(0),
        Ok(len) if len + rows <= capacity => Ok(len + rows),
        Err(_) => arg.refuse(format_args!("0 or more rows of sequence {b}"), format_args!("{len}")),
        _ => arg.refuse(
            format_args!("{len} + {rows} rows of sequence {b} within the capacity of {capacity}"),
            format_args!("{}", i64::from(len) + rows as i64),
        ),
    };
    committed.iter().zip(rows).enumerate().map(sum).collect()
}

/// The caches in f32: borrowed, or the rows in use widened into a pool with one slot per sequence.
struct Caches<'a> {
    k: Cow<'a, [f32]>,
    v: Cow<'a, [f32]>,
    capacity: usize,
    /// The sequences' slots in a widened pool.
    slots: Option<Vec<i32>>,
}

impl<'a> Caches<'a> {
    fn new(
        op: &'static str,
        k: (&'a CpuStorage, &Layout),
        v: (&'a CpuStorage, &Layout),
        slots: &[i32],
        lens: &[usize],
    ) -> Result<Self> {
        let direct = |(storage, layout): (&CpuStorage, &Layout)| {
            matches!(storage, CpuStorage::F32(_)) && layout.is_contiguous()
        };
        let (k_arg, v_arg) = (arg(op, "k_cache"), arg(op, "v_cache"));
        if direct(k) && direct(v) {
            let (k_rows, v_rows) = (values(k_arg, k.0, k.1)?, values(v_arg, v.0, v.1)?);
            return Ok(Self { k: k_rows, v: v_rows, capacity: k.1.dims()[1], slots: None });
        }
        let capacity = lens.iter().copied().max().unwrap_or(0);
        Ok(Self {
            k: Cow::Owned(widened(k_arg, k, slots, lens, capacity)?),
            v: Cow::Owned(widened(v_arg, v, slots, lens, capacity)?),
            capacity,
            slots: Some(slots.iter().zip(0..).map(|(&slot, b)| if slot < 0 { -1 } else { b }).collect()),
        })
    }

    fn input<'b>(&'b self, q: &'b [f32]) -> AttentionInput<'b> {
        AttentionInput { q, k_cache: &self.k, v_cache: &self.v, capacity: self.capacity }
    }
}

/// Rows `0..lens[b]` of every sequence's slot as `[B, capacity, Hkv, D]`.
fn widened(
    arg: Arg,
    (storage, layout): (&CpuStorage, &Layout),
    slots: &[i32],
    lens: &[usize],
    capacity: usize,
) -> Result<Vec<f32>> {
    let width = layout.dims()[2] * layout.dims()[3];
    let mut out = vec![0f32; slots.len() * capacity * width];
    for (b, (&slot, &len)) in slots.iter().zip(lens).enumerate() {
        let Ok(slot) = usize::try_from(slot) else { continue };
        let rows = values(arg, storage, &layout.narrow(0, slot, 1)?.narrow(1, 0, len)?)?;
        out[b * capacity * width..][..rows.len()].copy_from_slice(&rows);
    }
    Ok(out)
}
