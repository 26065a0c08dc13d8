//! Trees and paths on a device, prepared once per round.

#[cfg(feature = "cuda")]
use std::sync::{Arc, OnceLock};

use candle_core::{Device, Result, Tensor, bail};
#[cfg(feature = "cuda")]
use canopy_kernels::cuda::{PathsLayout, PathsOnDevice, TreeLayout, TreeOnDevice, Words};
use canopy_kernels::{AcceptedPaths, TreeBatch};

use crate::check::arg;
#[cfg(feature = "cuda")]
use crate::cuda::parts::{BatchLayout, Parts};
use crate::wrap::WrapKernelErr;

/// A [`TreeBatch`] ready for a device's kernels.
///
/// ```
/// use canopy_candle::{DeviceTree, DraftTree, TreeBatch};
/// use candle_core::Device;
///
/// let tree = DraftTree::new(vec![-1, 0, 0]).unwrap();
/// let tree = DeviceTree::new(TreeBatch::single(tree, 0), &Device::Cpu)?;
/// assert_eq!(tree.host().rows(), 3);
/// # Ok::<(), candle_core::Error>(())
/// ```
#[derive(Clone, Debug)]
pub struct DeviceTree {
    host: TreeBatch,
    device: Device,
    #[cfg(feature = "cuda")]
    on_device: Option<Arc<OnDevice>>,
    /// The parts for bf16 outputs, once a batch that has both was asked for them.
    #[cfg(feature = "cuda")]
    halves: Arc<OnceLock<[TreeOnDevice; 2]>>,
}

/// The whole batch, and its parts.
#[cfg(feature = "cuda")]
type OnDevice = (TreeOnDevice, Parts<TreeOnDevice>);

impl DeviceTree {
    /// Copies what the device's kernels read.
    ///
    /// # Errors
    /// On a device that canopy has no kernels for (metal).
    pub fn new(batch: TreeBatch, device: &Device) -> Result<Self> {
        supported("device tree", device)?;
        Ok(Self {
            #[cfg(feature = "cuda")]
            on_device: crate::cuda::upload(device, |stream| {
                let mut words = Words::default();
                let layout = BatchLayout::new(stream, &batch, &mut words)?;
                Ok(layout.on(&words.upload(stream)?))
            })?,
            #[cfg(feature = "cuda")]
            halves: Arc::default(),
            host: batch,
            device: device.clone(),
        })
    }

    /// [`TreeBatch::slices`] of long chains, for [`tree_attention`](crate::tree_attention) alone: several may share a slot.
    ///
    /// # Errors
    /// As [`Self::new`], and those of [`TreeBatch::slices`].
    pub fn slices(lens: &[usize], slots: &[i32], device: &Device) -> Result<Self> {
        supported("device tree", device)?;
        let batch = TreeBatch::slices(lens, slots).wrap()?;
        Ok(Self {
            #[cfg(feature = "cuda")]
            on_device: crate::cuda::upload(device, |stream| {
                let mut words = Words::default();
                let layout = TreeLayout::unsolved(&batch, &mut words);
                Ok((layout.on(&words.upload(stream)?), Parts::Solved))
            })?,
            #[cfg(feature = "cuda")]
            halves: Arc::default(),
            host: batch,
            device: device.clone(),
        })
    }

    /// A tree whose lists are on the device.
    #[cfg(feature = "cuda")]
    pub(crate) fn placed(host: TreeBatch, device: &Device, on_device: OnDevice) -> Self {
        let on_device = Some(Arc::new(on_device));
        Self { host, device: device.clone(), on_device, halves: Arc::default() }
    }

    /// The trees themselves.
    pub fn host(&self) -> &TreeBatch {
        &self.host
    }

    /// Where the trees are; every tensor of an op must be there too.
    pub fn device(&self) -> &Device {
        &self.device
    }

    /// What the kernels read.
    #[cfg(feature = "cuda")]
    pub(crate) fn on_device(&self, op: &'static str) -> Result<&TreeOnDevice> {
        Ok(&on_device(op, self.on_device.as_deref(), &self.device)?.0)
    }

    /// The sequences that are solved and those that are walked as chains.
    #[cfg(feature = "cuda")]
    pub(crate) fn parts(&self, op: &'static str) -> Result<[Option<&TreeOnDevice>; 2]> {
        let (whole, parts) = on_device(op, self.on_device.as_deref(), &self.device)?;
        Ok(match parts {
            Parts::Solved => [Some(whole), None],
            Parts::Walked => [None, Some(whole)],
            Parts::Both(parts) => parts.each_ref().map(Some),
        })
    }

