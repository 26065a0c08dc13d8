//! The product over packed weights as an op.

use std::sync::Arc;

use candle_core::backend::BackendStorage;
use candle_core::{CpuStorage, CustomOp1, DType, Device, Layout, Result, Shape, Tensor};
use canopy_kernels::linear::cpu::{self as kernel, PackedWeight};
#[cfg(feature = "cuda")]
use canopy_kernels::linear::launch::Rounding;
use canopy_kernels::linear::rounded::{self, RoundedWeight};
use canopy_kernels::linear::{int8, random};

use half::bf16;

use crate::check::{Arg, arg};
use crate::planes::{self, PlaneViews, PlanesMut};
#[cfg(feature = "cuda")]
use crate::slices::row_major;
use crate::slices::{Carried, storage_from, values};
use crate::tree::check_devices;
use crate::wrap::WrapKernelErr;

const OP: &str = "packed-linear";

/// One or several weight matrices with the same input, read once for all rows. On the CPU bf16 weights stay
/// bf16, activations are f32, and a row's bits do not depend on the number of rows. On CUDA the same holds for bf16
/// weights whose input width is a multiple of 4 (products good to 2^-15 of `|x w|`); other weights, and other devices, take
/// candle's matrix product in the weights' dtype.
///
/// Clones share the weights.
///
/// ```
/// use canopy_candle::PackedLinear;
/// use candle_core::{Device, Tensor};
///
/// let dev = Device::Cpu;
/// let (a, b) = (Tensor::new(&[[1f32, 2.], [3., 4.]], &dev)?, Tensor::new(&[[5f32, 6.]], &dev)?);
/// let linear = PackedLinear::new(&[&a, &b], &dev)?;
/// let y = linear.forward(&Tensor::new(&[[1f32, 1.]], &dev)?)?;
/// assert_eq!(y[0].to_vec2::<f32>()?, [[3., 7.]]);
/// assert_eq!(y[1].to_vec2::<f32>()?, [[11.]]);
/// assert_eq!(linear.lookup(&[2, 0])?.to_vec2::<f32>()?, [[5., 6.], [1., 2.]]);
/// # Ok::<(), candle_core::Error>(())
/// ```
#[derive(Clone, Debug)]
pub struct PackedLinear {
    inputs: usize,
    outputs: Arc<[usize]>,
    weights: Weights,
    device: Device,
    bf16_rows: bool,
    /// Read on CUDA alone.
    #[cfg_attr(not(feature = "cuda"), expect(dead_code, reason = "the CPU has one order of sums"))]
    many: bool,
}

#[derive(Clone, Debug)]
enum Weights {
    Packed(Arc<PackedWeight>),
    Rounded(Arc<RoundedWeight>),
    #[cfg(feature = "cuda")]
    Cuda(Arc<crate::cuda::linear::Weight>),
    Plain(Arc<[Tensor]>),
}

impl PackedLinear {
    /// `weights` are `[out_i, in]`, bf16, f16 or f32, all of one dtype, on any device. f16 is kept as f32 on the CPU.
    ///
    /// # Errors
    /// No weight, a weight that is not a matrix, or weights of different widths or dtypes.
    pub fn new(weights: &[&Tensor], device: &Device) -> Result<Self> {
        let weight = arg(OP, "weights");
        let Some(first) = weights.first() else {
            return weight.refuse(format_args!("at least one matrix"), format_args!("none"));
        };
        weight.float(first.dtype())?;
        let &[_, inputs] = first.dims() else {
            return weight.refuse(format_args!("[out, in]"), format_args!("{:?}", first.dims()));
        };
        let mut outputs = Vec::with_capacity(weights.len());
        for part in weights {
            outputs.push(weight.shape_but_first(part.layout(), &[inputs])?);
            weight.dtype(part.dtype(), first.dtype())?;
        }
        let on =
            |device: &Device| weights.iter().map(|part| part.to_device(device)).collect::<Result<Vec<_>>>();
        let weights = match device {
            Device::Cpu => Weights::Packed(Arc::new(pack(weight, inputs, &on(device)?)?)),
            #[cfg(feature = "cuda")]
            Device::Cuda(cuda) if crate::cuda::linear::takes(first.dtype(), inputs, outputs.len()) => {
                let parts = on(&Device::Cpu)?;
                Weights::Cuda(Arc::new(crate::cuda::linear::Weight::new(
                    weight, inputs, &outputs, &parts, cuda,
                )?))
            }
            _ => Weights::Plain(on(device)?.into()),
        };
        Ok(Self {
            inputs,
            outputs: outputs.into(),
            weights,
            device: device.clone(),
            bf16_rows: false,
            many: false,
        })
    }

