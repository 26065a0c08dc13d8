//! The row-wise steps against their float64 oracle, within the room's bound: 4e-7 of the row's largest true value. Rows are read out of
//! wider matrices, as fused projections leave them; every row's bits must be the same alone, among others and at an odd address.

use std::sync::Arc;

use canopy_kernels::AttnDims;
use canopy_kernels::glue::launch::{self, Destinations, Norm, QkNormRope, Rows};
use canopy_kernels::glue::oracle;
use cudarc::driver::{CudaSlice, CudaStream, DeviceRepr};
use half::bf16;

use crate::Check;
use crate::data::{Random, bits, text, wide};

pub const TESTS: &[(&str, Check)] = &[
    ("glue::norms_equal_the_oracle_at_every_width", norms),
    ("glue::gates_equal_the_oracle", gates),
    ("glue::rope_equals_the_oracle_to_position_262144", rope),
    ("glue::rope_with_append_gives_the_bits_of_both_steps", rope_append),
    ("glue::rows_alone_equal_rows_together", rows_alone),
    ("glue::nonfinite_rows_stay_alone", nonfinite),
    ("glue::kv_append_writes_its_rows_and_no_other", append),
    ("glue::refusals_name_the_argument", refusals),
];

const BOUND: f64 = 4e-7;
const EPS: f32 = 1e-6;
/// Rows of the largest case; 1 to 17 are compared with it.
const ROWS: usize = 129;

type Outcome<T = ()> = Result<T, String>;

/// Uploads, outputs that start as NaN, and downloads.
#[derive(Clone, Copy)]
struct Gpu<'a>(&'a Arc<CudaStream>);

impl Gpu<'_> {
    fn up<T: DeviceRepr>(self, x: &[T]) -> Outcome<CudaSlice<T>> {
        self.0.clone_htod(x).map_err(text)
    }

    fn nans(self, len: usize) -> Outcome<CudaSlice<f32>> {
        self.up(&vec![f32::NAN; len])
    }

    fn down<T: DeviceRepr + Default + Clone>(self, x: &CudaSlice<T>) -> Outcome<Vec<T>> {
        self.0.clone_dtoh(x).map_err(text)
    }
}

fn close(what: &str, got: &[f32], want: &[f64]) -> Outcome {
    let largest = want.iter().fold(0f64, |most, w| most.max(w.abs()));
    for (i, (&got, &want)) in got.iter().zip(want).enumerate() {
        let error = (f64::from(got) - want).abs();
        if error.is_nan() || error > BOUND * largest {
            return Err(format!("{what}, element {i}: got {got}, expected {want}, row's largest {largest}"));
        }
    }
    Ok(())
}

fn factor(weight: &[f32], unit_offset: bool) -> Vec<f64> {
    weight.iter().map(|&w| f64::from(w) + if unit_offset { 1.0 } else { 0.0 }).collect()
}

/// The norms' inputs of one width: x, residual and z `[ROWS, width]`, weight `[width]`.
struct NormCase {
    width: usize,
    unit_offset: bool,
    weight: Vec<f32>,
    x: Vec<f32>,
    residual: Vec<f32>,
    z: Vec<f32>,
}

impl NormCase {
    fn new(width: usize, unit_offset: bool) -> Self {
        let mut random = Random::new(width as u64);
        let weight = random.normals(width);
        let mut rows = || random.normals(ROWS * width);
        Self { width, unit_offset, weight, x: rows(), residual: rows(), z: rows() }
    }

