//! linear and the glue's row-wise steps.

use half::bf16;

use super::Kernel;
use super::buffers::{Element, Gpu, Guarded, Scratch};
use crate::contract::Gate::{self, Invariant, Nonfinite, Repeat, Shapes, Sums};
use crate::contract::bound::Bound;
use crate::contract::scene::{Scene, Shape};
use crate::contract::subjects::attention::dims as kv_dims;
use crate::contract::subjects::glue::{self as scenes, BEST, EPS};
use crate::contract::subjects::rows::{OUT, width};
use crate::cuda::{Kernels, PathsOnDevice};
use crate::glue::launch::{self, Destinations, Norm, PoolElement, QkNormRope, RowElement, Rows};
use crate::linear::launch::{Rounding, WeightOnDevice, WeightShape};
use crate::{Result, kv_compact, linear, top_tokens};

pub(super) type Faults = &'static [(Gate, &'static str)];

/// Of a step that works element by element.
const PLAIN: Faults = &[
    (Nonfinite, "swallow"),
    (Repeat, "gap"),
    (Repeat, "overrun"),
    (Repeat, "touched"),
    (Invariant, "one_ulp"),
];

const NORM: Faults = &[
    (Nonfinite, "swallow"),
    (Repeat, "gap"),
    (Repeat, "overrun"),
    (Repeat, "touched"),
    (Shapes, "dropped_slice"),
    (Sums, "half_sum"),
    (Invariant, "one_ulp"),
];

const PRODUCT: Faults = &[
    (Nonfinite, "swallow"),
    (Repeat, "gap"),
    (Repeat, "overrun"),
    (Shapes, "dropped_slice"),
    (Shapes, "stale"),
    (Sums, "half_sum"),
    (Invariant, "one_ulp"),
];

/// And an output that takes the scale of the one before it.
const INT8_PRODUCT: Faults = &[
    (Nonfinite, "swallow"),
    (Repeat, "gap"),
    (Repeat, "overrun"),
    (Shapes, "row_order"),
    (Shapes, "dropped_slice"),
    (Shapes, "stale"),
    (Sums, "half_sum"),
    (Invariant, "one_ulp"),
];

pub(super) fn kernels(gpu: &Gpu) -> Vec<Kernel> {
    let kernel = |name: &str, like: &str, bound, call: Run| Kernel::new(gpu, name, like, bound, call);
    let terms = Bound::Terms(1.0 / 32768.0, false);
    let product = |kernel: Kernel| Kernel { sums: Some(small_terms()), ..kernel };
    // where there are no warpgroup products, linear.cu takes their calls
    let of_warpgroups = |image| match Kernels::on(gpu.0.context()) {
        Ok(kernels) if kernels.has(image) => image,
        _ => "linear/",
    };
    vec![
        // an infinite weight meets two parts of x, of either sign
        Kernel {
            exact_classes: false,
            ..product(kernel("linear split", "linear", terms, product_of(Rounding::Split)).rounded(&[1]))
        }
        .planted("linear/", PRODUCT),
        product(kernel("linear bf16", "linear", terms, product_of(Rounding::Bf16)).rounded(&[0, 1]))
            .planted("linear/", PRODUCT),
        product(kernel("linear whole", "linear", terms, product_of(Rounding::Whole)).rounded(&[0, 1]))
            .planted(of_warpgroups("linear/whole_sm90a"), PRODUCT),
        // widths that are no multiple of 8 never take the warpgroups' kernel
        Kernel {
            narrow: true,
            ..product(kernel("linear bf16 mma", "linear", terms, product_of(Rounding::Bf16)).rounded(&[0, 1]))
        },
        int8_kernel(gpu, "linear int8", false).planted(of_warpgroups("linear/linear_sm90a"), INT8_PRODUCT),
        int8_kernel(gpu, "linear int8 mma", true).planted("linear/", INT8_PRODUCT),
        norm_kernel(gpu, "rms_norm", norm::<f32>).planted("glue/norm", NORM),
        norm_kernel(gpu, "add_rms_norm", add_norm::<f32>).planted("glue/norm", NORM),
        norm_kernel(gpu, "gated_rms_norm", gated_norm::<f32>).planted("glue/norm", NORM),
        kernel("glue swiglu", "glue swiglu", Bound::Element(1e-6), swiglu::<f32>).planted("glue/gate", PLAIN),
        narrow(gpu, "rms_norm", norm::<bf16>),
        narrow(gpu, "add_rms_norm", add_norm::<bf16>),
        narrow(gpu, "gated_rms_norm", gated_norm::<bf16>),
        narrow(gpu, "swiglu", swiglu::<bf16>),
        kernel("glue attn_gate f32", "glue attn_gate", Bound::Element(1e-6), attn_gate::<f32>)
            .planted("glue/gate", PLAIN),
        kernel("glue attn_gate bf16", "glue attn_gate", Bound::Element(1e-6), attn_gate::<bf16>)
            .rounded(&[0]),
        rope_kernel::<bf16>(gpu, "bf16", Bound::Rounded(1e-5)),
        rope_kernel::<f32>(gpu, "f32", Bound::Element(1e-5)).planted("glue/rope", ROPE),
        Kernel { narrow: true, ..rope_kernel::<bf16>(gpu, "bf16 d128", Bound::Rounded(1e-5)) },
        kernel("glue kv_append bf16", "glue kv_append", Bound::Element(0.0), append::<bf16>)
            .rounded(&[0, 1, 2, 3])
            .planted("glue/append", &[(Repeat, "touched"), (Shapes, "off_by_one")]),
        kernel("glue kv_append f32", "glue kv_append", Bound::Element(0.0), append::<f32>),
        kernel("kv_compact", "kv_compact", Bound::Element(0.0), compact)
            .rounded(&[0])
            .planted("kv_compact/", &[(Shapes, "missed_node"), (Shapes, "off_by_one")]),
        kernel("top_tokens", "top_tokens", Bound::Element(1e-6), top).planted("top_tokens/", TOP),
    ]
}

