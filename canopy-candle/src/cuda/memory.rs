//! The device memory of a recorded pass.
//!
//! A graph runs with the addresses it was recorded with, so a recorded pass has memory of its own. A run kernel by kernel is watched first:
//! when its buffers come and go gives the [`Plan`] of where each lies in one block. The recording takes its buffers by that plan and keeps all
//! of them until it has ended, so that meanwhile nothing but launches reaches the driver. All graphs of one [`Arena`] run over the same
//! memory: what one leaves is there until the next one runs.

use std::any::Any;
use std::cell::RefCell;
use std::ops::Range;
use std::sync::{Arc, Mutex};

use candle_core::cuda_backend::WrapErr;
use candle_core::cuda_backend::cudarc::driver::{
    CudaContext, CudaSlice, CudaStream, DevicePtr, DeviceRepr, sys,
};
use candle_core::{CudaDevice, Result, Tensor};

use crate::check::arg;
use crate::gaps::Pieces;

/// Bytes that a buffer's address is a multiple of, and that the first one lies behind a block's start.
const ALIGN: usize = 256;
/// Bytes of the first block.
const FIRST: usize = 8 << 20;

const OP: &str = "recorded pass";

/// Where a pass's buffers lie in a block, in the order in which it asks for them.
#[derive(Clone, Debug)]
pub(crate) struct Plan(Arc<[Range<usize>]>);

impl Plan {
    fn bytes(&self) -> usize {
        self.0.iter().map(|piece| piece.end).max().unwrap_or(0)
    }
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
}

/// A slice that counts as dropped when the holder has no other owner.
///
/// # Safety
/// `len` elements are at the address; what the drop of an allocation of `stream` does to them is right.
unsafe fn held<T>(
    stream: &CudaStream,
    address: sys::CUdeviceptr,
    len: usize,
) -> (CudaSlice<T>, Arc<CudaStream>) {
    // SAFETY: a buffer's storage keeps its device, and with it the stream, and an idle one lives as long as the process.
    let holder = unsafe { stream.context().wrap_borrowed_stream(stream.cu_stream()) };
    // SAFETY: the caller's promise.
    (unsafe { holder.upgrade_device_ptr(address, len) }, holder)
}

fn is_dropped(holder: &Arc<CudaStream>) -> bool {
    Arc::strong_count(holder) == 1
}

/// A pass that is watched: its buffers are the device's own.
struct Watched {
    stream: Arc<CudaStream>,
    pieces: Pieces<Arc<CudaStream>>,
}

impl Watched {
    fn take<T: DeviceRepr>(&mut self, len: usize) -> Result<CudaSlice<T>> {
        // SAFETY: whoever takes it writes it before it is read.
        let address = unsafe { self.stream.alloc::<T>(len) }.w()?.leak();
        // SAFETY: an allocation of this stream, owned by nobody else.
        let (slice, holder) = unsafe { held(&self.stream, address, len) };
        self.pieces.place(bytes_of::<T>(len), ALIGN, holder, |holder| !is_dropped(holder));
        Ok(slice)
    }
}

/// A pass that is being recorded.
struct Recorded {
    stream: Arc<CudaStream>,
    idle: Idle,
    /// The address of the block.
    block: sys::CUdeviceptr,
    plan: Plan,
    holders: Vec<Arc<CudaStream>>,
    kept: Vec<Box<dyn Any>>,
}

impl Recorded {
    fn take<T: DeviceRepr>(&mut self, len: usize) -> Result<CudaSlice<T>> {
        let (number, bytes) = (self.holders.len(), bytes_of::<T>(len));
        self.check(format_args!("before buffer {number} of {bytes} bytes"))?;
        let Some(piece) = self.plan.0.get(number).filter(|piece| piece.len() == bytes) else {
            let got = format_args!("{bytes} bytes as number {number}");
            return arg(OP, "buffers").refuse(format_args!("those of its run before"), got);
        };
        let address = self.block + piece.start as sys::CUdeviceptr;
        // SAFETY: the piece lies inside the block behind its first byte, where no allocation begins; buffers share memory only as the plan has
        // it, by which the pass's launches are done with one when another begins.
        let (slice, holder) = unsafe { held(&self.idle.0, address, len) };
        self.holders.push(holder);
        Ok(slice)
    }

    /// Refuses to go on when the driver has given the recording up.
    fn check(&self, when: std::fmt::Arguments<'_>) -> Result<()> {
        if self.stream.capture_status().w()? == sys::CUstreamCaptureStatus::CU_STREAM_CAPTURE_STATUS_ACTIVE {
            return Ok(());
        }
        let dropped = self.holders.iter().filter(|holder| is_dropped(holder)).count();
        let got = format_args!("one that ended {when}, {dropped} buffers dropped");
        arg(OP, "recording").refuse(format_args!("one that goes on"), got)
    }
}

enum Open {
    Watched(Watched),
    Recorded(Recorded),
}