    /// rms_norm, the sum and the norm of add_rms_norm, gated_rms_norm (one head) of `rows` rows from `first` on, their first row
    /// `shift` elements into each allocation.
    fn run(&self, gpu: Gpu<'_>, first: usize, rows: usize, shift: usize) -> Outcome<[Vec<f32>; 4]> {
        let (width, len) = (self.width, rows * self.width);
        let load = |x: &[f32]| {
            let mut all = vec![f32::NAN; shift];
            all.extend_from_slice(&x[first * width..first * width + len]);
            gpu.up(&all)
        };
        let (x, residual, z) = (load(&self.x)?, load(&self.residual)?, load(&self.z)?);
        let weight = gpu.up(&self.weight)?;
        let (weight, from) = (weight.as_view(), |x: &CudaSlice<f32>| x.len() - len);
        let norm = Norm { weight: &weight, eps: EPS, unit_offset: self.unit_offset };
        let (x, residual, z) = (x.slice(from(&x)..), residual.slice(from(&residual)..), z.slice(from(&z)..));
        let mut outs =
            [gpu.nans(shift + len)?, gpu.nans(shift + len)?, gpu.nans(shift + len)?, gpu.nans(shift + len)?];
        let [plain, sum, added, gated] = &mut outs;
        launch::rms_norm(gpu.0, norm, &x, &mut plain.slice_mut(shift..)).map_err(text)?;
        let (total, out) = (&mut sum.slice_mut(shift..), &mut added.slice_mut(shift..));
        launch::add_rms_norm(gpu.0, norm, [&x, &residual], total, out).map_err(text)?;
        let z = Rows { data: &z, stride: width };
        launch::gated_rms_norm(gpu.0, norm, 1, &x, z, &mut gated.slice_mut(shift..)).map_err(text)?;
        let mut halves = gpu.0.clone_htod(&vec![bf16::NAN; len]).map_err(text)?;
        launch::gated_rms_norm(gpu.0, norm, 1, &x, z, &mut halves.as_view_mut()).map_err(text)?;
        let whole = gpu.down(gated)?.split_off(shift);
        rounded("gated_rms_norm", &gpu.0.clone_dtoh(&halves).map_err(text)?, &whole)?;
        launch::rms_norm(gpu.0, norm, &x, &mut halves.as_view_mut()).map_err(text)?;
        let whole = gpu.down(plain)?.split_off(shift);
        rounded("rms_norm", &gpu.0.clone_dtoh(&halves).map_err(text)?, &whole)?;
        let mut total = gpu.nans(len)?;
        launch::add_rms_norm(
            gpu.0,
            norm,
            [&x, &residual],
            &mut total.as_view_mut(),
            &mut halves.as_view_mut(),
        )
        .map_err(text)?;
        let whole = gpu.down(added)?.split_off(shift);
        rounded("add_rms_norm", &gpu.0.clone_dtoh(&halves).map_err(text)?, &whole)?;
        if bits(&gpu.down(&total)?) != bits(&gpu.down(sum)?.split_off(shift)) {
            return Err("add_rms_norm: sums beside bf16 outputs differ from those beside f32 ones".into());
        }
        let mut got = [vec![], vec![], vec![], vec![]];
        for (got, out) in got.iter_mut().zip(&outs) {
            *got = gpu.down(out)?.split_off(shift);
        }
        Ok(got)
    }

    fn check(&self, [plain, sum, added, gated]: &[Vec<f32>; 4]) -> Outcome {
        let factor = factor(&self.weight, self.unit_offset);
        for row in 0..ROWS {
            let at = row * self.width..(row + 1) * self.width;
            let what = |step: &str| format!("{step}, width {}, row {row}", self.width);
            let normed = oracle::rms_norm(&wide(&self.x[at.clone()]), &factor, EPS.into());
            close(&what("rms_norm"), &plain[at.clone()], &normed)?;
            let gate = self.z[at.clone()].iter().map(|&z| oracle::silu(z.into()));
            let want: Vec<f64> = normed.iter().zip(gate).map(|(o, gate)| o * gate).collect();
            close(&what("gated_rms_norm"), &gated[at.clone()], &want)?;
            let total: Vec<f32> = at.clone().map(|i| self.x[i] + self.residual[i]).collect();
            if bits(&sum[at.clone()]) != bits(&total) {
                return Err(what("the sum of add_rms_norm"));
            }
            let want = oracle::rms_norm(&wide(&total), &factor, EPS.into());
            close(&what("add_rms_norm"), &added[at], &want)?;
        }
        Ok(())
    }
}

fn norms(stream: &Arc<CudaStream>) -> Outcome {
    let gpu = Gpu(stream);
    for width in [1, 7, 128, 256, 512, 513, 4096, 4100, 12_288] {
        for unit_offset in [false, true] {
            let case = NormCase::new(width, unit_offset);
            let all = case.run(gpu, 0, ROWS, 0)?;
            case.check(&all)?;
            let parts = (1..=17).map(|rows| (ROWS - rows, rows, 0)).chain([(0, 17, 1), (3, 2, 2), (5, 1, 3)]);
            for (first, rows, shift) in parts {
                let got = case.run(gpu, first, rows, shift)?;
                for (step, (got, all)) in got.iter().zip(&all).enumerate() {
                    if bits(got) != bits(&all[first * width..(first + rows) * width]) {
                        return Err(format!(
                            "step {step}, width {width}: {rows} rows from {first}, address + {shift}"
                        ));
                    }
                }
            }
        }
    }
    Ok(())
}