    /// The sequences whose bf16 outputs come from the fused design and those whose come from the blocked one.
    ///
    /// # Errors
    /// From the driver; in a pass that is recorded, a batch of both, since a later run could not replace the lists.
    #[cfg(feature = "cuda")]
    pub(crate) fn halves(&self, op: &'static str) -> Result<[Option<&TreeOnDevice>; 2]> {
        let whole = self.on_device(op)?;
        let stream = self.device.as_cuda_device()?.cuda_stream();
        let blocked = crate::cuda::parts::blocked(&stream, &self.host).wrap()?;
        match (blocked.contains(&true), blocked.contains(&false)) {
            (false, _) => return Ok([Some(whole), None]),
            (true, false) => return Ok([None, Some(whole)]),
            (true, true) => {}
        }
        if let Some(parts) = self.halves.get() {
            return Ok(parts.each_ref().map(Some));
        }
        if crate::cuda::memory::is_recording() {
            let expected = format_args!("trees of one design for BF16 outputs in a recorded pass");
            return arg(op, "tree").refuse(expected, format_args!("trees of both"));
        }
        let solved: Vec<bool> = blocked.iter().map(|blocked| !blocked).collect();
        let part = |kept: &[bool]| whole.keeping(&stream, &self.host, kept).wrap();
        let made = [part(&solved)?, part(&blocked)?];
        Ok(self.halves.get_or_init(|| made).each_ref().map(Some))
    }

    pub(crate) fn check_devices(&self, op: &'static str, tensors: &[Named<'_>]) -> Result<()> {
        check_devices(op, &self.device, tensors)
    }
}

/// [`AcceptedPaths`] ready for a device's kernels.
///
/// ```
/// use canopy_candle::{AcceptedPaths, DevicePaths, DraftTree, TreeBatch};
/// use candle_core::Device;
///
/// let batch = TreeBatch::single(DraftTree::new(vec![-1, 0, 0]).unwrap(), 0);
/// let paths = AcceptedPaths::new(&batch, &[vec![0, 2]]).unwrap();
/// let paths = DevicePaths::new(paths, &Device::Cpu)?;
/// assert_eq!(paths.host().rows(), [0, 2]);
/// # Ok::<(), candle_core::Error>(())
/// ```
#[derive(Clone, Debug)]
pub struct DevicePaths {
    host: AcceptedPaths,
    device: Device,
    #[cfg(feature = "cuda")]
    on_device: Option<Arc<PathsOnDevice>>,
}

impl DevicePaths {
    /// Copies what the device's kernels read.
    ///
    /// # Errors
    /// On a device that canopy has no kernels for (metal).
    pub fn new(paths: AcceptedPaths, device: &Device) -> Result<Self> {
        supported("device paths", device)?;
        Ok(Self {
            #[cfg(feature = "cuda")]
            on_device: crate::cuda::upload(device, |stream| {
                let mut words = Words::default();
                let layout = PathsLayout::new(&paths, &mut words);
                Ok(layout.on(&words.upload(stream)?))
            })?,
            host: paths,
            device: device.clone(),
        })
    }

    /// Paths whose lists are on the device.
    #[cfg(feature = "cuda")]
    pub(crate) fn placed(host: AcceptedPaths, device: &Device, on_device: PathsOnDevice) -> Self {
        Self { host, device: device.clone(), on_device: Some(Arc::new(on_device)) }
    }

    /// The paths themselves; those that the device's walk found are [`AcceptedPaths::unknown`] to the host.
    pub fn host(&self) -> &AcceptedPaths {
        &self.host
    }

    /// Where the paths are; every tensor of an op must be there too.
    pub fn device(&self) -> &Device {
        &self.device
    }

    pub(crate) fn check_devices(&self, op: &'static str, tensors: &[Named<'_>]) -> Result<()> {
        check_devices(op, &self.device, tensors)
    }

    /// What the kernels read.
    #[cfg(feature = "cuda")]
    pub(crate) fn on_device(&self, op: &'static str) -> Result<&PathsOnDevice> {
        on_device(op, self.on_device.as_deref(), &self.device)
    }

    /// N, the packed rows of the batch that the paths belong to.
    pub(crate) fn batch_rows(&self) -> usize {
        self.host.cu_nodes().last().copied().unwrap_or(0) as usize
    }

    /// Checks that every slot lies inside a pool of `pool_slots` slots.
    pub(crate) fn check_slots(&self, op: &'static str, pool_slots: usize) -> Result<()> {
        self.host.check_slots(op, pool_slots).wrap()
    }
}

/// An argument's name and its tensor.
pub(crate) type Named<'a> = (&'static str, &'a Tensor);

#[cfg(feature = "cuda")]
fn on_device<'a, T>(op: &'static str, uploaded: Option<&'a T>, device: &Device) -> Result<&'a T> {
    match uploaded {
        Some(uploaded) => Ok(uploaded),
        None => arg(op, "tree").refuse(format_args!("a tree on CUDA"), format_args!("{device:?}")),
    }
}

pub(crate) fn supported(op: &'static str, device: &Device) -> Result<()> {
    match device {
        Device::Cpu | Device::Cuda(_) => Ok(()),
        Device::Metal(_) => bail!("{op}: device, expected: CPU or CUDA, got: Metal"),
    }
}

/// Every tensor lies on `device`.
pub(crate) fn check_devices(op: &'static str, device: &Device, tensors: &[Named<'_>]) -> Result<()> {
    tensors.iter().try_for_each(|&(name, tensor)| arg(op, name).device(tensor, device))
}
