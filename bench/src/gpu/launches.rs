//! One launch of any GDN kernel: what a batch of trees is on the device, and the buffers of one call.

use std::sync::Arc;

use anyhow::{Context, Result};
use canopy_kernels::cuda::{PathsOnDevice, TreeOnDevice};
use canopy_kernels::tree_gdn::{Schedule, blocked, fused, launch, series};
use canopy_kernels::tree_gdn_serial::launch as serial;
use canopy_kernels::{AcceptedPaths, GdnDims, TreeBatch};
use cudarc::driver::{CudaSlice, CudaStream};
use half::bf16;

use super::variant::Variant;

/// Inputs and outputs of one call; shapes as on the room's page.
pub struct Set {
    /// Rows in bf16.
    pub qkv: CudaSlice<bf16>,
    /// The same in f32, once a variant that reads them so was asked for.
    pub wide: Option<CudaSlice<f32>>,
    /// Log gates and write strengths.
    pub gates: CudaSlice<f32>,
    /// The pool.
    pub state: CudaSlice<f32>,
    /// Outputs of tier A.
    pub o: CudaSlice<f32>,
    /// Outputs of tier B.
    pub o16: CudaSlice<bf16>,
    /// Pseudo-values.
    pub u: CudaSlice<f32>,
    /// Cumulative log gates.
    pub g_cum: CudaSlice<f32>,
}

impl Set {
    /// A copy of every buffer.
    ///
    /// # Errors
    /// From the driver.
    pub fn copy(&self, stream: &Arc<CudaStream>) -> Result<Self> {
        Ok(Self {
            qkv: stream.clone_dtod(&self.qkv)?,
            wide: self.wide.as_ref().map(|wide| stream.clone_dtod(wide)).transpose()?,
            gates: stream.clone_dtod(&self.gates)?,
            state: stream.clone_dtod(&self.state)?,
            o: stream.clone_dtod(&self.o)?,
            o16: stream.clone_dtod(&self.o16)?,
            u: stream.clone_dtod(&self.u)?,
            g_cum: stream.clone_dtod(&self.g_cum)?,
        })
    }
}

/// What some variants need beside a set, made by [`Trees::reserve`].
pub struct Room {
    scratch: CudaSlice<f32>,
    /// Every node's state.
    pub snapshots: Option<CudaSlice<f32>>,
}

/// A batch of trees with an accepted path each, as the kernels read them.
pub struct Trees {
    /// Head counts and sizes.
    pub dims: GdnDims,
    /// The trees.
    pub batch: TreeBatch,
    /// Whether the forms that are built for both take f32 rows.
    pub f32_rows: bool,
    levels: TreeOnDevice,
    chains: TreeOnDevice,
    paths: AcceptedPaths,
    on_device: PathsOnDevice,
}

impl Trees {
    /// Uploads what every launch shares.
    ///
    /// # Errors
    /// From the driver.
    pub fn new(
        stream: &Arc<CudaStream>,
        dims: GdnDims,
        batch: TreeBatch,
        paths: AcceptedPaths,
        f32_rows: bool,
    ) -> Result<Self> {
        Ok(Self {
            levels: TreeOnDevice::with_schedule(stream, &batch, |_| Schedule::Levels)?,
            chains: TreeOnDevice::with_schedule(stream, &batch, |_| Schedule::Chains)?,
            on_device: PathsOnDevice::new(stream, &paths)?,
            dims,
            batch,
            paths,
            f32_rows,
        })
    }

    /// The trees under a schedule.
    pub fn under(&self, schedule: Schedule) -> &TreeOnDevice {
        if schedule == Schedule::Levels { &self.levels } else { &self.chains }
    }

    /// The trees under the schedule that the first one's depth asks for.
    pub fn usual(&self) -> &TreeOnDevice {
        self.under(self.batch.trees().first().map_or(Schedule::Levels, Schedule::for_tree))
    }

    /// The accepted paths, on the host and on the device.
    pub fn paths(&self) -> (&AcceptedPaths, &PathsOnDevice) {
        (&self.paths, &self.on_device)
    }

    /// Nodes of all accepted paths.
    pub fn path_rows(&self) -> usize {
        self.paths.rows().len()
    }

    /// Scratch for the split design, and no snapshots.
    ///
    /// # Errors
    /// From the driver.
    pub fn room(&self, stream: &Arc<CudaStream>) -> Result<Room> {
        let scratch = stream.alloc_zeros(launch::scratch_len(self.dims, &self.batch).max(1))?;
        Ok(Room { scratch, snapshots: None })
    }

    /// Room for every node's state and for a series' matrices, for the variants that use them. Not while a graph is captured, nor between a
    /// capture and its replays.
    ///
    /// # Errors
    /// From the driver.
    pub fn reserve(&self, stream: &Arc<CudaStream>, variant: Variant, room: &mut Room) -> Result<()> {
        if let Variant::Series(solve) = variant {
            let needed = series::scratch_len(self.dims, &self.batch, solve)?;
            if room.scratch.len() < needed {
                room.scratch = stream.alloc_zeros(needed)?;
            }
        }
        let keeps = matches!(variant, Variant::Snapshots(_) | Variant::SnapshotCommit);
        if keeps && room.snapshots.is_none() {
            // SAFETY: verify writes every element before commit reads one.
            room.snapshots = Some(unsafe { stream.alloc(self.batch.rows() * self.dims.state_len()) }?);
        }
        Ok(())
    }