/// A matrix of `rows` rows in which every named part is some columns.
fn columns(rows: usize, parts: &[&[f32]]) -> (Vec<f32>, Vec<usize>, usize) {
    let widths: Vec<usize> = parts.iter().map(|part| part.len() / rows).collect();
    let starts = widths.iter().scan(0, |at, width| {
        let start = *at;
        *at += width;
        Some(start)
    });
    let starts: Vec<usize> = starts.collect();
    let mut all = Vec::new();
    for row in 0..rows {
        for (part, width) in parts.iter().zip(&widths) {
            all.extend_from_slice(&part[row * width..(row + 1) * width]);
        }
    }
    (all, starts, widths.iter().sum())
}

/// From the first row's `start` on to the last row's last element of `width`.
macro_rules! rows_of {
    ($all:expr, $rows:expr, $start:expr, $width:expr, $stride:expr) => {
        $all.slice($start..$start + ($rows - 1) * $stride + $width)
    };
}

/// bf16 outputs are the f32 ones, rounded.
fn rounded(what: &str, got: &[bf16], out: &[f32]) -> Outcome {
    let same = got.iter().zip(out).all(|(got, &out)| got.to_bits() == bf16::from_f32(out).to_bits());
    if same { Ok(()) } else { Err(format!("{what}: bf16 outputs are not the f32 ones, rounded")) }
}

fn gates(stream: &Arc<CudaStream>) -> Outcome {
    let (gpu, mut random) = (Gpu(stream), Random::new(41));
    for (rows, width) in [(17, 128), (5, 12_288), (129, 768), (3, 7)] {
        let (gate, up) = (random.normals(rows * width), random.normals(rows * width));
        let (all, starts, stride) = columns(rows, &[&gate, &up]);
        let all = gpu.up(&all)?;
        let (g, u) =
            (rows_of!(all, rows, starts[0], width, stride), rows_of!(all, rows, starts[1], width, stride));
        let mut out = gpu.nans(rows * width)?;
        let [g, u] = [Rows { data: &g, stride }, Rows { data: &u, stride }];
        launch::swiglu(stream, width, g, u, &mut out.as_view_mut()).map_err(text)?;
        let want = wide(&gate).into_iter().zip(wide(&up)).map(|(g, u)| oracle::silu(g) * u);
        let out = gpu.down(&out)?;
        close("swiglu", &out, &want.collect::<Vec<_>>())?;
        let mut halves = stream.clone_htod(&vec![bf16::NAN; rows * width]).map_err(text)?;
        launch::swiglu(stream, width, g, u, &mut halves.as_view_mut()).map_err(text)?;
        rounded("swiglu", &stream.clone_dtoh(&halves).map_err(text)?, &out)?;
    }
    for (rows, heads, d) in [(17, 16, 256), (129, 4, 256), (5, 3, 20), (3, 2, 7)] {
        let dims = AttnDims::new(heads, 1, d).map_err(text)?;
        let (attn, q_proj, k) = (
            random.normals(rows * heads * d),
            random.normals(rows * 2 * heads * d),
            random.normals(rows * d),
        );
        let (all, starts, stride) = columns(rows, &[&k, &q_proj]);
        let (all, on_device) = (gpu.up(&all)?, gpu.up(&attn)?);
        let gate = rows_of!(all, rows, starts[1], 2 * heads * d, stride);
        let mut out = gpu.nans(attn.len())?;
        let gate_rows = Rows { data: &gate, stride };
        launch::attn_gate(stream, dims, &on_device.as_view(), gate_rows, &mut out.as_view_mut())
            .map_err(text)?;
        let gate = |i: usize| f64::from(q_proj[i / d * 2 * d + d + i % d]);
        let want = (0..attn.len()).map(|i| f64::from(attn[i]) * oracle::sigmoid(gate(i)));
        close("attn_gate", &gpu.down(&out)?, &want.collect::<Vec<_>>())?;
        let rounded: Vec<bf16> = attn.iter().map(|&x| bf16::from_f32(x)).collect();
        let on_device = gpu.up(&rounded)?;
        let mut out = gpu.nans(attn.len())?;
        launch::attn_gate(stream, dims, &on_device.as_view(), gate_rows, &mut out.as_view_mut())
            .map_err(text)?;
        let want = (0..attn.len()).map(|i| rounded[i].to_f64() * oracle::sigmoid(gate(i)));
        close("attn_gate of bf16", &gpu.down(&out)?, &want.collect::<Vec<_>>())?;
    }
    Ok(())
}

