//! tree_gdn as ops.

mod commit;
mod commit_verify;
mod verify;

use candle_core::op::BackpropOp;
use candle_core::{DType, Device, Layout, Result, Shape, Storage, Tensor};
use canopy_kernels::{GdnDims, TreeBatch};

use crate::check::arg;
use crate::planes::{self, PlaneViews};
use crate::recorded::kept;
use crate::wrap::WrapKernelErr;

pub use commit::{GdnTape, tree_gdn_commit, tree_gdn_commit_layers};
pub use commit_verify::{GdnPending, tree_gdn_commit_verify};
pub use verify::{tree_gdn_verify, tree_gdn_verify_into, tree_gdn_verify_to};

/// What one verify pass leaves behind. Three views of one allocation, or an `o` of another dtype beside the two others.
#[derive(Clone, Debug)]
pub struct TreeGdnOutput {
    packed: Tensor,
    /// `[N, Hv, Dv]`, f32 or as asked for.
    pub o: Tensor,
    /// `[N, Hv, Dv]` f32, pseudo-values.
    pub u: Tensor,
    /// `[N, Hv]` f32, cumulative log gate.
    pub g_cum: Tensor,
}

impl TreeGdnOutput {
    /// Room for the f32 outputs of `rows` packed rows, for [`tree_gdn_verify_into`].
    pub fn zeros(rows: usize, dims: GdnDims, device: &Device) -> Result<Self> {
        let pack = Pack { rows, dims, dtype: DType::F32 };
        pack.output(Tensor::zeros(pack.elem_count(), DType::F32, device)?, None)
    }

    /// The one allocation: the planes o, where it is f32, u and g_cum, each starting at a multiple of 32 elements.
    pub fn packed(&self) -> &Tensor {
        &self.packed
    }
}

/// The planes of a verify pass's one allocation: o, which is empty where another dtype than f32 has it beside, u and g_cum.
#[derive(Clone, Copy)]
struct Pack {
    rows: usize,
    dims: GdnDims,
    /// Of o.
    dtype: DType,
}

impl Pack {
    /// Elements of o.
    fn values(self) -> usize {
        self.rows * self.dims.v_heads * self.dims.dv
    }

    fn lens(self) -> [usize; 3] {
        let o = if self.dtype == DType::F32 { self.values() } else { 0 };
        [o, self.values(), self.rows * self.dims.v_heads]
    }

    fn elem_count(self) -> usize {
        planes::elem_count(&self.lens())
    }

    fn o_shape(self) -> Shape {
        (self.rows, self.dims.v_heads, self.dims.dv).into()
    }

    /// The outputs over the allocation, and o where it lies beside.
    fn output(self, packed: Tensor, beside: Option<Storage>) -> Result<TreeGdnOutput> {
        let mut views = PlaneViews::new(&packed);
        let o = match beside {
            Some(o) => kept(Tensor::from_storage(o, self.o_shape(), BackpropOp::none(), false))?,
            None => views.take(self.o_shape())?,
        };
        let u = views.take(self.o_shape())?;
        let g_cum = views.take((self.rows, self.dims.v_heads))?;
        Ok(TreeGdnOutput { packed, o, u, g_cum })
    }
}

/// Both devices' checks of what verify reads, in either form of the delta rule: shapes, dtypes and slots.
pub(crate) fn check_inputs(
    op: &'static str,
    batch: &TreeBatch,
    dims: GdnDims,
    qkv: (DType, &Layout),
    gates: (DType, &Layout),
    state: (DType, &Layout),
) -> Result<()> {
    let rows = batch.rows();
    arg(op, "qkv").float(qkv.0)?;
    arg(op, "qkv").shape(qkv.1, &[rows, dims.qkv_width()])?;
    arg(op, "gates").dtype(gates.0, DType::F32)?;
    arg(op, "gates").shape(gates.1, &[rows, 2, dims.v_heads])?;
    batch.check_slots(op, check_pool(op, dims, state)?).wrap()
}

/// The state pool; returns its slots.
pub(crate) fn check_pool(op: &'static str, dims: GdnDims, state: (DType, &Layout)) -> Result<usize> {
    arg(op, "state").dtype(state.0, DType::F32)?;
    arg(op, "state").contiguous(state.1)?;
    arg(op, "state").shape_but_first(state.1, &[dims.v_heads, dims.dv, dims.dk])
}
