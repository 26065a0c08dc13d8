//! The second half of a round without the host in it: the accept walk where the logits are, and the commit right behind it.

use candle_core::DType;
use canopy_candle::{DraftTree, StatedWalk, WalkedTree, accept_walk, top_tokens};

use super::verify::Pending;
use super::{Qwen35, run_pass};
use crate::target::{StatedRanks, Verified};
use crate::{Error, Result};

impl Qwen35 {
    /// See [`Target::walk_and_commit`](crate::target::Target::walk_and_commit). What the walk found comes back in one small copy, which is
    /// waited for when the commit has been launched.
    pub(super) fn walk(
        &mut self,
        verified: &Verified,
        stated: Option<&StatedRanks>,
    ) -> Result<Vec<WalkedTree>> {
        let refuse = |expected: &str, got: &str| {
            Err(Error::Request { field: "verified", expected: expected.into(), got: got.into() })
        };
        let Some(pending) = self.pending.take() else { return refuse("a verify before its walk", "none") };
        let Some(logits) = verified.logits.as_ref().filter(|logits| logits.dims()[0] == pending.batch.rows())
        else {
            return refuse("logits of every row", "fewer");
        };
        if verified.batch != pending.batch || !self.are_untouched(&pending) {
            return refuse("what the last verify gave, of slots that nobody has changed since", "another");
        }
        let device = self.options.device.clone();
        let found = run_pass(&device, || {
            let best = top_tokens(&logits.to_dtype(DType::F32)?, 1)?;
            pending.placed.scope(|| {
                let tree = pending.placed.tree()?;
                let trees = pending.batch.trees();
                let stated = stated.map(|StatedRanks { nodes, wanted }| StatedWalk {
                    nodes: pending.nodes.as_ref().unwrap_or(nodes),
                    wanted,
                });
                let walk = accept_walk(tree, &pending.tokens, &best, pending.most, stated)?;
                // A chain's path lies where it is committed.
                let moves = !trees.iter().all(DraftTree::is_chain);
                self.commit_paths(&pending.pass, walk.paths(), moves.then_some(&pending.prefix_lens))?;
                Ok::<_, Error>(walk.wait()?)
            })
        })?;
        for (&slot, tree) in pending.batch.slots().iter().zip(&found).filter(|(_, tree)| !tree.failed) {
            self.set_committed(slot as usize, self.committed[slot as usize] + tree.path.len());
        }
        self.walked = pending.nodes.map(|nodes| (pending.placed, nodes));
        Ok(found)
    }

    /// Nobody has reset, restored or advanced a slot since its verify.
    fn are_untouched(&self, pending: &Pending) -> bool {
        let slots = pending.batch.slots().iter().zip(&pending.epochs);
        slots.into_iter().all(|(&slot, &epoch)| self.epochs[slot as usize] == epoch)
    }
}