const POSITIONS: [i32; 9] = [0, 1, 2, 2_047, 40_000, 131_071, 200_003, 262_143, 262_144];

/// Queries and keys of one attention layer, beside each other in one matrix.
struct RopeCase {
    dims: AttnDims,
    gated: bool,
    weights: [Vec<f32>; 2],
    freq: Vec<f32>,
    q_proj: Vec<f32>,
    k_proj: Vec<f32>,
    positions: Vec<i32>,
}

impl RopeCase {
    fn new((gated, d, half): (bool, usize, usize), positions: &[i32]) -> Outcome<Self> {
        let (mut random, rows, dims) =
            (Random::new(d as u64), positions.len(), AttnDims::new(6, 2, d).map_err(text)?);
        Ok(Self {
            dims,
            gated,
            weights: [random.normals(d), random.normals(d)],
            freq: (0..half).map(|i| 1e7f64.powf(-(i as f64) / half as f64) as f32).collect(),
            q_proj: random.normals(rows * 6 * d * if gated { 2 } else { 1 }),
            k_proj: random.normals(rows * 2 * d),
            positions: positions.to_vec(),
        })
    }

    fn run(&self, gpu: Gpu<'_>) -> Outcome<[Vec<f32>; 2]> {
        let rows = self.positions.len();
        let (all, starts, stride) = columns(rows, &[&self.q_proj, &self.k_proj]);
        let all = gpu.up(&all)?;
        let q = rows_of!(all, rows, starts[0], self.q_proj.len() / rows, stride);
        let k = rows_of!(all, rows, starts[1], self.k_proj.len() / rows, stride);
        let (q_weight, k_weight) = (gpu.up(&self.weights[0])?, gpu.up(&self.weights[1])?);
        let (q_weight, k_weight) = (q_weight.as_view(), k_weight.as_view());
        // An empty upload is refused by the driver: no frequencies are a view of none.
        let (freq, positions) = (gpu.up(&[&self.freq[..], &[0.0]].concat())?, gpu.up(&self.positions)?);
        let mut outs = [gpu.nans(rows * self.dims.q_width())?, gpu.nans(rows * self.dims.kv_width())?];
        let [q_out, k_out] = &mut outs;
        let op = QkNormRope {
            dims: self.dims,
            gated: self.gated,
            q_norm: Norm { weight: &q_weight, eps: EPS, unit_offset: self.gated },
            k_norm: Norm { weight: &k_weight, eps: EPS, unit_offset: self.gated },
            inv_freq: &freq.slice(..self.freq.len()),
            positions: &positions.as_view(),
        };
        let inputs = [Rows { data: &q, stride }, Rows { data: &k, stride }];
        launch::qk_norm_rope(gpu.0, op, inputs, [&mut q_out.as_view_mut(), &mut k_out.as_view_mut()])
            .map_err(text)?;
        Ok([gpu.down(&outs[0])?, gpu.down(&outs[1])?])
    }

    fn check(&self, [q, k]: &[Vec<f32>; 2]) -> Outcome {
        let d = self.dims.head_dim;
        let stride = if self.gated { 2 * d } else { d };
        for (row, &position) in self.positions.iter().enumerate() {
            let angles: Vec<f64> = self.freq.iter().map(|&f| (position as f32 * f).into()).collect();
            let check = |weight: &[f32], x: &[f32], got: &[f32]| {
                let normed = oracle::rms_norm(&wide(x), &factor(weight, self.gated), EPS.into());
                close(&format!("position {position}, width {d}"), got, &oracle::rotate(&normed, &angles))
            };
            for head in row * 6..row * 6 + 6 {
                check(&self.weights[0], &self.q_proj[head * stride..][..d], &q[head * d..][..d])?;
            }
            for head in row * 2..row * 2 + 2 {
                check(&self.weights[1], &self.k_proj[head * d..][..d], &k[head * d..][..d])?;
            }
        }
        Ok(())
    }
}

