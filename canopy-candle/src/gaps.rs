//! Room between pieces of memory.

use std::ops::Range;

/// Pieces of one block that come and go.
#[derive(Debug, Default)]
pub(crate) struct Pieces<H> {
    /// In order; the holder tells whether its piece is still used.
    live: Vec<(Range<usize>, H)>,
    /// All pieces so far, in the order in which they came.
    places: Vec<Range<usize>>,
}

impl<H> Pieces<H> {
    /// None yet.
    pub fn new() -> Self {
        Self { live: Vec::new(), places: Vec::new() }
    }

    /// The lowest `bytes` bytes from `margin` on that no piece takes which `lives`, for `holder`.
    pub fn place(&mut self, bytes: usize, margin: usize, holder: H, lives: impl Fn(&H) -> bool) {
        self.live.retain(|(_, holder)| lives(holder));
        let (at, piece) = first_gap(self.live.iter().map(|(piece, _)| piece), bytes, margin);
        self.places.push(piece.clone());
        self.live.insert(at, (piece, holder));
    }

    /// Where all of them lay.
    pub fn places(self) -> Vec<Range<usize>> {
        self.places
    }
}

/// The first gap between `taken`, which are in order and do not overlap: its place among them, and the piece.
fn first_gap<'a>(
    taken: impl Iterator<Item = &'a Range<usize>>,
    bytes: usize,
    margin: usize,
) -> (usize, Range<usize>) {
    let (mut at, mut start) = (0, margin);
    for piece in taken {
        if start + bytes <= piece.start {
            break;
        }
        (at, start) = (at + 1, piece.end);
    }
    (at, start..start + bytes)
}

#[cfg(test)]
mod tests {
    use std::rc::Rc;

    use super::{Pieces, first_gap};

    #[test]
    fn the_first_gap_that_is_wide_enough_is_taken() {
        let taken = [2..5, 7..10, 13..14];
        let gap = |bytes| first_gap(taken.iter(), bytes, 2);
        assert_eq!(gap(2), (1, 5..7));
        assert_eq!(gap(3), (2, 10..13));
        assert_eq!(gap(4), (3, 14..18));
        assert_eq!(first_gap([].iter(), 8, 2), (0, 2..10));
        assert_eq!(first_gap([4..6, 9..10].iter(), 2, 2), (0, 2..4));
    }

    /// Pieces come and go in an order from a seed: none overlaps one that lives, and what is free is used again.
    #[test]
    fn pieces_that_live_never_overlap() {
        const MARGIN: usize = 4;
        let (mut pieces, mut held, mut seed) = (Pieces::new(), Vec::<(Rc<()>, usize)>::new(), 7u64);
        let mut asked = 0;
        for _ in 0..3000 {
            seed = seed.wrapping_mul(6_364_136_223_846_793_005).wrapping_add(1_442_695_040_888_963_407);
            if seed >> 60 < 8 || held.is_empty() {
                let (bytes, holder) = (1 + (seed >> 33) as usize % 60, Rc::new(()));
                pieces.place(bytes, MARGIN, holder.clone(), |holder| Rc::strong_count(holder) > 1);
                let number = pieces.places.len() - 1;
                assert_eq!(pieces.places[number].len(), bytes);
                assert!(pieces.places[number].start >= MARGIN);
                asked += bytes;
                for (_, other) in &held {
                    let (new, old) = (&pieces.places[number], &pieces.places[*other]);
                    assert!(new.end <= old.start || old.end <= new.start, "{new:?} {old:?}");
                }
                held.push((holder, number));
            } else {
                held.remove((seed >> 40) as usize % held.len());
            }
        }
        let end = pieces.places().iter().map(|piece| piece.end).max().unwrap_or(0);
        assert!(end < asked / 4, "{end} of {asked}");
    }
}
