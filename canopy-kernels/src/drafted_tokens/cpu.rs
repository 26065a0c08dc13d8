//! CPU forward.

use super::check;
use crate::Result;
use crate::top_tokens::row_words;

/// Puts every drafted node's token into `tokens`; see the room's page.
///
/// # Errors
/// A wrong length, no candidates, or a source outside them.
pub fn forward(k: usize, best: &[u32], sources: &[i32], tokens: &mut [u32]) -> Result<()> {
    check(k, best.len(), sources, tokens.len())?;
    for (token, &source) in tokens.iter_mut().zip(sources) {
        if let Ok(source) = usize::try_from(source) {
            let row = &best[source / k * row_words(k)..][..row_words(k)];
            *token = row[row_words(k) - k + source % k];
        }
    }
    Ok(())
}
