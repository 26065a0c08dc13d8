//! The few shapes that drafts have in rounds that are planned ahead, and what such rounds cost.

/// Block lengths besides the drafter's own.
const LENGTHS: [usize; 3] = [4, 8, 12];
/// Nodes of trees: with the root they end where the products of a pass step up.
const TREES: [usize; 4] = [7, 15, 31, 63];
/// Deepest tree that a device builds.
const DEEPEST: usize = canopy_kernels::tree_build::MOST_DEPTH;
/// Most rows of the round's pass: sixteen streams with a tree of sixteen nodes each.
const MOST_ROWS: usize = 272;

/// What the drafting streams of a round verify, the same for all of them.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(in super::super::super) struct Shape {
    /// Rows of the drafter's blocks.
    pub block_rows: usize,
    /// Nodes besides the root.
    pub nodes: usize,
    /// The best tree of so many nodes; otherwise the drafter's best tokens.
    pub is_tree: bool,
}

impl Shape {
    /// Depths that are drafted.
    pub fn horizon(self) -> usize {
        self.block_rows - 1
    }

    /// Whether a pass of so many streams may have it.
    pub fn fits(self, streams: usize) -> bool {
        streams * (self.nodes + 1) <= MOST_ROWS
    }
}

/// The shapes for a drafter of `block` rows: a chain for every block length, the drafter's own last, then trees that are surely none.
pub(in super::super::super) fn shapes(block: usize) -> Vec<Shape> {
    let lengths: Vec<usize> =
        LENGTHS.into_iter().filter(|&rows| rows < block).chain([block]).filter(|&rows| rows > 1).collect();
    let chain = |&rows: &usize| Shape { block_rows: rows, nodes: rows - 1, is_tree: false };
    let trees = |&rows: &usize| {
        let own = (rows == block).then_some(block);
        let wide = TREES.into_iter().filter(move |&n| n >= rows && (rows == block || n < 2 * rows));
        let nodes = own.into_iter().chain(wide.filter(move |&n| Some(n) != own));
        nodes.map(move |nodes| Shape { block_rows: rows, nodes, is_tree: true })
    };
    let buildable = lengths.iter().filter(|&&rows| rows - 1 <= DEEPEST);
    lengths.iter().map(chain).chain(buildable.flat_map(trees)).collect()
}

/// Seconds of whole rounds by their streams, rising: of plain ones, and of those in which every stream drafts.
#[derive(Clone, Debug, Default)]
pub(in super::super::super) struct RoundCosts {
    /// Plain rounds.
    pub plain: Vec<(usize, f64)>,
    /// Those of each shape, in the order of [`shapes`]; none where it was not timed.
    pub drafted: Vec<Vec<(usize, f64)>>,
}

impl RoundCosts {
    /// Seconds of a plain round of so many streams.
    pub fn plain(&self, streams: usize) -> f64 {
        between(&self.plain, streams, true)
    }

    /// What it adds to a round that so many of its streams draft the shape; infinite beyond what was timed.
    pub fn added(&self, shape: usize, drafting: usize) -> f64 {
        if drafting == 0 {
            return 0.0;
        }
        let points = &self.drafted[shape];
        let most = self.plain.last().map(|point| point.0);
        between(points, drafting, points.last().map(|point| point.0) == most) - self.plain(drafting)
    }
}

/// Linear between points and, if `beyond`, behind the last one; infinite without points.
fn between(points: &[(usize, f64)], at: usize, beyond: bool) -> f64 {
    let right = points.partition_point(|point| point.0 < at);
    match (points.get(right.wrapping_sub(1)), points.get(right)) {
        (_, Some(&(streams, seconds))) if streams == at => seconds,
        (Some(&left), Some(&right)) => line(left, right, at),
        (None, Some(&(_, seconds))) => seconds,
        (Some(&last), None) if beyond => match points.get(right.wrapping_sub(2)) {
            Some(&before) => line(before, last, at),
            None => last.1,
        },
        _ => f64::INFINITY,
    }
}

fn line(left: (usize, f64), right: (usize, f64), at: usize) -> f64 {
    let share = (at as f64 - left.0 as f64) / (right.0 - left.0) as f64;
    left.1 + share * (right.1 - left.1)
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn trees_are_none_that_could_be_chains_and_end_at_steps() {
        let shape = |(block_rows, nodes, is_tree)| Shape { block_rows, nodes, is_tree };
        let chains = [(4, 3, false), (8, 7, false), (12, 11, false), (16, 15, false)];
        let trees =
            [(4, 7, true), (8, 15, true), (12, 15, true), (16, 16, true), (16, 31, true), (16, 63, true)];
        assert_eq!(shapes(16), chains.into_iter().chain(trees).map(shape).collect::<Vec<_>>());
        assert!(shapes(1).is_empty());
        for block in 2..40 {
            assert!(shapes(block).iter().all(|shape| !shape.is_tree || shape.nodes > shape.horizon()));
        }
    }

    #[test]
    fn costs_lie_on_lines_between_what_was_timed() {
        let plain = vec![(1, 5.0), (4, 8.0), (16, 20.0)];
        let costs =
            RoundCosts { plain, drafted: vec![vec![(1, 7.0), (4, 13.0)], vec![(1, 6.0), (16, 51.0)]] };
        assert!((costs.plain(2) - 6.0).abs() < 1e-12 && (costs.plain(18) - 22.0).abs() < 1e-12);
        assert!((costs.added(0, 1) - 2.0).abs() < 1e-12 && (costs.added(0, 2) - 3.0).abs() < 1e-12);
        assert!(costs.added(0, 5).is_infinite() && costs.added(1, 17).is_finite());
        assert_eq!(costs.added(1, 0), 0.0);
    }
}