const ROPE: Faults = &[
    (Repeat, "gap"),
    (Repeat, "touched"),
    (Shapes, "off_by_one"),
    (Shapes, "half_sum"),
    (Invariant, "one_ulp"),
];

const TOP: Faults = &[
    (Repeat, "touched"),
    (Shapes, "dropped_slice"),
    (Shapes, "off_by_one"),
    (Sums, "half_sum"),
    (Invariant, "one_ulp"),
];

pub(super) type Run = fn(&Gpu, &Scene, &mut [f32]) -> Result<()>;

fn norm_kernel(gpu: &Gpu, step: &str, call: Run) -> Kernel {
    let name = format!("glue {step}");
    let kernel = Kernel::new(gpu, &*name, &name, Bound::Element(1e-5), call);
    // random rows: a team's parts of a sum of ones are powers of two
    Kernel { sums: Some((Shape { wide: true, ..Shape::tree(3) }, |_| ())), ..kernel }
}

/// A step whose outputs come in bf16, as products take them.
fn narrow(gpu: &Gpu, step: &str, call: Run) -> Kernel {
    Kernel::new(gpu, format!("glue {step} to bf16"), &format!("glue {step}"), Bound::Rounded(1e-5), call)
}

fn rope_kernel<T: PoolElement + Element>(gpu: &Gpu, dtype: &str, bound: Bound) -> Kernel {
    let kernel = Kernel::new(
        gpu,
        format!("glue qk_norm_rope_append {dtype}"),
        "glue qk_norm_rope_append",
        bound,
        rope::<T>,
    );
    // what a pool holds is of the pool's type; rows are rounded on their way
    if T::POISON.wide().to_bits() == f32::POISON.to_bits() { kernel } else { kernel.rounded(&[5, 6]) }
}

/// 4,096 products: the first half 1, the others 2^-6, which a bfloat16 sum past 2,048 drops.
fn small_terms() -> super::SumScene {
    let fill = |scene: &mut Scene| {
        scene.inputs[0].values.fill(1.0);
        let width = width(scene);
        for row in scene.inputs[1].values.chunks_mut(width) {
            row[..width / 2].fill(1.0);
            row[width / 2..].fill(1.0 / 64.0);
        }
    };
    (Shape { wide: true, ..Shape::tree(3) }, fill)
}

