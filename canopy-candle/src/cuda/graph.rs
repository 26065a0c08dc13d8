//! Passes recorded as CUDA graphs.

use std::panic::{AssertUnwindSafe, catch_unwind, resume_unwind};
use std::sync::Arc;

use candle_core::cuda_backend::WrapErr;
use candle_core::cuda_backend::cudarc::driver::{CudaGraph, CudaStream, sys};
use candle_core::{CudaDevice, Error, Result};

use super::memory::{self, Arena, Plan};
use crate::check::arg;
use crate::recorded::Outcome;

/// A recorded pass. Its launches follow one another on the device's one stream.
pub(crate) struct Graph(CudaGraph);

// SAFETY: the handles belong to the context, not to a thread, and whoever owns the graph launches and drops it from one thread at a time.
unsafe impl Send for Graph {}

impl Graph {
    /// Runs the pass again, with what its lists hold now.
    pub(crate) fn launch(&self) -> Result<()> {
        self.0.launch().w()
    }
}

/// Records passes over one arena.
pub(crate) struct Recorder {
    stream: Arc<CudaStream>,
    arena: Arena,
}

impl Recorder {
    /// On a device's stream.
    pub(crate) fn new(device: &CudaDevice) -> Result<Self> {
        let stream = device.cuda_stream();
        Ok(Self { arena: Arena::new(&stream)?, stream })
    }

    /// Bytes of device memory that all its graphs share.
    pub(crate) fn bytes(&self) -> usize {
        self.arena.bytes()
    }

    /// Runs `work` kernel by kernel, and tells where its buffers may lie when it is recorded.
    pub(crate) fn watch<T>(&self, work: impl FnOnce() -> T) -> (T, Option<Plan>) {
        memory::watch(&self.stream, work)
    }

    /// Records what `work` launches, which is what it launched when it was watched; nothing runs yet. What `work` gives lies in the arena.
    ///
    /// # Errors
    /// Those of `work`; a step that a graph cannot take, or not again, such as a copy from the host.
    pub(crate) fn record<T, E: From<Error>>(
        &mut self,
        plan: &Plan,
        work: impl Fn() -> Outcome<T, E>,
    ) -> Outcome<(Graph, T), E> {
        let block = self.arena.room(plan)?;
        // The strict modes are about calls that other threads and libraries make meanwhile; this thread makes none but launches.
        let mode = sys::CUstreamCaptureMode::CU_STREAM_CAPTURE_MODE_RELAXED;
        self.stream.begin_capture(mode).w().map_err(E::from)?;
        let (worked, used) = self.arena.record(plan, block, || catch_unwind(AssertUnwindSafe(work)));
        let flags = sys::CUgraphInstantiate_flags::CUDA_GRAPH_INSTANTIATE_FLAG_AUTO_FREE_ON_LAUNCH;
        let ended = self.stream.end_capture(flags).w();
        drop(used);
        let recorded = match worked {
            Err(panic) => {
                self.forget_errors();
                resume_unwind(panic)
            }
            Ok(Err(error)) => Err(error),
            Ok(Ok(value)) => match ended.and_then(checked) {
                Ok(graph) => Ok((graph, value)),
                Err(error) => Err(error.into()),
            },
        };
        if recorded.is_err() {
            self.forget_errors();
        }
        recorded
    }

    /// What a recording that failed allocated in its graph cannot be freed, as it was never there: the driver says so in every drop.
    fn forget_errors(&self) {
        _ = self.stream.context().check_err();
    }
}

/// Refuses a graph with steps that would not be right a second time.
fn checked(graph: Option<CudaGraph>) -> Result<Graph> {
    let refuse = |what: std::fmt::Arguments<'_>| {
        arg("recorded pass", "steps").refuse(format_args!("kernels over memory that stays"), what)
    };
    let Some(graph) = graph else { return refuse(format_args!("none")) };
    for node in nodes(graph.cu_graph())? {
        match kind(node)? {
            sys::CUgraphNodeType::CU_GRAPH_NODE_TYPE_KERNEL
            | sys::CUgraphNodeType::CU_GRAPH_NODE_TYPE_MEMSET => {}
            sys::CUgraphNodeType::CU_GRAPH_NODE_TYPE_MEMCPY => {
                if !within_device(node)? {
                    return refuse(format_args!("a copy from or to the host"));
                }
            }
            other => return refuse(format_args!("{other:?}")),
        }
    }
    Ok(Graph(graph))
}

fn nodes(graph: sys::CUgraph) -> Result<Vec<sys::CUgraphNode>> {
    let mut count = 0;
    // SAFETY: the graph lives; without an array the call counts.
    unsafe { sys::cuGraphGetNodes(graph, std::ptr::null_mut(), &raw mut count) }.result().w()?;
    let mut nodes = vec![std::ptr::null_mut(); count];
    // SAFETY: the array has room for `count` nodes.
    unsafe { sys::cuGraphGetNodes(graph, nodes.as_mut_ptr(), &raw mut count) }.result().w()?;
    nodes.truncate(count);
    Ok(nodes)
}

fn kind(node: sys::CUgraphNode) -> Result<sys::CUgraphNodeType> {
    let mut kind = sys::CUgraphNodeType::CU_GRAPH_NODE_TYPE_EMPTY;
    // SAFETY: a node of a living graph.
    unsafe { sys::cuGraphNodeGetType(node, &raw mut kind) }.result().w()?;
    Ok(kind)
}

fn within_device(node: sys::CUgraphNode) -> Result<bool> {
    // SAFETY: a plain struct of integers, pointers and enums that all have a zero or are written below.
    let mut copy: std::mem::MaybeUninit<sys::CUDA_MEMCPY3D> = std::mem::MaybeUninit::uninit();
    // SAFETY: a copy's node of a living graph; the call writes the whole struct.
    let copy = unsafe {
        sys::cuGraphMemcpyNodeGetParams(node, copy.as_mut_ptr()).result().w()?;
        copy.assume_init()
    };
    let device = sys::CUmemorytype::CU_MEMORYTYPE_DEVICE;
    Ok(copy.srcMemoryType == device && copy.dstMemoryType == device)
}
