//! Room between pieces of memory.

/// A piece of one of several blocks, bytes `start..end`.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(crate) struct Piece {
    pub block: usize,
    pub start: usize,
    pub end: usize,
}

/// The first gap of `bytes` between `taken`, which are in order and do not overlap, in blocks of `sizes`: its place among them, and the piece.
/// The first `margin` bytes of a block stay free.
pub(crate) fn first(
    taken: impl IntoIterator<Item = Piece>,
    sizes: impl IntoIterator<Item = usize>,
    (bytes, margin): (usize, usize),
) -> Option<(usize, Piece)> {
    let (mut taken, mut place) = (taken.into_iter().peekable(), 0);
    for (block, size) in sizes.into_iter().enumerate() {
        let mut start = margin;
        while let Some(next) = taken.next_if(|next| next.block == block && next.start < start + bytes) {
            start = next.end;
            place += 1;
        }
        let end = start + bytes;
        if end <= size {
            return Some((place, Piece { block, start, end }));
        }
        while taken.next_if(|next| next.block == block).is_some() {
            place += 1;
        }
    }
    None
}

#[cfg(test)]
mod tests {
    use super::{Piece, first};

    const MARGIN: usize = 2;

    #[test]
    fn the_first_gap_that_is_wide_enough_is_taken() {
        let piece = |block, start, end| Piece { block, start, end };
        let taken = [piece(0, 2, 5), piece(0, 7, 10), piece(1, 2, 3), piece(1, 6, 12)];
        let gap = |bytes| first(taken, [10, 12, 20], (bytes, MARGIN));
        assert_eq!(gap(2), Some((1, piece(0, 5, 7))));
        assert_eq!(gap(3), Some((3, piece(1, 3, 6))));
        assert_eq!(gap(4), Some((4, piece(2, 2, 6))));
        assert_eq!(gap(18), Some((4, piece(2, 2, 20))));
        assert_eq!(gap(19), None);
        assert_eq!(first([], [10], (8, MARGIN)), Some((0, piece(0, 2, 10))));
        assert_eq!(first([], [], (1, MARGIN)), None);
    }

    /// Pieces come and go in an order from a seed: no two overlap, none leaves its block, the list stays in order.
    #[test]
    fn pieces_never_overlap() {
        let (sizes, mut taken, mut seed) = ([200usize, 300], Vec::<Piece>::new(), 7u64);
        let mut served = 0;
        for _ in 0..3000 {
            seed = seed.wrapping_mul(6_364_136_223_846_793_005).wrapping_add(1_442_695_040_888_963_407);
            let bytes = 1 + (seed >> 33) as usize % 60;
            match first(taken.iter().copied(), sizes, (bytes, MARGIN)) {
                Some((place, piece)) if seed >> 60 < 11 => {
                    assert_eq!(piece.end - piece.start, bytes);
                    assert!(piece.start >= MARGIN && piece.end <= sizes[piece.block]);
                    taken.insert(place, piece);
                    served += 1;
                }
                _ if taken.is_empty() => {}
                _ => _ = taken.remove((seed >> 40) as usize % taken.len()),
            }
            for pair in taken.windows(2) {
                assert!(
                    pair[0].block < pair[1].block
                        || pair[0].block == pair[1].block && pair[0].end <= pair[1].start
                );
            }
        }
        assert!(served > 1000);
    }
}