fn int8_kernel(gpu: &Gpu, name: &str, narrow: bool) -> Kernel {
    let terms = Bound::Terms(1.0 / 32768.0, false);
    let kernel = Kernel::new(gpu, name, "linear int8", terms, |gpu, scene, out| {
        product(gpu, scene, (Rounding::Bf16, true), out)
    });
    let fill = |scene: &mut Scene| {
        small_terms().1(scene);
        scene.inputs[1].values.iter_mut().for_each(|w| *w *= 127.0 / 128.0);
    };
    Kernel { narrow, sums: Some((small_terms().0, fill)), ..kernel.rounded(&[0, 1]) }
}

fn product_of(rounding: Rounding) -> Run {
    match rounding {
        Rounding::Split => |gpu, scene, out| product(gpu, scene, (Rounding::Split, false), out),
        Rounding::Bf16 => |gpu, scene, out| product(gpu, scene, (Rounding::Bf16, false), out),
        Rounding::Whole => |gpu, scene, out| product(gpu, scene, (Rounding::Whole, false), out),
    }
}

fn product(gpu: &Gpu, scene: &Scene, (rounding, int8): (Rounding, bool), out: &mut [f32]) -> Result<()> {
    let shape = WeightShape::new(width(scene), &[OUT])?;
    let values: Vec<bf16> = scene.input(1).iter().map(|&w| bf16::from_f32(w)).collect();
    let packed = gpu.up(&shape.pack(&[&values])?)?;
    let mut weight = WeightOnDevice::new(&gpu.0, shape, packed)?;
    if int8 {
        weight = weight.to_int8(&gpu.0)?;
    }
    let x = Guarded::<f32>::input(gpu, "x", scene.input(0))?;
    let mut scratch = Scratch::new(gpu, weight.scratch_len(scene.batch.rows()))?;
    let mut y = Guarded::<f32>::output(gpu, "y", out.len())?;
    linear::launch::forward(&gpu.0, &mut weight, rounding, x.view(), &mut scratch.slice, &[0], y.view_mut())?;
    scratch.check(gpu)?;
    x.untouched(gpu)?;
    y.read(gpu, out)
}

/// A norm's inputs of rows, its weight, and its outputs.
struct Normed {
    rows: Vec<Guarded<f32>>,
    weight: Guarded<f32>,
}

impl Normed {
    fn new(gpu: &Gpu, scene: &Scene) -> Result<Self> {
        let last = scene.inputs.len() - 1;
        let rows = scene.inputs[..last].iter().map(|input| Guarded::input(gpu, input.name, &input.values));
        Ok(Self {
            rows: rows.collect::<Result<_>>()?,
            weight: Guarded::input(gpu, "weight", scene.input(last))?,
        })
    }

    fn untouched(&self, gpu: &Gpu) -> Result<()> {
        self.rows.iter().chain([&self.weight]).try_for_each(|input| input.untouched(gpu))
    }
}

fn norm<Out: RowElement + Element>(gpu: &Gpu, scene: &Scene, out: &mut [f32]) -> Result<()> {
    let inputs = Normed::new(gpu, scene)?;
    let mut y = Guarded::<Out>::output(gpu, "out", out.len())?;
    let weight = inputs.weight.view();
    let norm = Norm { weight: &weight, eps: EPS, unit_offset: true };
    launch::rms_norm(&gpu.0, norm, &inputs.rows[0].view(), &mut y.view_mut())?;
    inputs.untouched(gpu)?;
    y.read(gpu, out)
}

fn add_norm<Out: RowElement + Element>(gpu: &Gpu, scene: &Scene, out: &mut [f32]) -> Result<()> {
    let inputs = Normed::new(gpu, scene)?;
    let (sum, out) = out.split_at_mut(scene.input(0).len());
    let mut total = Guarded::<f32>::output(gpu, "sum", sum.len())?;
    let mut y = Guarded::<Out>::output(gpu, "out", out.len())?;
    let weight = inputs.weight.view();
    let norm = Norm { weight: &weight, eps: EPS, unit_offset: true };
    let two = [&inputs.rows[0].view(), &inputs.rows[1].view()];
    launch::add_rms_norm(&gpu.0, norm, two, &mut total.view_mut(), &mut y.view_mut())?;
    inputs.untouched(gpu)?;
    total.read(gpu, sum)?;
    y.read(gpu, out)
}

