//! The device memory of a recorded pass.
//!
//! A graph runs with the addresses it was recorded with, so a recorded pass allocates from an [`Arena`], memory that stays its own, instead
//! of from the device's pool. All graphs of one arena run over the same memory: what one leaves is there until the next one runs.

use std::cell::RefCell;
use std::sync::{Arc, Mutex};

use candle_core::cuda_backend::WrapErr;
use candle_core::cuda_backend::cudarc::driver::{
    CudaContext, CudaSlice, CudaStream, DevicePtr, DeviceRepr, sys::CUdeviceptr,
};
use candle_core::{CudaDevice, Result};

use crate::check::arg;
use crate::gaps::{self, Piece};

/// Bytes that a buffer's address is a multiple of.
const ALIGN: usize = 256;
/// Bytes of the first block.
const FIRST: usize = 32 << 20;

/// A buffer of the pass that is being recorded.
struct Taken {
    piece: Piece,
    /// The buffer's slice holds the other reference while it lives.
    holder: Arc<CudaStream>,
}

/// Memory of recorded passes.
pub(crate) struct Arena {
    stream: Arc<CudaStream>,
    blocks: Vec<CudaSlice<u8>>,
    taken: Vec<Taken>,
    missing: usize,
    by_nodes: bool,
    idle: Idle,
}

/// Slices of an arena believe that they are allocations of this stream, where nothing runs: what their drop asks for, the driver refuses,
/// since their addresses are not an allocation's, and the stream belongs to a second handle of the device's context, which nobody asks for
/// its errors.
#[derive(Clone)]
struct Idle(Arc<CudaStream>);

impl Idle {
    /// The device's; it lives as long as the process, as slices may.
    fn of(device: &CudaStream) -> Result<Self> {
        static IDLE: Mutex<Vec<(usize, Idle)>> = Mutex::new(Vec::new());
        let ordinal = device.context().ordinal();
        let mut all = IDLE.lock().expect("no holder of this lock panics");
        if let Some((_, idle)) = all.iter().find(|(at, _)| *at == ordinal) {
            return Ok(idle.clone());
        }
        let context = CudaContext::new(ordinal).w()?;
        // SAFETY: an arena's slices are used on the device's one stream.
        unsafe { context.disable_event_tracking() };
        let idle = Self(context.new_stream().w()?);
        all.push((ordinal, idle.clone()));
        Ok(idle)
    }

    /// `len` elements at an address inside a block of an arena, and what tells whether the slice lives.
    ///
    /// # Safety
    /// The memory is there, and no living slice's; the address is not an allocation's.
    unsafe fn slice<T>(&self, address: CUdeviceptr, len: usize) -> (CudaSlice<T>, Arc<CudaStream>) {
        // SAFETY: the stream lives as long as the process.
        let holder = unsafe { self.0.context().wrap_borrowed_stream(self.0.cu_stream()) };
        // SAFETY: the caller's promise; the slice's drop frees nothing.
        (unsafe { holder.upgrade_device_ptr(address, len) }, holder)
    }
}

thread_local!(static OPEN: RefCell<Option<Arena>> = const { RefCell::new(None) });

/// Whether this thread is recording a pass.
pub(crate) fn is_recording() -> bool {
    OPEN.with_borrow(Option::is_some)
}

/// Room for `len` elements from the open arena, `None` when no pass is being recorded.
pub(super) fn take<T: DeviceRepr>(device: &CudaDevice, len: usize) -> Result<Option<CudaSlice<T>>> {
    OPEN.with_borrow_mut(|open| match open {
        Some(arena) if !arena.by_nodes && Arc::ptr_eq(&arena.stream, &device.cuda_stream()) => {
            arena.take(len).map(Some)
        }
        _ => Ok(None),
    })
}

/// Runs `work`, whose ops take their memory from `arena` as if all of it were free.
/// Where `by_nodes`, they allocate from the device's stream as ever, which a recording takes down.
pub(super) fn with<T>(arena: &mut Option<Arena>, by_nodes: bool, work: impl FnOnce() -> T) -> T {
    /// Puts the arena back where it came from.
    struct Back<'a>(&'a mut Option<Arena>);
    impl Drop for Back<'_> {
        fn drop(&mut self) {
            *self.0 = OPEN.take();
        }
    }
    if let Some(arena) = arena {
        arena.taken.clear();
        arena.missing = 0;
        arena.by_nodes = by_nodes;
    }
    OPEN.set(arena.take());
    let _back = Back(arena);
    work()
}

impl Arena {
    /// An empty arena.
    pub(super) fn new(device: &CudaDevice) -> Result<Self> {
        let stream = device.cuda_stream();
        let idle = Idle::of(&stream)?;
        Ok(Self { stream, blocks: Vec::new(), taken: Vec::new(), missing: 0, by_nodes: false, idle })
    }

    /// Bytes of device memory that it holds.
    pub(super) fn bytes(&self) -> usize {
        self.blocks.iter().map(CudaSlice::len).sum()
    }

    /// True after a pass that did not find room, once the arena has grown; to be called when nothing is being recorded.
    pub(super) fn grow(&mut self) -> Result<bool> {
        let missing = std::mem::take(&mut self.missing);
        if missing == 0 {
            return Ok(false);
        }
        let bytes = (missing + 2 * ALIGN).max(self.bytes()).max(FIRST);
        // SAFETY: whoever takes a piece of it writes it before it is read.
        self.blocks.push(unsafe { self.stream.alloc::<u8>(bytes) }.w()?);
        Ok(true)
    }

    fn take<T: DeviceRepr>(&mut self, len: usize) -> Result<CudaSlice<T>> {
        let bytes = (len * size_of::<T>()).next_multiple_of(ALIGN).max(ALIGN);
        self.taken.retain(|taken| Arc::strong_count(&taken.holder) > 1);
        let taken = self.taken.iter().map(|taken| taken.piece);
        // The start of a block is the address of an allocation.
        let Some((at, piece)) = gaps::first(taken, self.blocks.iter().map(CudaSlice::len), (bytes, ALIGN))
        else {
            self.missing = bytes;
            let got = format_args!("{} of them used", self.bytes());
            return arg("recorded pass", "memory").refuse(format_args!("{bytes} free bytes"), got);
        };
        let address = self.blocks[piece.block].device_ptr(&self.stream).0 + piece.start as CUdeviceptr;
        // SAFETY: the piece lies inside a block behind its first byte, and is no living slice's.
        let (slice, holder) = unsafe { self.idle.slice(address, len) };
        self.taken.insert(at, Taken { piece, holder });
        Ok(slice)
    }
}