    /// bf16 weights from a seed, uniform in `[-scale, scale)`, the same on every device; on CUDA they are made there. For measuring a model's
    /// speed without its checkpoint.
    ///
    /// # Errors
    /// No output, or a width of 0.
    pub fn random(
        inputs: usize,
        outputs: &[usize],
        (seed, scale): (u64, f32),
        device: &Device,
    ) -> Result<Self> {
        #[cfg(feature = "cuda")]
        if let Device::Cuda(cuda) = device
            && crate::cuda::linear::takes(DType::BF16, inputs, outputs.len())
        {
            let weight = crate::cuda::linear::Weight::random(inputs, outputs, (seed, scale), cuda)?;
            let weights = Weights::Cuda(Arc::new(weight));
            return Ok(Self {
                inputs,
                outputs: outputs.into(),
                weights,
                device: device.clone(),
                bf16_rows: false,
                many: false,
            });
        }
        let parts = random::weights(inputs, outputs, seed, scale).into_iter().zip(outputs);
        let parts = parts.map(|(part, &out)| Tensor::from_vec(part, (out, inputs), &Device::Cpu));
        let parts = parts.collect::<Result<Vec<_>>>()?;
        Self::new(&parts.iter().collect::<Vec<_>>(), device)
    }

    /// Rounds x to bf16 before the product where it runs on CUDA over packed weights (otherwise nothing changes): what bf16 models do elsewhere,
    /// and half the work where rows are many.
    #[must_use]
    pub fn with_bf16_rows(mut self, bf16_rows: bool) -> Self {
        self.bf16_rows = bf16_rows;
        self
    }

    /// A handle for products of hundreds of rows and more: on CUDA those of rows rounded to bf16 ([`Self::with_bf16_rows`]) are summed in another
    /// order, in one piece, which is faster then; elsewhere nothing changes. A row's bits do not depend on the others' either way.
    #[must_use]
    pub fn many(&self) -> Self {
        Self { many: true, ..self.clone() }
    }

    /// The same weights rounded to seven bits, and the inputs of every product too: about twice as fast, for drafts.
    /// Weights on other devices than the CPU stay as they are.
    ///
    /// ```
    /// use canopy_candle::PackedLinear;
    /// use candle_core::{Device, Tensor};
    ///
    /// let linear = PackedLinear::new(&[&Tensor::new(&[[1f32, -3.]], &Device::Cpu)?], &Device::Cpu)?;
    /// let y = linear.rounded()?.forward_one(&Tensor::new(&[[2f32, 1.]], &Device::Cpu)?)?.to_vec2::<f32>()?;
    /// assert!((y[0][0] + 1.).abs() < 0.1);
    /// # Ok::<(), candle_core::Error>(())
    /// ```
    ///
    /// # Errors
    /// More inputs than [`INPUTS`](rounded::INPUTS) on the CPU.
    pub fn rounded(&self) -> Result<Self> {
        let weights = match &self.weights {
            Weights::Packed(weight) => Weights::Rounded(Arc::new(RoundedWeight::new(weight).wrap()?)),
            other => other.clone(),
        };
        Ok(Self { weights, ..self.clone() })
    }

