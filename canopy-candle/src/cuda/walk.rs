//! Launch of the accept walk, and the copy of its words to the host beside what is launched behind it.

use std::sync::{Arc, Mutex, PoisonError};

use candle_core::Result;
use candle_core::backend::BackendStorage;
use candle_core::cuda_backend::WrapErr;
use candle_core::cuda_backend::cudarc::driver::{
    CudaEvent, CudaSlice, CudaStream, DevicePtr, PinnedHostSlice, result, sys,
};
use canopy_kernels::AcceptedPaths;
use canopy_kernels::accept_walk::launch::{self, Buffers};
use canopy_kernels::accept_walk::row_words;
use canopy_kernels::cuda::{DeviceList, PathsOnDevice};

use super::gdn::Source;
use super::{lists, output, view};
use crate::check::arg;
use crate::recorded::List;
use crate::wrap::WrapKernelErr;
use crate::{DevicePaths, DeviceTree, StatedWalk};

/// One call; shapes are checked.
pub(crate) struct Walk<'a> {
    pub op: &'static str,
    pub tree: &'a DeviceTree,
    pub tokens: &'a [u32],
    pub best: Source<'a>,
    pub most: usize,
    pub stated: Option<StatedWalk<'a>>,
}

impl Walk<'_> {
    /// The paths, and the copy of the words under way.
    pub(crate) fn run(&self) -> Result<(DevicePaths, Copied)> {
        let (device, batch) = (self.best.0.device(), self.tree.host());
        let (stream, on_device) = (device.cuda_stream(), self.tree.on_device(self.op)?);
        let (rows, trees) = (batch.rows(), batch.sequences());
        let ids: Vec<i32> = self.tokens.iter().map(|id| id.cast_signed()).collect();
        let ids = lists::on_device(device, List::Ids, &ids)?;
        let stated = self.stated.map(|StatedWalk { nodes, wanted }| {
            let nodes: Vec<i32> = nodes.iter().map(|node| node.cast_signed()).collect();
            let lists = (
                lists::on_device(device, List::Nodes, &nodes)?,
                lists::on_device(device, List::Wanted, wanted)?,
            );
            Ok::<_, candle_core::Error>((lists, nodes.len(), wanted.len()))
        });
        let stated = stated.transpose()?;
        // Words, then the paths' rows, then where each path starts; each at a multiple of four.
        let words = trees * row_words(self.most);
        let [at_rows, at_starts] =
            [words.next_multiple_of(4), (words.next_multiple_of(4) + rows).next_multiple_of(4)];
        let mut buffer: CudaSlice<u32> = output(device, at_starts + trees + 1)?;
        {
            let (mut of_words, mut rest) = buffer.split_at_mut(at_rows);
            let (mut of_rows, mut of_starts) = rest.split_at_mut(at_starts - at_rows);
            // SAFETY: i32 and u32 have the same size.
            let paths =
                unsafe { (of_rows.transmute_mut::<i32>(rows), of_starts.transmute_mut::<i32>(trees + 1)) };
            let (Some(rows_out), Some(cu_rows)) = paths else {
                return arg(self.op, "rows").refuse(format_args!("{rows} words"), format_args!("fewer"));
            };
            let buffers = Buffers {
                parents: on_device.parents.first(rows),
                tokens: ids.bits(rows),
                cu_nodes: on_device.cu_nodes.first(trees + 1),
                best: view(arg(self.op, "best"), self.best.0, self.best.1)?,
                stated: stated.as_ref().map(|((nodes, wanted), n, w)| (nodes.bits(*n), wanted.first(*w))),
                words: of_words.slice_mut(..words),
                rows: rows_out,
                cu_rows,
            };
            launch::forward(&stream, batch.cu_nodes(), self.most, buffers).wrap()?;
        }
        let copied = Copied::start(&stream, &buffer, words)?;
        let buffer = Arc::new(buffer);
        let paths = PathsOnDevice {
            rows: DeviceList::new(&buffer, at_rows..at_rows + rows),
            cu_rows: DeviceList::new(&buffer, at_starts..at_starts + trees + 1),
            slots: on_device.slots.clone(),
            cu_nodes: on_device.cu_nodes.clone(),
        };
        Ok((DevicePaths::placed(AcceptedPaths::unknown(batch), self.tree.device(), paths), copied))
    }
}

/// Page-locked memory of a device's context, and the event behind the last copy into it.
#[derive(Debug)]
struct Pinned {
    memory: PinnedHostSlice<u32>,
    done: CudaEvent,
}

/// Page-locked memory that waits for its next use: to get some takes longer than a round's walk.
static FREE: Mutex<Vec<Pinned>> = Mutex::new(Vec::new());

/// Words that the smallest piece of it holds.
const LEAST: usize = 4096;

impl Pinned {
    fn take(stream: &Arc<CudaStream>, words: usize) -> Result<Self> {
        let mut free = FREE.lock().unwrap_or_else(PoisonError::into_inner);
        let fits =
            |pinned: &Pinned| pinned.memory.context() == stream.context() && pinned.memory.len() >= words;
        if let Some(at) = free.iter().position(fits) {
            return Ok(free.swap_remove(at));
        }
        let (context, flags) = (stream.context(), sys::CUevent_flags::CU_EVENT_DISABLE_TIMING);
        // SAFETY: nothing is read of it before a copy has written it.
        let memory =
            unsafe { context.alloc_pinned_with_flags(words.max(LEAST).next_power_of_two(), 0) }.w()?;
        Ok(Self { memory, done: context.new_event(Some(flags)).w()? })
    }
}

/// Words on their way to the host.
#[derive(Debug)]
pub(crate) struct Copied {
    pinned: Option<Pinned>,
    words: usize,
}

impl Copied {
    fn start(stream: &Arc<CudaStream>, from: &CudaSlice<u32>, words: usize) -> Result<Self> {
        let mut pinned = Pinned::take(stream, words)?;
        let (address, _in_use) = from.device_ptr(stream);
        let to = pinned.memory.as_mut_slice().w()?;
        // SAFETY: both hold so many words; the memory is not touched before the event behind the copy, nor freed: whoever drops a copy
        // that is under way waits for it.
        unsafe { result::memcpy_dtoh_async(&mut to[..words], address, stream.cu_stream()) }.w()?;
        let copied = Self { pinned: Some(pinned), words };
        if let Some(pinned) = &copied.pinned {
            pinned.done.record(stream).w()?;
        }
        Ok(copied)
    }

    /// The words, once they are there.
    pub(crate) fn wait(mut self) -> Result<Vec<u32>> {
        let Some(pinned) = self.pinned.take() else { return Ok(Vec::new()) };
        pinned.done.synchronize().w()?;
        let words = pinned.memory.as_slice().w()?[..self.words].to_vec();
        FREE.lock().unwrap_or_else(PoisonError::into_inner).push(pinned);
        Ok(words)
    }
}

impl Drop for Copied {
    fn drop(&mut self) {
        if let Some(pinned) = &self.pinned {
            _ = pinned.done.synchronize();
        }
    }
}
