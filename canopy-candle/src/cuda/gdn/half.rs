//! bf16 outputs, tier B: trees whose dense blocks are measured faster in the blocked design, others in the fused one.

use candle_core::Result;
use candle_core::backend::BackendStorage;
use canopy_kernels::cuda::TreeOnDevice;
use canopy_kernels::tree_gdn::dispatch::{Design, Dtype, Form};
use canopy_kernels::tree_gdn::{Schedule, Solve, blocked, fused};
use half::bf16;

use super::{Inputs, Planes, Source, Verify, fused_buffers, solve};
use crate::check::arg;
use crate::wrap::WrapKernelErr;

impl Verify<'_> {
    /// bf16 outputs from bf16 rows.
    pub(super) fn half(&self, state: Source<'_>, planes: Planes<'_, bf16>) -> Result<()> {
        let inputs = self.inputs::<bf16>(state)?;
        match self.half_solve()? {
            None => self.half_rows(inputs, planes),
            Some(schedule) => self.under(schedule, inputs, planes),
        }
    }

    /// The schedule by name, `None` for every tree's own.
    pub(super) fn half_solve(&self) -> Result<Option<Schedule>> {
        match solve(self.op, self.variant)? {
            Solve::Forward => Ok(None),
            Solve::Level => Ok(Some(Schedule::Levels)),
            Solve::Chains => Ok(Some(Schedule::Chains)),
            other => arg(self.op, "variant")
                .refuse(format_args!("forward, level or chains for BF16 outputs"), format_args!("{other}")),
        }
    }

    fn half_rows(&self, inputs: Inputs<'_, bf16>, (mut o, mut tape): Planes<'_, bf16>) -> Result<()> {
        let (stream, batch) = (self.qkv.0.device().cuda_stream(), self.tree.host());
        let [solved, blocked] = self.tree.halves(self.op)?;
        if let Some(tree) = solved {
            let planes = (o.slice_mut(..), tape.each_mut().map(|plane| plane.slice_mut(..)));
            let buffers = fused_buffers(inputs.again(), planes);
            fused::verify(&stream, self.dims, batch, tree, self.half_columns(tree)?, buffers).wrap()?;
        }
        let Some(tree) = blocked else { return Ok(()) };
        let buffers = fused_buffers(inputs, (o, tape));
        blocked::verify(&stream, self.dims, batch, tree, self.blocked_columns(tree)?, buffers).wrap()
    }

    /// Refuses trees that no block of this device takes.
    pub(super) fn expect_half(&self) -> Result<()> {
        if self.half_solve()?.is_some() {
            return Ok(());
        }
        let [solved, blocked] = self.tree.halves(self.op)?;
        solved.map_or(Ok(0), |tree| self.half_columns(tree))?;
        blocked.map_or(Ok(0), |tree| self.blocked_columns(tree))?;
        Ok(())
    }

    /// Value columns of the fused design's blocks.
    fn half_columns(&self, tree: &TreeOnDevice) -> Result<usize> {
        let design = self.design(tree, Dtype::Bf16, Form::Solve)?;
        let columns = self.columns(Some(design), |columns| fused::shared_bytes::<bf16>(tree, columns))?;
        columns.map_or_else(|| self.too_large(tree), Ok)
    }

    /// Value columns of the blocked design's blocks.
    fn blocked_columns(&self, tree: &TreeOnDevice) -> Result<usize> {
        let dispatched = match self.design(tree, Dtype::Bf16, Form::Blocked)? {
            Design::Blocked { columns } => columns,
            _ => blocked::COLUMNS[0],
        };
        let limit = self.shared_limit()?;
        let fits = |columns: &usize| blocked::fits(tree.most_nodes, *columns, limit);
        [dispatched, 64, 32].into_iter().find(fits).map_or_else(|| self.too_large(tree), Ok)
    }

    fn too_large(&self, tree: &TreeOnDevice) -> Result<usize> {
        let limit = self.shared_limit()?;
        let expected = format_args!("trees for BF16 outputs in blocks of {limit} bytes of shared memory");
        let got = format_args!("{} nodes, {} path entries", tree.most_nodes, tree.most_entries);
        arg(self.op, "tree").refuse(expected, got)
    }
}