    /// The same weights in int8, a bf16 scale for every output and [`GROUP`](int8::GROUP) inputs: on CUDA half the bytes to keep and to read. The product is,
    /// bit for bit, the one over the bf16 weights that those stand for, which the CPU keeps instead: the same values, no memory saved. Seven-bit
    /// weights stay as they are.
    ///
    /// ```
    /// use canopy_candle::PackedLinear;
    /// use candle_core::{Device, Tensor};
    ///
    /// let linear = PackedLinear::new(&[&Tensor::new(&[[1.27f32, -0.333]], &Device::Cpu)?], &Device::Cpu)?;
    /// let w = linear.int8()?.lookup(&[0])?.to_vec2::<f32>()?;
    /// assert!((w[0][0] - 1.27).abs() < 0.01 && (w[0][1] + 0.333).abs() < 0.01);
    /// # Ok::<(), candle_core::Error>(())
    /// ```
    ///
    /// # Errors
    /// On CUDA, a width that is not a multiple of 4, or more than eight matrices.
    pub fn int8(&self) -> Result<Self> {
        let weights = match &self.weights {
            Weights::Packed(weight) => Weights::Packed(Arc::new(self.int8_values(weight)?)),
            Weights::Rounded(weight) => Weights::Rounded(weight.clone()),
            #[cfg(feature = "cuda")]
            Weights::Cuda(weight) => Weights::Cuda(Arc::new(weight.to_int8()?)),
            Weights::Plain(parts) => {
                let parts =
                    parts.iter().map(|part| part.to_dtype(DType::BF16)).collect::<Result<Vec<_>>>()?;
                let packed = Self::new(&parts.iter().collect::<Vec<_>>(), &self.device)?;
                if matches!(packed.weights, Weights::Plain(_)) {
                    let got = format_args!("{} inputs, {} matrices", self.inputs, parts.len());
                    let expected =
                        format_args!("a multiple of 4 inputs and 1 to 8 matrices for int8 on CUDA");
                    return arg(OP, "weights").refuse(expected, got);
                }
                return packed.with_bf16_rows(self.bf16_rows).int8();
            }
        };
        Ok(Self { weights, ..self.clone() })
    }

    /// What int8 values of `weight`'s matrices stand for.
    fn int8_values(&self, weight: &PackedWeight) -> Result<PackedWeight> {
        let mut row = vec![0f32; self.inputs];
        let mut parts = Vec::with_capacity(self.outputs.len());
        let mut ids = 0..;
        for &out in self.outputs.iter() {
            let mut part = Vec::with_capacity(out * self.inputs);
            for id in ids.by_ref().take(out) {
                weight.row(id, &mut row).wrap()?;
                part.extend(row.iter().map(|&w| bf16::from_f32(w)));
            }
            int8::round_trip(self.inputs, &mut part);
            parts.push(part);
        }
        PackedWeight::from_bf16(self.inputs, &parts.iter().map(Vec::as_slice).collect::<Vec<_>>()).wrap()
    }

    /// Input width.
    pub fn inputs(&self) -> usize {
        self.inputs
    }

    /// Output width of every weight.
    pub fn outputs(&self) -> &[usize] {
        &self.outputs
    }

    /// `x` `[rows, in]`, f32, bf16 or f16 in any layout -> one contiguous `[rows, out_i]` per weight, in x's dtype.
    ///
    /// # Errors
    /// Another width, a dtype that is not a float, or another device.
    pub fn forward(&self, x: &Tensor) -> Result<Vec<Tensor>> {
        let rows = self.check(x)?;
        let pack = match &self.weights {
            Weights::Packed(weight) => self.product(x, OnCpu::Packed(weight))?,
            Weights::Rounded(weight) => self.product(x, OnCpu::Rounded(weight))?,
            #[cfg(feature = "cuda")]
            Weights::Cuda(weight) => self.on_cuda(x, weight)?,
            Weights::Plain(parts) => return parts.iter().map(|part| plain_product(x, part)).collect(),
        };
        let mut views = PlaneViews::new(&pack);
        self.outputs.iter().map(|&out| views.take((rows, out))).collect()
    }

    /// The only output of a single-weight product.
    ///
    /// # Errors
    /// As [`Self::forward`], and when there are several weights.
    pub fn forward_one(&self, x: &Tensor) -> Result<Tensor> {
        if self.outputs.len() != 1 {
            let got = format_args!("{}", self.outputs.len());
            return arg(OP, "weights").refuse(format_args!("one for forward_one"), got);
        }
        let rows = self.check(x)?;
        match &self.weights {
            Weights::Packed(weight) => {
                self.product(x, OnCpu::Packed(weight))?.reshape((rows, self.outputs[0]))
            }
            Weights::Rounded(weight) => {
                self.product(x, OnCpu::Rounded(weight))?.reshape((rows, self.outputs[0]))
            }
            #[cfg(feature = "cuda")]
            Weights::Cuda(weight) => self.on_cuda(x, weight)?.reshape((rows, self.outputs[0])),
            Weights::Plain(parts) => plain_product(x, &parts[0]),
        }
    }