    /// One launch of `variant`, which is no round, on `set`.
    ///
    /// # Errors
    /// From the launcher.
    pub fn launch(
        &self,
        stream: &Arc<CudaStream>,
        variant: Variant,
        set: &mut Set,
        room: &mut Room,
    ) -> Result<()> {
        let Set { qkv, wide, gates, state, o, o16, u, g_cum } = set;
        let (dims, batch, gates) = (self.dims, &self.batch, gates.as_view());
        macro_rules! rows {
            ($rows:ident => $call:expr) => {
                match wide {
                    Some(wide) if self.f32_rows => {
                        let $rows = wide.as_view();
                        $call?
                    }
                    _ => {
                        let $rows = qkv.as_view();
                        $call?
                    }
                }
            };
        }
        macro_rules! buffers {
            ($qkv:expr, $o:ident) => {
                fused::FusedBuffers {
                    qkv: $qkv,
                    gates,
                    state: state.as_view(),
                    o: $o.as_view_mut(),
                    u: u.as_view_mut(),
                    g_cum: g_cum.as_view_mut(),
                }
            };
        }
        macro_rules! split {
            ($qkv:ident) => {
                launch::VerifyBuffers {
                    qkv: $qkv,
                    gates,
                    state: state.as_view(),
                    scratch: &mut room.scratch,
                    o: o.as_view_mut(),
                    u: u.as_view_mut(),
                    g_cum: g_cum.as_view_mut(),
                }
            };
        }
        const RESERVED: &str = "snapshots are reserved first";
        match variant {
            Variant::Split => {
                rows!(qkv => launch::verify(stream, dims, batch, &self.levels, split!(qkv)))
            }
            Variant::Series(solve) => {
                rows!(qkv => series::verify(stream, dims, batch, &self.levels, solve, split!(qkv)))
            }
            Variant::FusedA(columns, schedule) => {
                let buffers = buffers!(qkv.as_view(), o);
                fused::verify(stream, dims, batch, self.under(schedule), columns, buffers)?;
            }
            Variant::FusedB(columns, schedule) => {
                let buffers = buffers!(qkv.as_view(), o16);
                fused::verify(stream, dims, batch, self.under(schedule), columns, buffers)?;
            }
            Variant::Wide(columns) => {
                let rows = wide.as_ref().context("f32 rows are reserved first")?.as_view();
                fused::verify_wide(stream, dims, batch, self.usual(), columns, buffers!(rows, o))?;
            }
            Variant::Blocked(columns) => {
                let buffers = buffers!(qkv.as_view(), o16);
                blocked::verify(stream, dims, batch, &self.levels, columns, buffers)?;
            }
            Variant::Commit(columns) => {
                let mut pool = state.as_view_mut();
                let u = u.as_view();
                rows!(qkv => {
                    let tape = launch::LayerTape { qkv, gates, u };
                    launch::commit_in(stream, dims, &self.paths, &self.on_device, &[tape], columns, &mut pool)
                })
            }
            Variant::Snapshots(columns) => {
                let snapshots = room.snapshots.as_mut().context(RESERVED)?.as_view_mut();
                let (state, o) = (state.as_view(), o.as_view_mut());
                rows!(qkv => {
                    let buffers = serial::SnapshotBuffers { qkv, gates, state, snapshots, o };
                    serial::verify(stream, dims, batch, &self.levels, columns, buffers)
                })
            }
            Variant::Chain(columns) => {
                let (o, u, g_cum) = (o.as_view_mut(), u.as_view_mut(), g_cum.as_view_mut());
                let state = serial::Pool::Read(state.as_view());
                rows!(qkv => {
                    let buffers = serial::ChainBuffers { qkv, gates, state, o, u, g_cum };
                    serial::chain(stream, dims, batch, &self.levels, columns, buffers)
                })
            }
            Variant::SnapshotCommit => {
                let snapshots = room.snapshots.as_ref().context(RESERVED)?.as_view();
                let state = state.as_view_mut();
                serial::commit(stream, dims, &self.paths, &self.on_device, snapshots, state)?;
            }
            Variant::Round(_) | Variant::RoundInOne(_) => anyhow::bail!("a round has two sets"),
        }
        Ok(())
    }

    /// Commits the paths into the states of `now` from the tape of `last`, and verifies from there, in one launch or in two.
    ///
    /// # Errors
    /// From the launchers.
    pub fn round(
        &self,
        stream: &Arc<CudaStream>,
        columns: usize,
        in_one: bool,
        now: &mut Set,
        last: &Set,
    ) -> Result<()> {
        let (dims, batch, paths, on_device) = (self.dims, &self.batch, &self.paths, &self.on_device);
        let (o, u, g_cum) = (now.o.as_view_mut(), now.u.as_view_mut(), now.g_cum.as_view_mut());
        let (qkv, gates) = (now.qkv.as_view(), now.gates.as_view());
        let (last_qkv, last_gates, last_u) = (last.qkv.as_view(), last.gates.as_view(), last.u.as_view());
        if in_one {
            let pending = fused::Pending { qkv: last_qkv, gates: last_gates, u: last_u, paths, on_device };
            let state = now.state.as_view_mut();
            let buffers = fused::FusedBuffers { qkv, gates, state, o, u, g_cum };
            fused::commit_and_verify(stream, dims, batch, &self.levels, columns, pending, buffers)?;
            return Ok(());
        }
        let tape = launch::LayerTape { qkv: last_qkv, gates: last_gates, u: last_u };
        launch::commit(stream, dims, paths, on_device, &[tape], &mut now.state.as_view_mut())?;
        let buffers = fused::FusedBuffers { qkv, gates, state: now.state.as_view(), o, u, g_cum };
        fused::verify(stream, dims, batch, &self.levels, columns, buffers)?;
        Ok(())
    }
}