thread_local!(static OPEN: RefCell<Option<Open>> = const { RefCell::new(None) });

/// Runs `work` with `open` in force, and gives it back.
fn with<T>(open: Open, work: impl FnOnce() -> T) -> (T, Option<Open>) {
    /// Closes it if `work` panics.
    struct Close;
    impl Drop for Close {
        fn drop(&mut self) {
            OPEN.take();
        }
    }
    OPEN.set(Some(open));
    let close = Close;
    let done = work();
    let open = OPEN.take();
    drop(close);
    (done, open)
}

/// Whether this thread is recording a pass.
pub(crate) fn is_recording() -> bool {
    OPEN.with_borrow(|open| matches!(open, Some(Open::Recorded(_))))
}

/// Keeps a buffer that nobody needs any more until the pass that is being recorded has been.
pub(crate) fn keep<T: 'static>(buffer: T) {
    OPEN.with_borrow_mut(|open| {
        if let Some(Open::Recorded(recorded)) = open {
            recorded.kept.push(Box::new(buffer));
        }
    });
}

/// An op's result, which a recording [`keep`]s.
///
/// # Errors
/// When the driver gave the recording up in the op.
pub(crate) fn kept(made: Tensor) -> Result<Tensor> {
    keep(made.clone());
    OPEN.with_borrow(|open| match open {
        Some(Open::Recorded(recorded)) => {
            recorded.check(format_args!("in the launches of buffer {}", recorded.holders.len().max(1) - 1))
        }
        _ => Ok(()),
    })?;
    Ok(made)
}

/// Room for `len` elements in a pass that is watched or recorded, `None` in others.
pub(super) fn take<T: DeviceRepr>(device: &CudaDevice, len: usize) -> Result<Option<CudaSlice<T>>> {
    let here = |stream: &Arc<CudaStream>| Arc::ptr_eq(stream, &device.cuda_stream());
    OPEN.with_borrow_mut(|open| match open {
        Some(Open::Watched(watched)) if here(&watched.stream) => watched.take(len).map(Some),
        Some(Open::Recorded(recorded)) if here(&recorded.stream) => recorded.take(len).map(Some),
        _ => Ok(None),
    })
}

fn bytes_of<T>(len: usize) -> usize {
    (len * size_of::<T>()).next_multiple_of(ALIGN).max(ALIGN)
}

/// Runs `work` over memory of the stream, and tells where its buffers may lie when it is recorded.
pub(super) fn watch<T>(stream: &Arc<CudaStream>, work: impl FnOnce() -> T) -> (T, Option<Plan>) {
    let watched = Watched { stream: stream.clone(), pieces: Pieces::new() };
    let (done, open) = with(Open::Watched(watched), work);
    let plan = match open {
        Some(Open::Watched(watched)) => Some(Plan(watched.pieces.places().into())),
        _ => None,
    };
    (done, plan)
}

/// The buffers of a recording, some of which nothing else owns.
pub(super) struct Used(#[expect(dead_code, reason = "owned until it is dropped")] Option<Open>);

/// Memory of recorded passes.
pub(super) struct Arena {
    stream: Arc<CudaStream>,
    /// Graphs run over all of them; new ones over the last.
    blocks: Vec<CudaSlice<u8>>,
    idle: Idle,
}

impl Arena {
    /// An empty arena.
    pub(super) fn new(stream: &Arc<CudaStream>) -> Result<Self> {
        Ok(Self { stream: stream.clone(), blocks: Vec::new(), idle: Idle::of(stream)? })
    }

    /// Bytes of device memory that it holds.
    pub(super) fn bytes(&self) -> usize {
        self.blocks.iter().map(CudaSlice::len).sum()
    }

    /// Makes room for a plan, to be called when nothing is being recorded.
    pub(super) fn room(&mut self, plan: &Plan) -> Result<sys::CUdeviceptr> {
        let last = self.blocks.last().map_or(0, CudaSlice::len);
        if last < plan.bytes() {
            let bytes = plan.bytes().max(2 * last).max(FIRST);
            // SAFETY: whoever takes a piece of it writes it before it is read.
            self.blocks.push(unsafe { self.stream.alloc::<u8>(bytes) }.w()?);
        }
        Ok(self.blocks.last().map_or(0, |block| block.device_ptr(&self.stream).0))
    }

    /// Runs `work`, whose ops take their memory by `plan` in the block at `block` ([`Self::room`]); what it used is to be dropped when the recording has
    /// ended.
    pub(super) fn record<T>(
        &self,
        plan: &Plan,
        block: sys::CUdeviceptr,
        work: impl FnOnce() -> T,
    ) -> (T, Used) {
        let recorded = Recorded {
            stream: self.stream.clone(),
            idle: self.idle.clone(),
            block,
            plan: plan.clone(),
            holders: Vec::new(),
            kept: Vec::new(),
        };
        let (done, open) = with(Open::Recorded(recorded), work);
        (done, Used(open))
    }
}
