//! Argument checks that every op shares. One text style: `op: argument, expected: ..., got: ...`.

use candle_core::{DType, Device, Error, Layout, Result, Tensor, bail};

/// Names one argument of one op in errors.
#[derive(Clone, Copy, Debug)]
pub(crate) struct Arg {
    pub op: &'static str,
    pub name: &'static str,
}

/// The argument `name` of `op`.
pub(crate) const fn arg(op: &'static str, name: &'static str) -> Arg {
    Arg { op, name }
}

impl Arg {
    /// The exact shape.
    pub fn shape(self, got: &Layout, expected: &[usize]) -> Result<()> {
        if got.dims() == expected {
            return Ok(());
        }
        let msg = format!("{}: {}", self.op, self.name);
        Err(Error::UnexpectedShape { msg, expected: expected.into(), got: got.shape().clone() }.bt())
    }

    /// The exact shape behind a free first dimension, whose size it returns.
    pub fn shape_but_first(self, got: &Layout, rest: &[usize]) -> Result<usize> {
        match got.dims() {
            [first, dims @ ..] if dims == rest => Ok(*first),
            _ => self.refuse(format_args!("[_, {}]", join(rest)), format_args!("{:?}", got.dims())),
        }
    }

    /// One dtype.
    pub fn dtype(self, got: DType, expected: DType) -> Result<()> {
        if got == expected {
            return Ok(());
        }
        self.refuse(format_args!("{expected:?}"), format_args!("{got:?}"))
    }

    /// A dtype that the CPU forwards widen to f32.
    pub fn float(self, got: DType) -> Result<()> {
        if matches!(got, DType::F32 | DType::BF16 | DType::F16) {
            return Ok(());
        }
        self.refuse(format_args!("F32, BF16 or F16"), format_args!("{got:?}"))
    }

    /// The refusal of a dtype that no CUDA kernel is built for.
    #[cfg(feature = "cuda")]
    pub fn no_kernel<T>(self, got: DType) -> Result<T> {
        self.refuse(format_args!("F32 or BF16 on CUDA"), format_args!("{got:?}"))
    }

    /// The refusal of a CPU tensor by an op that has a CUDA forward alone.
    #[cfg(feature = "cuda")]
    pub fn cuda_only<T>(self) -> Result<T> {
        self.refuse(format_args!("a tensor on CUDA"), format_args!("CPU"))
    }

    /// A row-major layout, at any offset: pools are used in place and never copied.
    pub fn contiguous(self, got: &Layout) -> Result<()> {
        if got.is_contiguous() {
            return Ok(());
        }
        let strides = format_args!("strides {:?} for {:?}", got.stride(), got.dims());
        self.refuse(format_args!("a contiguous tensor"), strides)
    }

    /// A tensor on the given device.
    pub fn device(self, tensor: &Tensor, expected: &Device) -> Result<()> {
        if tensor.device().same_device(expected) {
            return Ok(());
        }
        self.refuse(format_args!("a tensor on {expected:?}"), format_args!("{:?}", tensor.device()))
    }

    /// A count that must agree with another argument's.
    pub fn count(self, got: usize, expected: usize) -> Result<()> {
        if got == expected {
            return Ok(());
        }
        self.refuse(format_args!("{expected} entries"), format_args!("{got}"))
    }

    /// The one text of every refusal that candle has no variant for.
    pub fn refuse<T>(self, expected: std::fmt::Arguments<'_>, got: std::fmt::Arguments<'_>) -> Result<T> {
        bail!("{}: {}, expected: {expected}, got: {got}", self.op, self.name)
    }
}

fn join(dims: &[usize]) -> String {
    dims.iter().map(usize::to_string).collect::<Vec<_>>().join(", ")
}

#[cfg(all(test, not(feature = "cuda")))]
mod tests {
    use super::*;
    use candle_core::CudaDevice;

    #[test]
    fn a_tensor_on_another_device_is_named_with_both_places() -> Result<()> {
        let tensor = Tensor::zeros(1, DType::F32, &Device::Cpu)?;
        let error = arg("tree-conv-verify", "x").device(&tensor, &Device::Cuda(CudaDevice)).unwrap_err();
        let text = "tree-conv-verify: x, expected: a tensor on Cuda(CudaDevice), got: Cpu";
        assert_eq!(error.to_string().lines().next(), Some(text));
        arg("tree-conv-verify", "x").device(&tensor, &Device::Cpu)
    }
}