    /// What rows should come in: bf16 where [`Self::forward_one_f32`] takes those as they are, else f32.
    ///
    /// # Errors
    /// An error of the driver.
    pub fn rows_dtype(&self) -> Result<DType> {
        #[cfg(feature = "cuda")]
        if let Weights::Cuda(weight) = &self.weights
            && self.bf16_rows
            && weight.takes_bf16()?
        {
            return Ok(DType::BF16);
        }
        Ok(DType::F32)
    }

    /// [`Self::forward`] in f32, as [`Self::forward_one_f32`].
    ///
    /// # Errors
    /// Those of [`Self::forward`].
    pub fn forward_f32(&self, x: &Tensor) -> Result<Vec<Tensor>> {
        #[cfg(feature = "cuda")]
        if let (Weights::Cuda(weight), DType::BF16, DType::BF16) =
            (&self.weights, x.dtype(), self.rows_dtype()?)
        {
            let rows = self.check(x)?;
            let product =
                crate::cuda::linear::Product { weight, rounding: self.rounding(), outputs: &self.outputs };
            let pack = row_major(x)?.apply_op1_no_bwd(&product).and_then(crate::recorded::kept)?;
            let mut views = PlaneViews::new(&pack);
            return self.outputs.iter().map(|&out| views.take((rows, out))).collect();
        }
        self.forward(&crate::recorded::widened(x)?)
    }

    /// [`Self::forward_one`] in f32, whatever x's dtype: on CUDA bf16 rows that are rounded anyway ([`Self::with_bf16_rows`]) then go in and
    /// come out without a cast.
    ///
    /// # Errors
    /// Those of [`Self::forward_one`].
    pub fn forward_one_f32(&self, x: &Tensor) -> Result<Tensor> {
        #[cfg(feature = "cuda")]
        if let Weights::Cuda(weight) = &self.weights
            && let [out] = *self.outputs
            && x.dtype() == DType::BF16
            && self.rows_dtype()? == DType::BF16
        {
            let rows = self.check(x)?;
            let product =
                crate::cuda::linear::Product { weight, rounding: self.rounding(), outputs: &self.outputs };
            let pack = row_major(x)?.apply_op1_no_bwd(&product).and_then(crate::recorded::kept)?;
            return pack.reshape((rows, out));
        }
        self.forward_one(&crate::recorded::widened(x)?)
    }

    /// Rows of the (stacked) matrix by index, f32 where the weights are packed (the CPU, bf16 on CUDA), otherwise in their dtype: an
    /// embedding lookup over tied weights. `[ids, in]`.
    ///
    /// # Errors
    /// An index at or past the number of rows, or rounded weights.
    pub fn lookup(&self, ids: &[u32]) -> Result<Tensor> {
        let total = self.outputs.iter().sum::<usize>();
        if let Some(id) = ids.iter().find(|&&id| id as usize >= total) {
            return arg(OP, "ids").refuse(format_args!("below {total}"), format_args!("{id}"));
        }
        match &self.weights {
            Weights::Packed(weight) => {
                let mut rows = vec![0f32; ids.len() * self.inputs];
                for (&id, row) in ids.iter().zip(rows.chunks_exact_mut(self.inputs)) {
                    weight.row(id as usize, row).wrap()?;
                }
                Tensor::from_vec(rows, (ids.len(), self.inputs), &Device::Cpu)
            }
            Weights::Rounded(_) => arg(OP, "weights")
                .refuse(format_args!("exact ones for a lookup"), format_args!("rounded ones")),
            #[cfg(feature = "cuda")]
            Weights::Cuda(weight) => match &self.device {
                Device::Cuda(device) => weight.lookup(ids, device),
                _ => arg(OP, "weights").refuse(format_args!("a device's"), format_args!("another's")),
            },
            Weights::Plain(parts) => {
                let ids = Tensor::new(ids, &self.device)?;
                Tensor::cat(parts, 0)?.index_select(&ids, 0)
            }
        }
    }

