//! Passes recorded as CUDA graphs.

use std::panic::{AssertUnwindSafe, catch_unwind, resume_unwind};
use std::sync::Arc;

use candle_core::cuda_backend::WrapErr;
use candle_core::cuda_backend::cudarc::driver::{CudaGraph, CudaStream, sys};
use candle_core::{CudaDevice, Error, Result};

use super::memory::{self, Arena};
use crate::check::arg;
use crate::recorded::Outcome;

/// How often one pass is recorded anew because its memory did not suffice.
const ATTEMPTS: usize = 12;

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
    arena: Option<Arena>,
    /// Passes allocate by nodes of their graph, where they could not be recorded over the arena.
    by_nodes: bool,
}

impl Recorder {
    /// On a device's stream.
    pub(crate) fn new(device: &CudaDevice) -> Result<Self> {
        Ok(Self { stream: device.cuda_stream(), arena: Some(Arena::new(device)?), by_nodes: false })
    }

    /// Bytes of device memory that all its graphs share.
    pub(crate) fn bytes(&self) -> usize {
        self.arena.as_ref().map_or(0, Arena::bytes)
    }

    /// Records what `work` launches; nothing runs yet. What `work` gives lies in the arena.
    ///
    /// # Errors
    /// Those of `work`; a step that a graph cannot take, or not again, such as a copy from the host.
    pub(crate) fn record<T, E: From<Error>>(
        &mut self,
        work: impl Fn() -> Outcome<T, E>,
    ) -> Outcome<(Graph, T), E> {
        let mut attempts = 0;
        loop {
            attempts += 1;
            match self.attempt(&work) {
                Err(_) if attempts < ATTEMPTS && self.grow()? => {}
                Err(first) if !self.by_nodes => {
                    self.by_nodes = true;
                    return self.attempt(&work).map_err(|_| {
                        self.by_nodes = false;
                        first
                    });
                }
                done => return done,
            }
        }
    }

    fn grow(&mut self) -> Result<bool> {
        self.arena.as_mut().map_or(Ok(false), Arena::grow)
    }

    fn attempt<T, E: From<Error>>(&mut self, work: impl Fn() -> Outcome<T, E>) -> Outcome<(Graph, T), E> {
        // The drop of an arena's slice is a call that the stricter modes may not allow meanwhile.
        let mode = sys::CUstreamCaptureMode::CU_STREAM_CAPTURE_MODE_RELAXED;
        self.stream.begin_capture(mode).w().map_err(E::from)?;
        let worked = memory::with(&mut self.arena, self.by_nodes, || catch_unwind(AssertUnwindSafe(work)));
        let flags = sys::CUgraphInstantiate_flags::CUDA_GRAPH_INSTANTIATE_FLAG_AUTO_FREE_ON_LAUNCH;
        let ended = self.stream.end_capture(flags).w();
        let recorded = match worked {
            Err(panic) => {
                self.forget_errors();
                resume_unwind(panic)
            }
            Ok(Err(error)) => Err(error),
            Ok(Ok(value)) => match ended.and_then(|graph| checked(graph, self.by_nodes)) {
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
fn checked(graph: Option<CudaGraph>, by_nodes: bool) -> Result<Graph> {
    let refuse = |what: std::fmt::Arguments<'_>| {
        arg("recorded pass", "steps").refuse(format_args!("kernels over memory that stays"), what)
    };
    let Some(graph) = graph else { return refuse(format_args!("none")) };
    let (mut taken, mut freed) = (0, 0);
    for node in nodes(graph.cu_graph())? {
        match kind(node)? {
            sys::CUgraphNodeType::CU_GRAPH_NODE_TYPE_KERNEL
            | sys::CUgraphNodeType::CU_GRAPH_NODE_TYPE_MEMSET => {}
            sys::CUgraphNodeType::CU_GRAPH_NODE_TYPE_MEMCPY => {
                if !within_device(node)? {
                    return refuse(format_args!("a copy from or to the host"));
                }
            }
            sys::CUgraphNodeType::CU_GRAPH_NODE_TYPE_MEM_ALLOC => taken += 1,
            sys::CUgraphNodeType::CU_GRAPH_NODE_TYPE_MEM_FREE => freed += 1,
            other => return refuse(format_args!("{other:?}")),
        }
    }
    if taken != freed && !by_nodes {
        return refuse(format_args!("{taken} allocations of which {freed} are freed"));
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
