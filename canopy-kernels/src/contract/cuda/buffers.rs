//! Device buffers inside larger ones: what lies around them is poisoned, inputs are compared and outputs poisoned.

use std::sync::Arc;

use cudarc::driver::{CudaContext, CudaSlice, CudaStream, CudaView, CudaViewMut, DeviceRepr};
use half::bf16;

use crate::cuda::has_driver;
use crate::{Error, Result};

const OP: &str = "contract";
/// Elements before and after a buffer; whole lines of memory for every element type, so that a buffer stays aligned.
const GUARD: usize = 128;

/// The device that the subjects run on.
#[derive(Clone, Debug)]
pub(super) struct Gpu(pub Arc<CudaStream>);

fn driver(source: cudarc::driver::DriverError) -> Error {
    Error::Driver { op: OP, source }
}

impl Gpu {
    /// A stream of its own on a device.
    pub fn new(device: usize) -> std::result::Result<Self, String> {
        if !has_driver() {
            return Err("no CUDA driver, or no device, on this machine".into());
        }
        let context = CudaContext::new(device).map_err(|error| format!("CUDA device {device}: {error}"))?;
        Ok(Self(context.new_stream().map_err(|error| error.to_string())?))
    }

    /// A plain copy on the device.
    pub fn up<T: DeviceRepr>(&self, values: &[T]) -> Result<CudaSlice<T>> {
        self.0.clone_htod(values).map_err(driver)
    }

    /// A plain copy on the host.
    pub fn down<T: DeviceRepr>(&self, buffer: &CudaSlice<T>) -> Result<Vec<T>> {
        self.0.clone_dtoh(buffer).map_err(driver)
    }
}

/// An element of a buffer.
pub(super) trait Element: DeviceRepr + Copy + 'static {
    /// What no kernel writes.
    const POISON: Self;
    /// Rounds to the type.
    fn of(x: f32) -> Self;
    /// Widens.
    fn wide(self) -> f32;
    /// Its bits.
    fn bits(self) -> u64;
}

macro_rules! element {
    ($type:ty, $poison:expr, $of:expr, $wide:expr, $bits:expr) => {
        impl Element for $type {
            const POISON: Self = $poison;
            fn of(x: f32) -> Self {
                $of(x)
            }
            fn wide(self) -> f32 {
                $wide(self)
            }
            fn bits(self) -> u64 {
                $bits(self)
            }
        }
    };
}

element!(f32, f32::from_bits(0x7fc5_a5a5), |x| x, |x| x, |x: f32| x.to_bits().into());
element!(bf16, bf16::from_bits(0x7fc5), bf16::from_f32, bf16::to_f32, |x: bf16| x.to_bits().into());
element!(u32, 0x7fc5_a5a5, |x: f32| x as u32, |x: u32| x as f32, |x: u32| x.into());
element!(i32, 0x7fc5_a5a5, |x: f32| x as i32, |x: i32| x as f32, |x: i32| x as u64);
element!(u64, 0x7fc5_a5a5_7fc5_a5a5, |x: f32| x as u64, |x: u64| x as f32, |x: u64| x);

/// A buffer and the poison around it.
pub(super) struct Guarded<T> {
    name: &'static str,
    slice: CudaSlice<T>,
    before: Vec<T>,
    len: usize,
}

impl<T: Element> Guarded<T> {
    fn new(gpu: &Gpu, name: &'static str, values: impl Iterator<Item = T>) -> Result<Self> {
        let mut before = vec![T::POISON; GUARD];
        before.extend(values);
        let len = before.len() - GUARD;
        before.extend([T::POISON; GUARD]);
        Ok(Self { name, slice: gpu.up(&before)?, before, len })
    }

    /// An input, or a buffer that is changed in place, rounded to the element type.
    pub fn input(gpu: &Gpu, name: &'static str, values: &[f32]) -> Result<Self> {
        Self::new(gpu, name, values.iter().map(|&x| T::of(x)))
    }

    /// The same of values that need no rounding.
    pub fn exactly(gpu: &Gpu, name: &'static str, values: &[T]) -> Result<Self> {
        Self::new(gpu, name, values.iter().copied())
    }

    /// An output: poison.
    pub fn output(gpu: &Gpu, name: &'static str, len: usize) -> Result<Self> {
        Self::new(gpu, name, std::iter::repeat_n(T::POISON, len))
    }

    pub fn view(&self) -> CudaView<'_, T> {
        self.slice.slice(GUARD..GUARD + self.len)
    }

    pub fn view_mut(&mut self) -> CudaViewMut<'_, T> {
        self.slice.slice_mut(GUARD..GUARD + self.len)
    }

    fn differ(&self, now: &[T], within: std::ops::Range<usize>) -> Result<()> {
        match within.clone().find(|&at| now[at].bits() != self.before[at].bits()) {
            None => Ok(()),
            Some(at) => {
                let got = format!("element {} was written", at as i64 - GUARD as i64);
                let expected = format!("{} elements of it alone", self.len);
                Err(Error::Value { op: OP, arg: self.name, expected, got })
            }
        }
    }

    /// Fails where a kernel wrote to an input or around it.
    pub fn untouched(&self, gpu: &Gpu) -> Result<()> {
        self.differ(&gpu.down(&self.slice)?, 0..self.before.len())
    }

    /// What a kernel wrote; fails where it wrote around the buffer.
    pub fn values(&self, gpu: &Gpu) -> Result<Vec<T>> {
        let mut now = gpu.down(&self.slice)?;
        self.differ(&now, 0..GUARD)?;
        self.differ(&now, GUARD + self.len..now.len())?;
        now.truncate(GUARD + self.len);
        Ok(now.split_off(GUARD))
    }

    /// The same, widened into `out`. Poison that was left becomes the gates' poison.
    pub fn read(&self, gpu: &Gpu, out: &mut [f32]) -> Result<()> {
        for (out, x) in out.iter_mut().zip(self.values(gpu)?) {
            *out = if x.bits() == T::POISON.bits() { f32::POISON } else { x.wide() };
        }
        Ok(())
    }
}

/// Scratch of which a kernel may use `len` elements; what lies behind them must stay poison.
pub(super) struct Scratch {
    pub slice: CudaSlice<f32>,
    len: usize,
}

impl Scratch {
    pub fn new(gpu: &Gpu, len: usize) -> Result<Self> {
        Ok(Self { slice: gpu.up(&vec![f32::POISON; len + GUARD])?, len })
    }

    pub fn check(&self, gpu: &Gpu) -> Result<()> {
        let now = gpu.down(&self.slice)?;
        match now[self.len..].iter().all(|x| x.to_bits() == f32::POISON.to_bits()) {
            true => Ok(()),
            false => {
                let (expected, got) = (format!("{} elements", self.len), "more were written".into());
                Err(Error::Value { op: OP, arg: "scratch", expected, got })
            }
        }
    }
}
