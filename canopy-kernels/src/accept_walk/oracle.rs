//! Truth: the walk as it is defined, one node after another, looking through all nodes for the next.

use super::{BEST_WORDS, Input, Row};
use crate::top_tokens;

/// The walk of tree `b`.
pub fn walk(input: &Input<'_>, b: usize) -> Row {
    let (first, end) = (input.cu_nodes[b] as usize, input.cu_nodes[b + 1] as usize);
    let mut row = Row { path: vec![0], tokens: Vec::new(), failed: false };
    let mut siblings_before = false;
    loop {
        let node = row.path[row.path.len() - 1];
        let best = &input.best[(first + node) * BEST_WORDS..][..BEST_WORDS];
        if best[0] != top_tokens::FINITE {
            row.failed = true;
            return row;
        }
        let depth = row.path.len();
        let is_next = |&other: &usize| {
            let is_child = input.parents[first + other] == node as i32;
            let accepted = match input.stated {
                None => input.tokens[first + other] == best[BEST_WORDS - 1],
                Some(stated) => {
                    let wanted =
                        stated.wanted[(2 * b + usize::from(siblings_before)) * input.most + depth - 1];
                    stated.nodes[first + other] as i32 % 65_536 == wanted
                }
            };
            is_child && accepted
        };
        let next = (1..end - first).find(is_next).filter(|_| depth < input.most);
        let Some(next) = next else {
            row.tokens.push(best[BEST_WORDS - 1]);
            return row;
        };
        row.tokens.push(input.tokens[first + next]);
        row.path.push(next);
        siblings_before |= input.stated.is_some_and(|stated| stated.nodes[first + next] % 65_536 != 0);
    }
}