fn gated_norm<Out: RowElement + Element>(gpu: &Gpu, scene: &Scene, out: &mut [f32]) -> Result<()> {
    let inputs = Normed::new(gpu, scene)?;
    let mut y = Guarded::<Out>::output(gpu, "out", out.len())?;
    let (weight, z) = (inputs.weight.view(), inputs.rows[1].view());
    let norm = Norm { weight: &weight, eps: EPS, unit_offset: true };
    let z = Rows { data: &z, stride: width(scene) };
    launch::gated_rms_norm(&gpu.0, norm, 1, &inputs.rows[0].view(), z, &mut y.view_mut())?;
    inputs.untouched(gpu)?;
    y.read(gpu, out)
}

fn swiglu<Out: RowElement + Element>(gpu: &Gpu, scene: &Scene, out: &mut [f32]) -> Result<()> {
    let gate = Guarded::<f32>::input(gpu, "gate", scene.input(0))?;
    let up = Guarded::<f32>::input(gpu, "up", scene.input(1))?;
    let mut y = Guarded::<Out>::output(gpu, "out", out.len())?;
    let (g, u, stride) = (gate.view(), up.view(), width(scene));
    let [g, u] = [&g, &u].map(|data| Rows { data, stride });
    launch::swiglu(&gpu.0, stride, g, u, &mut y.view_mut())?;
    gate.untouched(gpu)?;
    up.untouched(gpu)?;
    y.read(gpu, out)
}

fn attn_gate<T: PoolElement + Element>(gpu: &Gpu, scene: &Scene, out: &mut [f32]) -> Result<()> {
    let dims = scenes::heads(scene).0;
    let attn = Guarded::<T>::input(gpu, "attn", scene.input(0))?;
    let q_proj = Guarded::<f32>::input(gpu, "q_proj", scene.input(1))?;
    let mut y = Guarded::<f32>::output(gpu, "out", out.len())?;
    let gate = q_proj.view();
    let rows = Rows { data: &gate, stride: 2 * dims.q_width() };
    launch::attn_gate(&gpu.0, dims, &attn.view(), rows, &mut y.view_mut())?;
    attn.untouched(gpu)?;
    q_proj.untouched(gpu)?;
    y.read(gpu, out)
}

fn rope<T: PoolElement + Element>(gpu: &Gpu, scene: &Scene, out: &mut [f32]) -> Result<()> {
    let (dims, half) = scenes::heads(scene);
    let rows =
        [0, 1, 2].map(|input| Guarded::<f32>::input(gpu, scene.inputs[input].name, scene.input(input)));
    let [q_proj, k_proj, v_proj] = rows;
    let (q_proj, k_proj, v_proj) = (q_proj?, k_proj?, v_proj?);
    let q_weight = Guarded::<f32>::input(gpu, "q_weight", scene.input(3))?;
    let k_weight = Guarded::<f32>::input(gpu, "k_weight", scene.input(4))?;
    let freq = Guarded::<f32>::input(gpu, "inv_freq", &scenes::inv_freq(half))?;
    let positions = Guarded::<i32>::exactly(gpu, "positions", &scenes::positions(scene))?;
    let host = scenes::destinations(scene);
    let on_device = Guarded::<i32>::exactly(gpu, "destinations", &host)?;
    let mut keys = Guarded::<T>::input(gpu, "keys", scene.input(5))?;
    let mut values = Guarded::<T>::input(gpu, "values", scene.input(6))?;
    let (q_out, pools) = out.split_at_mut(scene.batch.rows() * dims.q_width());
    let (keys_out, values_out) = pools.split_at_mut(scene.input(5).len());
    let mut q = Guarded::<T>::output(gpu, "q", q_out.len())?;
    {
        let (weights, freq, positions, to) =
            ([q_weight.view(), k_weight.view()], freq.view(), positions.view(), on_device.view());
        let norm = |weight| Norm { weight, eps: EPS, unit_offset: true };
        let op = QkNormRope {
            dims,
            gated: true,
            q_norm: norm(&weights[0]),
            k_norm: norm(&weights[1]),
            inv_freq: &freq,
            positions: &positions,
        };
        let (qs, ks, vs) = (q_proj.view(), k_proj.view(), v_proj.view());
        let rows = |data, stride| Rows { data, stride };
        let inputs = [rows(&qs, 2 * dims.q_width()), rows(&ks, dims.kv_width()), rows(&vs, dims.kv_width())];
        let to = Destinations { host: &host, on_device: &to };
        let pools = [&mut keys.view_mut(), &mut values.view_mut()];
        launch::qk_norm_rope_append(&gpu.0, op, inputs, to, &mut q.view_mut(), pools)?;
    }
    for input in [&q_proj, &k_proj, &v_proj, &q_weight, &k_weight, &freq] {
        input.untouched(gpu)?;
    }
    positions.untouched(gpu)?;
    on_device.untouched(gpu)?;
    q.read(gpu, q_out)?;
    keys.read(gpu, keys_out)?;
    values.read(gpu, values_out)
}

