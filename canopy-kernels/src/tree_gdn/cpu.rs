//! CPU forward.

use super::{Tape, Variant, VerifyInput, VerifyOutput};
use crate::{AcceptedPaths, GdnDims, Result, TreeBatch};

/// Verifies every tree of `batch`; reads the state pool and leaves it as it is.
pub fn verify(
    dims: GdnDims,
    batch: &TreeBatch,
    variant: Variant,
    input: VerifyInput<'_>,
    output: VerifyOutput<'_>,
) -> Result<()> {
    let _ = (dims, batch, variant, input, output);
    unimplemented!()
}

/// Commits the accepted paths into the state pool `[slots, Hv, Dv, Dk]`, in place.
pub fn commit(
    dims: GdnDims,
    paths: &AcceptedPaths,
    variant: Variant,
    tape: Tape<'_>,
    state: &mut [f32],
) -> Result<()> {
    let _ = (dims, paths, variant, tape, state);
    unimplemented!()
}