fn rope(stream: &Arc<CudaStream>) -> Outcome {
    for shape in
        [(true, 256, 32), (false, 128, 64), (false, 256, 128), (true, 6, 2), (false, 7, 3), (false, 8, 0)]
    {
        let case = RopeCase::new(shape, &POSITIONS)?;
        case.check(&case.run(Gpu(stream))?)?;
        let many: Vec<i32> = (0..ROWS as i32).map(|row| row * 2_027).collect();
        let case = RopeCase::new(shape, &many)?;
        case.check(&case.run(Gpu(stream))?)?;
    }
    Ok(())
}

/// Rows of a pool in one call, and nothing (-1).
const DESTINATIONS: [i32; 9] = [3, 4, 5, -1, 0, 17, 16, 8, 9];
const POOL_ROWS: usize = 19;

/// `old` with `rows` at [`DESTINATIONS`].
fn appended<T: Copy>(old: &[T], rows: &[T]) -> Vec<T> {
    let (mut pool, width) = (old.to_vec(), old.len() / POOL_ROWS);
    for (row, &to) in rows.chunks(width).zip(&DESTINATIONS).filter(|(_, to)| **to >= 0) {
        pool[to as usize * width..][..width].copy_from_slice(row);
    }
    pool
}

fn rope_append_as<T>(gpu: Gpu<'_>, case: &RopeCase, round: fn(f32) -> T) -> Outcome
where
    T: launch::PoolElement + Copy + Default + PartialEq,
{
    let (rows, width) = (POSITIONS.len(), case.dims.kv_width());
    let [q_want, k_want] = case.run(gpu)?;
    let rounded = |x: &[f32]| x.iter().map(|&x| round(x)).collect::<Vec<T>>();
    let mut random = Random::new(47);
    let (v, old) = (random.normals(rows * width), rounded(&random.normals(POOL_ROWS * width)));
    let (all, starts, stride) = columns(rows, &[&v, &case.q_proj, &case.k_proj]);
    let all = gpu.up(&all)?;
    let v_rows = rows_of!(all, rows, starts[0], width, stride);
    let q = rows_of!(all, rows, starts[1], case.q_proj.len() / rows, stride);
    let k = rows_of!(all, rows, starts[2], width, stride);
    let inputs = [&q, &k, &v_rows].map(|data| Rows { data, stride });
    let (q_weight, k_weight) = (gpu.up(&case.weights[0])?, gpu.up(&case.weights[1])?);
    let (freq, positions) = (gpu.up(&[&case.freq[..], &[0.0]].concat())?, gpu.up(&case.positions)?);
    let on_device = gpu.up(&DESTINATIONS)?;
    let (q_weight, k_weight) = (q_weight.as_view(), k_weight.as_view());
    let [q_norm, k_norm] =
        [&q_weight, &k_weight].map(|weight| Norm { weight, eps: EPS, unit_offset: case.gated });
    let op = QkNormRope {
        dims: case.dims,
        gated: case.gated,
        q_norm,
        k_norm,
        inv_freq: &freq.slice(..case.freq.len()),
        positions: &positions.as_view(),
    };
    let to = Destinations { host: &DESTINATIONS, on_device: &on_device.as_view() };
    let (mut keys, mut values) = (gpu.up(&old)?, gpu.up(&old)?);
    let mut out = gpu.up(&rounded(&vec![f32::NAN; q_want.len()]))?;
    let pools = [&mut keys.as_view_mut(), &mut values.as_view_mut()];
    launch::qk_norm_rope_append(gpu.0, op, inputs, to, &mut out.as_view_mut(), pools).map_err(text)?;
    let what = format!("{} values a head", case.dims.head_dim);
    for (name, got, want) in [
        ("queries", gpu.down(&out)?, rounded(&q_want)),
        ("keys", gpu.down(&keys)?, appended(&old, &rounded(&k_want))),
        ("values", gpu.down(&values)?, appended(&old, &rounded(&v))),
    ] {
        if got != want {
            return Err(format!("{name}, {what}: not those of the two steps"));
        }
    }
    Ok(())
}

fn rope_append(stream: &Arc<CudaStream>) -> Outcome {
    for shape in [(true, 256, 32), (false, 128, 64), (true, 6, 2), (false, 7, 3), (false, 8, 0)] {
        let case = RopeCase::new(shape, &POSITIONS)?;
        rope_append_as::<f32>(Gpu(stream), &case, |x| x)?;
        rope_append_as::<bf16>(Gpu(stream), &case, bf16::from_f32)?;
    }
    Ok(())
}

/// SwiGLU, the output gate and both outputs of the rotary step on `rows` rows from `first` on of seeded inputs, after `spoil`.
fn steps(gpu: Gpu<'_>, first: usize, rows: usize, spoil: impl Fn(&mut [f32])) -> Outcome<Vec<Vec<f32>>> {
    const HEADS: usize = 4;
    const D: usize = 128;
    const WIDTH: usize = HEADS * D;
    let take = |seed: u64, width: usize| {
        let mut all = Random::new(seed).normals(17 * width);
        spoil(&mut all[..width]);
        all[first * width..(first + rows) * width].to_vec()
    };
    let (x, z, q_proj) = (gpu.up(&take(1, WIDTH))?, gpu.up(&take(2, WIDTH))?, gpu.up(&take(3, 2 * WIDTH))?);
    let dims = AttnDims::new(HEADS, 1, D).map_err(text)?;
    let mut outs = [gpu.nans(rows * WIDTH)?, gpu.nans(rows * WIDTH)?];
    let (gate, up) = (x.as_view(), z.as_view());
    let [gate, up] = [&gate, &up].map(|data| Rows { data, stride: WIDTH });
    launch::swiglu(gpu.0, WIDTH, gate, up, &mut outs[0].as_view_mut()).map_err(text)?;
    let gates = q_proj.as_view();
    let gates = Rows { data: &gates, stride: 2 * WIDTH };
    launch::attn_gate(gpu.0, dims, &x.as_view(), gates, &mut outs[1].as_view_mut()).map_err(text)?;
    let mut got = outs.iter().map(|out| gpu.down(out)).collect::<Outcome<Vec<_>>>()?;
    let positions: Vec<i32> = (first..first + rows).map(|row| 15_000 * row as i32).collect();
    let whole = RopeCase::new((true, D, 32), &positions)?;
    let case = RopeCase { q_proj: take(4, 12 * D), k_proj: take(5, 2 * D), ..whole };
    got.extend(case.run(gpu)?);
    Ok(got)
}

fn rows_alone(stream: &Arc<CudaStream>) -> Outcome {
    let gpu = Gpu(stream);
    let together = steps(gpu, 0, 17, |_| ())?;
    for row in 0..17 {
        for (step, (alone, together)) in steps(gpu, row, 1, |_| ())?.iter().zip(&together).enumerate() {
            if bits(alone) != bits(&together[row * alone.len()..][..alone.len()]) {
                return Err(format!("step {step}, row {row}: other bits alone"));
            }
        }
    }
    Ok(())
}

fn nonfinite(stream: &Arc<CudaStream>) -> Outcome {
    let gpu = Gpu(stream);
    let clean = steps(gpu, 0, 5, |_| ())?;
    for bad in [f32::NAN, f32::INFINITY] {
        for (step, (got, clean)) in steps(gpu, 0, 5, |x| x.fill(bad))?.iter().zip(&clean).enumerate() {
            let width = got.len() / 5;
            if bits(&got[width..]) != bits(&clean[width..]) || got[..width].iter().any(|y| y.is_finite()) {
                return Err(format!("step {step}: {bad} left its row, or did not fill it"));
            }
        }
        for width in [256, 4096] {
            let mut case = NormCase::new(width, true);
            let clean = case.run(gpu, 0, 6, 0)?;
            case.x[4 * width + 3] = bad;
            let spoilt = 4 * width..5 * width;
            for (step, (got, clean)) in case.run(gpu, 0, 6, 0)?.iter().zip(&clean).enumerate() {
                let others = |x: &[f32]| bits(&[&x[..spoilt.start], &x[spoilt.end..]].concat());
                if others(got) != others(clean) || got[spoilt.start + 3].is_finite() {
                    return Err(format!("norm step {step}, width {width}: {bad} left its row"));
                }
            }
        }
    }
    Ok(())
}

fn append(stream: &Arc<CudaStream>) -> Outcome {
    let (gpu, mut random) = (Gpu(stream), Random::new(43));
    for width in [1024, 512, 6] {
        let destinations = [3, 4, 5, -1, 0, 17, 16];
        let (rows, pool_rows) = (destinations.len(), 19);
        let (k, mut v) = (random.normals(rows * width), random.normals(rows * width));
        (v[0], v[width + 1]) = (f32::NAN, f32::INFINITY);
        let old = random.normals(pool_rows * width);
        let on_device = gpu.up(&destinations)?;
        let to = Destinations { host: &destinations, on_device: &on_device.as_view() };
        let (all, starts, stride) = columns(rows, &[&k, &v]);
        let all = gpu.up(&all)?;
        let (kr, vr) =
            (rows_of!(all, rows, starts[0], width, stride), rows_of!(all, rows, starts[1], width, stride));
        let [kr, vr] = [&kr, &vr].map(|data| Rows { data, stride });
        let want = |rows: &[f32]| {
            let mut pool = old.clone();
            for (row, &to) in rows.chunks(width).zip(&destinations).filter(|(_, to)| **to >= 0) {
                pool[to as usize * width..][..width].copy_from_slice(row);
            }
            pool
        };
        let narrow = |x: &[f32]| x.iter().map(|&x| bf16::from_f32(x)).collect::<Vec<_>>();
        let same16 = |got: &[bf16], want: &[f32]| {
            got.iter()
                .zip(narrow(want))
                .all(|(got, want)| got.to_bits() == want.to_bits() || (got.is_nan() && want.is_nan()))
        };

        let (mut keys, mut values) = (gpu.up(&narrow(&old))?, gpu.up(&narrow(&old))?);
        let pools = [&mut keys.as_view_mut(), &mut values.as_view_mut()];
        launch::kv_append_pair::<bf16>(stream, width, to, [kr, vr], pools).map_err(text)?;
        if !same16(&gpu.down(&keys)?, &want(&k)) || !same16(&gpu.down(&values)?, &want(&v)) {
            return Err(format!("bf16 pair, width {width}"));
        }
        let mut alone = gpu.up(&narrow(&old))?;
        launch::kv_append::<bf16>(stream, width, to, vr, &mut alone.as_view_mut()).map_err(text)?;
        if !same16(&gpu.down(&alone)?, &want(&v)) {
            return Err(format!("bf16 alone, width {width}"));
        }
        let mut plain = gpu.up(&old)?;
        launch::kv_append::<f32>(stream, width, to, vr, &mut plain.as_view_mut()).map_err(text)?;
        if bits(&gpu.down(&plain)?) != bits(&want(&v)) {
            return Err(format!("f32 alone, width {width}"));
        }
    }
    Ok(())
}

fn refusals(stream: &Arc<CudaStream>) -> Outcome {
    let gpu = Gpu(stream);
    let (x, mut out) = (gpu.nans(32)?, gpu.nans(32)?);
    let (weight, wide) = (x.slice(..8), gpu.nans(16_388)?);
    let norm = Norm { weight: &weight, eps: EPS, unit_offset: false };
    let said = |result: canopy_kernels::Result<()>, want: &str| match result {
        Err(e) if e.to_string() == want => Ok(()),
        Err(e) => Err(format!("said {e}, expected {want}")),
        Ok(()) => Err(format!("accepted, expected {want}")),
    };
    let data = x.as_view();
    let mut out = out.as_view_mut();
    said(
        launch::rms_norm(stream, norm, &x.slice(..31), &mut out),
        "rms-norm: x, expected: [3, 8], got: [31]",
    )?;
    let far = Norm { weight: &wide.as_view(), ..norm };
    let want = "rms-norm: no kernel for rows of 16388 values; built: rows of at most 16384 values";
    said(launch::rms_norm(stream, far, &data, &mut out), want)?;
    let rows = |stride| Rows { data: &data, stride };
    said(
        launch::swiglu(stream, 8, rows(8), rows(7), &mut out),
        "swiglu: up, expected: a row stride of 8 to 4294967295, got: 7",
    )?;
    said(launch::swiglu(stream, 8, rows(8), rows(9), &mut out), "swiglu: up, expected: [35], got: [32]")?;
    for (at, bad) in [(1, 4), (2, -2)] {
        let mut host = [0, 1, 2, -1];
        host[at] = bad;
        let on_device = gpu.up(&host)?;
        let to = Destinations { host: &host, on_device: &on_device.as_view() };
        said(
            launch::kv_append::<f32>(stream, 8, to, rows(8), &mut out),
            &format!("kv-append: destinations, expected: rows of cache below 4, or -1, got: {bad}"),
        )?;
    }
    Ok(())
}