fn append<T: PoolElement + Element>(gpu: &Gpu, scene: &Scene, out: &mut [f32]) -> Result<()> {
    let width = scenes::heads(scene).0.kv_width();
    let k = Guarded::<f32>::input(gpu, "k", scene.input(0))?;
    let v = Guarded::<f32>::input(gpu, "v", scene.input(1))?;
    let host = scenes::destinations(scene);
    let on_device = Guarded::<i32>::exactly(gpu, "destinations", &host)?;
    let mut keys = Guarded::<T>::input(gpu, "keys", scene.input(2))?;
    let mut values = Guarded::<T>::input(gpu, "values", scene.input(3))?;
    {
        let (ks, vs, to) = (k.view(), v.view(), on_device.view());
        let rows = [&ks, &vs].map(|data| Rows { data, stride: width });
        let pools = [&mut keys.view_mut(), &mut values.view_mut()];
        launch::kv_append_pair(&gpu.0, width, Destinations { host: &host, on_device: &to }, rows, pools)?;
    }
    k.untouched(gpu)?;
    v.untouched(gpu)?;
    on_device.untouched(gpu)?;
    let (keys_out, values_out) = out.split_at_mut(scene.input(2).len());
    keys.read(gpu, keys_out)?;
    values.read(gpu, values_out)
}

fn compact(gpu: &Gpu, scene: &Scene, out: &mut [f32]) -> Result<()> {
    let on_device = PathsOnDevice::new(&gpu.0, &scene.paths)?;
    let lens = Guarded::<i32>::exactly(gpu, "lens", &scene.lens)?;
    let mut cache = Guarded::<bf16>::input(gpu, "cache", scene.input(0))?;
    let shape = (kv_dims(scene).kv_width(), scene.capacity);
    kv_compact::launch::compact(
        &gpu.0,
        &scene.paths,
        &on_device,
        lens.view(),
        shape,
        &mut [cache.view_mut()],
    )?;
    lens.untouched(gpu)?;
    cache.read(gpu, out)
}

fn top(gpu: &Gpu, scene: &Scene, out: &mut [f32]) -> Result<()> {
    let vocab = scenes::vocab(scene);
    let segments = scene.batch.rows() * top_tokens::launch::segments(vocab);
    let logits = Guarded::<f32>::input(gpu, "logits", scene.input(0))?;
    let mut bests = Guarded::<u64>::output(gpu, "scratch.bests", segments)?;
    let mut sums = Guarded::<f32>::output(gpu, "scratch.sums", segments)?;
    let mut words = Guarded::<u32>::output(gpu, "out", out.len())?;
    let scratch = top_tokens::launch::Scratch { bests: bests.view_mut(), sums: sums.view_mut() };
    top_tokens::launch::forward(&gpu.0, (vocab, BEST), &logits.view(), scratch, &mut words.view_mut())?;
    logits.untouched(gpu)?;
    bests.values(gpu)?;
    sums.values(gpu)?;
    let words = words.values(gpu)?;
    scenes::read_rows(&words, out)?;
    for (out, _) in out.iter_mut().zip(&words).filter(|(_, word)| word.bits() == u32::POISON.bits()) {
        *out = f32::POISON;
    }
    Ok(())
}
