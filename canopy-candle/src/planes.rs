//! Several outputs of one op as planes of one allocation, each starting at a multiple of 32 elements.

use std::ops::Range;

use candle_core::{Result, Shape, Tensor};

const ALIGN: usize = 32;

/// Where a plane of `len` elements lies when the pack so far ends at `end`.
fn after(end: usize, len: usize) -> Range<usize> {
    let start = end.next_multiple_of(ALIGN);
    start..start + len
}

/// Elements of a pack of planes with these lengths.
pub(crate) fn elem_count(lens: &[usize]) -> usize {
    lens.iter().fold(0, |end, &len| after(end, len).end)
}

/// First elements of the planes of a pack.
#[cfg(feature = "cuda")]
pub(crate) fn starts(lens: &[usize]) -> Vec<usize> {
    let planes = lens.iter().scan(0, |end, &len| {
        let plane = after(*end, len);
        *end = plane.end;
        Some(plane.start)
    });
    planes.collect()
}

/// Where the planes of a pack lie.
#[cfg(feature = "cuda")]
pub(crate) fn ranges<const P: usize>(lens: [usize; P]) -> [Range<usize>; P] {
    let mut end = 0;
    lens.map(|len| {
        let plane = after(end, len);
        end = plane.end;
        plane
    })
}

/// Hands out the planes of a pack for writing, in order.
pub(crate) struct PlanesMut<'a, T = f32> {
    rest: &'a mut [T],
    end: usize,
}

impl<'a, T> PlanesMut<'a, T> {
    /// Starts at the pack's first plane.
    pub fn new(pack: &'a mut [T]) -> Self {
        Self { rest: pack, end: 0 }
    }

    /// The next plane.
    pub fn take(&mut self, len: usize) -> &'a mut [T] {
        self.take_after_gap(len).1
    }

    /// The unused elements before the next plane, and the plane.
    pub fn take_after_gap(&mut self, len: usize) -> (&'a mut [T], &'a mut [T]) {
        let plane = after(self.end, len);
        let (head, rest) = std::mem::take(&mut self.rest).split_at_mut(plane.end - self.end);
        let skipped = plane.start - self.end;
        (self.rest, self.end) = (rest, plane.end);
        head.split_at_mut(skipped)
    }
}

/// Hands out the planes of a pack as typed views, in order: contiguous tensors over one storage, no copy.
pub(crate) struct PlaneViews<'a> {
    pack: &'a Tensor,
    end: usize,
}

impl<'a> PlaneViews<'a> {
    /// Starts at the first plane of a one-dimensional pack.
    pub fn new(pack: &'a Tensor) -> Self {
        Self { pack, end: 0 }
    }

    /// The next plane.
    pub fn take(&mut self, shape: impl Into<Shape>) -> Result<Tensor> {
        let shape = shape.into();
        let plane = after(self.end, shape.elem_count());
        self.end = plane.end;
        self.pack.narrow(0, plane.start, plane.len())?.reshape(shape)
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use candle_core::Device;

    #[test]
    fn planes_start_at_multiples_of_32_and_views_see_what_was_written() -> Result<()> {
        let lens = [5, 32, 1, 0];
        assert_eq!(elem_count(&lens), 96);
        let mut pack = vec![0f32; 96];
        let mut planes = PlanesMut::new(&mut pack);
        for (value, len) in lens.into_iter().enumerate() {
            planes.take(len).fill(1.0 + value as f32);
        }
        let pack = Tensor::from_vec(pack, 96, &Device::Cpu)?;
        let mut views = PlaneViews::new(&pack);
        for (value, len) in lens.into_iter().enumerate() {
            let view = views.take((1, len))?;
            assert!(view.is_contiguous());
            assert_eq!(view.layout().start_offset() % 32, 0);
            assert_eq!(view.flatten_all()?.to_vec1::<f32>()?, vec![1.0 + value as f32; len]);
        }
        Ok(())
    }
}
