//! Lists of 32-bit words that go to a device in one copy, and that a later copy may replace in place.

use std::marker::PhantomData;
use std::ops::Range;
use std::sync::Arc;

use cudarc::driver::{
    CudaSlice, CudaStream, CudaView, DevicePtr, DeviceSlice, LaunchArgs, PushKernelArg, SyncOnDrop, result,
    sys,
};

use crate::{Error, Result};

const OP: &str = "lists on a device";
/// Words that a list's first element is a multiple of: 16 bytes, for vector loads.
const ALIGN: usize = 4;

/// The bits of a list's element.
pub trait Word: Copy {
    /// As they are.
    fn bits(self) -> u32;
}

impl Word for i32 {
    fn bits(self) -> u32 {
        self.cast_unsigned()
    }
}

impl Word for u32 {
    fn bits(self) -> u32 {
        self
    }
}

/// Where a list lies among [`Words`].
pub type Place = Range<usize>;

/// Lists side by side on the host.
#[derive(Clone, Debug, Default)]
pub struct Words(Vec<u32>);

impl Words {
    /// Appends a list with room for `room` elements, at least one; what follows the list is zero.
    pub fn push<T: Word>(&mut self, list: impl IntoIterator<Item = T>, room: usize) -> Place {
        let start = self.0.len();
        self.0.extend(list.into_iter().map(Word::bits));
        let end = (start + room.max(1)).max(self.0.len());
        self.0.resize(end.next_multiple_of(ALIGN), 0);
        start..end
    }

    /// All of them.
    pub fn as_slice(&self) -> &[u32] {
        &self.0
    }

    /// A copy on the device.
    ///
    /// # Errors
    /// From the driver.
    pub fn upload(&self, stream: &Arc<CudaStream>) -> Result<Arc<CudaSlice<u32>>> {
        let words = if self.0.is_empty() { &[0][..] } else { &self.0 };
        stream.clone_htod(words).map(Arc::new).map_err(|source| Error::Driver { op: OP, source })
    }

    /// Replaces an earlier upload of as many words, in the stream's order: kernels that were launched before still see the old lists.
    ///
    /// # Errors
    /// Another length; an error of the driver.
    pub fn replace(&self, stream: &Arc<CudaStream>, buffer: &CudaSlice<u32>) -> Result<()> {
        crate::error::expect_len(OP, "words", &[buffer.len()], self.0.len())?;
        let driver = |source| Error::Driver { op: OP, source };
        stream.context().bind_to_thread().map_err(driver)?;
        let (address, _in_use) = buffer.device_ptr(stream);
        // SAFETY: the buffer is as long as the words; nothing but kernels of this stream reads it, before or after this copy.
        unsafe { result::memcpy_htod_async(address, &self.0, stream.cu_stream()) }.map_err(driver)
    }
}

/// One list of an upload.
#[derive(Debug)]
pub struct DeviceList<T> {
    buffer: Arc<CudaSlice<u32>>,
    address: sys::CUdeviceptr,
    place: Place,
    element: PhantomData<T>,
}

impl<T> Clone for DeviceList<T> {
    fn clone(&self) -> Self {
        Self::new(&self.buffer, self.place.clone())
    }
}

impl<T> DeviceList<T> {
    /// The list at `place` of an upload.
    ///
    /// # Panics
    /// When the upload is shorter.
    pub fn new(buffer: &Arc<CudaSlice<u32>>, place: Place) -> Self {
        assert!(place.start <= place.end && place.end <= buffer.len(), "a list outside its upload");
        let (start, _in_use) = buffer.device_ptr(buffer.stream());
        let address = start + (place.start * size_of::<u32>()) as u64;
        Self { buffer: buffer.clone(), address, place, element: PhantomData }
    }

    /// Where it lies in its upload.
    pub fn place(&self) -> &Place {
        &self.place
    }

    /// Its first `len` elements.
    ///
    /// # Panics
    /// When it is shorter.
    pub fn first(&self, len: usize) -> CudaView<'_, T> {
        // SAFETY: elements are words.
        unsafe { self.bits(len).transmute(len) }.expect("a view of so many words")
    }

    /// [`Self::first`] as words.
    ///
    /// # Panics
    /// When it is shorter.
    pub fn bits(&self, len: usize) -> CudaView<'_, u32> {
        assert!(len <= self.place.len(), "a list of at least so many elements");
        self.buffer.slice(self.place.start..self.place.start + len)
    }
}

impl<T> DeviceSlice<T> for DeviceList<T> {
    fn len(&self) -> usize {
        self.place.len()
    }

    fn stream(&self) -> &Arc<CudaStream> {
        self.buffer.stream()
    }
}

impl<T> DevicePtr<T> for DeviceList<T> {
    fn device_ptr<'a>(&'a self, stream: &'a CudaStream) -> (sys::CUdeviceptr, SyncOnDrop<'a>) {
        (self.address, self.buffer.device_ptr(stream).1)
    }
}

// SAFETY: the kernel's parameter is the address, which lives as long as the list.
unsafe impl<'a, 'b: 'a, T> PushKernelArg<&'b DeviceList<T>> for LaunchArgs<'a> {
    fn arg(&mut self, list: &'b DeviceList<T>) -> &mut Self {
        self.arg(&list.address)
    }
}

#[cfg(test)]
mod tests {
    use super::Words;

    #[test]
    fn lists_start_at_multiples_of_four_words_and_keep_their_room() {
        let mut words = Words::default();
        assert_eq!(words.push([-1i32, 2, 3], 3), 0..3);
        assert_eq!(words.push([] as [u32; 0], 0), 4..5);
        assert_eq!(words.push([9u32], 6), 8..14);
        assert_eq!(words.push([4i32], 1), 16..17);
        assert_eq!(words.as_slice()[..5], [u32::MAX, 2, 3, 0, 0]);
        assert_eq!((words.as_slice()[8], words.as_slice()[9], words.as_slice()[16]), (9, 0, 4));
        assert_eq!(words.as_slice().len() % 4, 0);
    }
}