    #[cfg(feature = "cuda")]
    fn rounding(&self) -> Rounding {
        match (self.bf16_rows, self.many) {
            (false, _) => Rounding::Split,
            (true, false) => Rounding::Bf16,
            (true, true) => Rounding::Whole,
        }
    }

    /// The CUDA kernel's product: f32 rows in, the pack back in x's dtype.
    #[cfg(feature = "cuda")]
    fn on_cuda(&self, x: &Tensor, weight: &crate::cuda::linear::Weight) -> Result<Tensor> {
        let product =
            crate::cuda::linear::Product { weight, rounding: self.rounding(), outputs: &self.outputs };
        let pack = row_major(&x.to_dtype(DType::F32)?)?
            .apply_op1_no_bwd(&product)
            .and_then(crate::recorded::kept)?;
        pack.to_dtype(x.dtype())
    }

    fn product(&self, x: &Tensor, weight: OnCpu<'_>) -> Result<Tensor> {
        x.apply_op1_no_bwd(&Product { weight, outputs: &self.outputs })
    }

    /// Checks the input; returns its rows.
    fn check(&self, x: &Tensor) -> Result<usize> {
        check_devices(OP, &self.device, &[("x", x)])?;
        arg(OP, "x").float(x.dtype())?;
        arg(OP, "x").shape_but_first(x.layout(), &[self.inputs])
    }
}

/// Packs CPU matrices; bf16 stays bf16.
fn pack(weight: Arg, inputs: usize, parts: &[Tensor]) -> Result<PackedWeight> {
    let carried = parts.iter().map(Carried::new).collect::<Vec<_>>();
    if parts[0].dtype() == DType::BF16 {
        let slices = carried.iter().map(|part| part.bf16s(weight)).collect::<Result<Vec<_>>>()?;
        let slices = slices.iter().map(AsRef::as_ref).collect::<Vec<_>>();
        return PackedWeight::from_bf16(inputs, &slices).wrap();
    }
    let slices = carried.iter().map(|part| part.values(weight)).collect::<Result<Vec<_>>>()?;
    let slices = slices.iter().map(AsRef::as_ref).collect::<Vec<_>>();
    PackedWeight::from_f32(inputs, &slices).wrap()
}

/// candle's product in the weight's dtype, the result in the input's.
fn plain_product(x: &Tensor, weight: &Tensor) -> Result<Tensor> {
    x.to_dtype(weight.dtype())?.matmul(&weight.t()?)?.to_dtype(x.dtype())
}

enum OnCpu<'a> {
    Packed(&'a PackedWeight),
    Rounded(&'a RoundedWeight),
}

/// All outputs as planes of one allocation.
struct Product<'a> {
    weight: OnCpu<'a>,
    outputs: &'a [usize],
}

impl CustomOp1 for Product<'_> {
    fn name(&self) -> &'static str {
        OP
    }

    fn cpu_fwd(&self, x: &CpuStorage, layout: &Layout) -> Result<(CpuStorage, Shape)> {
        let rows = layout.dims()[0];
        let lens = self.outputs.iter().map(|out| rows * out).collect::<Vec<_>>();
        let dtype = x.dtype();
        let x = values(arg(OP, "x"), x, layout)?;
        let count = planes::elem_count(&lens);
        let mut pack = Vec::with_capacity(count);
        let mut planes = PlanesMut::new(&mut pack.spare_capacity_mut()[..count]);
        let take = |&len: &usize| {
            let (gap, plane) = planes.take_after_gap(len);
            gap.iter_mut().for_each(|element| _ = element.write(0f32));
            plane
        };
        let outs = lens.iter().map(take).collect();
        match self.weight {
            OnCpu::Packed(weight) => kernel::forward_into(weight, &x, outs).wrap()?,
            OnCpu::Rounded(weight) => rounded::forward_into(weight, &x, outs).wrap()?,
        }
        // SAFETY: `count` elements fit; the planes are initialised by the product, the gaps between them above.
        unsafe { pack.set_len(count) };
        let shape = pack.len().into();
        Ok((storage_from(pack, dtype), shape))
    }
}
