//! CPU forward. Every function works row by row, so a row's bits depend on that row alone.

use std::ops::Range;

use super::rotary;
use crate::error::expect_len;
use crate::math::{mul_add, sigmoid, silu, vectorised};
use crate::{AttnDims, Error, Result, team};

/// Partial sums of a mean square; their number is part of the result's bits.
const LANES: usize = 16;

/// Elements that one thread takes at least.
const PIECE: usize = 1 << 11;

/// An RMSNorm's weight and how it multiplies.
#[derive(Clone, Copy, Debug)]
pub struct Norm<'a> {
    /// `[width]`.
    pub weight: &'a [f32],
    /// Added to the mean square.
    pub eps: f32,
    /// Multiply by `1 + weight` (Qwen3.5's norms) instead of `weight`.
    pub unit_offset: bool,
}

impl Norm<'_> {
    fn width(&self, op: &'static str) -> Result<usize> {
        match self.weight.len() {
            0 => {
                let (expected, got) = ("at least 1".into(), "0".into());
                Err(Error::Value { op, arg: "norm.weight length", expected, got })
            }
            width => Ok(width),
        }
    }

    fn offset(&self) -> f32 {
        if self.unit_offset { 1.0 } else { 0.0 }
    }

    /// One row.
    #[inline(always)]
    fn row<const FMA: bool>(&self, x: &[f32], out: &mut [f32]) {
        let inverse = 1.0 / (sum_of_squares::<FMA>(x) / x.len() as f32 + self.eps).sqrt();
        let offset = self.offset();
        for ((out, &x), &w) in out.iter_mut().zip(x).zip(self.weight) {
            *out = x * inverse * (w + offset);
        }
    }
}

/// `sum x^2` in `LANES` partial sums, folded in halves.
#[inline(always)]
fn sum_of_squares<const FMA: bool>(x: &[f32]) -> f32 {
    let mut sums = [0f32; LANES];
    let (chunks, tail) = x.as_chunks::<LANES>();
    for chunk in chunks {
        for (sum, &x) in sums.iter_mut().zip(chunk) {
            *sum = mul_add::<FMA>(x, x, *sum);
        }
    }
    for (sum, &x) in sums.iter_mut().zip(tail) {
        *sum = mul_add::<FMA>(x, x, *sum);
    }
    let mut width = LANES;
    while width > 1 {
        width /= 2;
        for lane in 0..width {
            sums[lane] += sums[lane + width];
        }
    }
    sums[0]
}

/// Rows of `len` values in `width`s, or an error that names the argument.
fn rows_of(op: &'static str, arg: &'static str, len: usize, width: usize) -> Result<usize> {
    let rows = len / width;
    expect_len(op, arg, &[rows, width], len)?;
    Ok(rows)
}

/// `out[r] = x[r] * rsqrt(mean x[r]^2 + eps) * (weight or 1 + weight)`; `x`, `out` `[N, width]`.
pub fn rms_norm(norm: Norm<'_>, x: &[f32], out: &mut [f32]) -> Result<()> {
    let op = "rms-norm";
    let width = norm.width(op)?;
    let rows = rows_of(op, "x", x.len(), width)?;
    expect_len(op, "out", &[rows, width], out.len())?;
    norm_rows(norm, x, out);
    Ok(())
}

vectorised!(fn norm_rows(norm: Norm<'_>, x: &[f32], out: &mut [f32]) = norm_rows_body);

#[inline(always)]
fn norm_rows_body<const FMA: bool>(norm: Norm<'_>, x: &[f32], out: &mut [f32]) {
    let width = norm.weight.len();
    for (x, out) in x.chunks_exact(width).zip(out.chunks_exact_mut(width)) {
        norm.row::<FMA>(x, out);
    }
}

/// `sum = x + residual`, `out = rms_norm(sum)`; all `[N, width]`.
pub fn add_rms_norm(
    norm: Norm<'_>,
    x: &[f32],
    residual: &[f32],
    sum: &mut [f32],
    out: &mut [f32],
) -> Result<()> {
    let op = "add-rms-norm";
    let width = norm.width(op)?;
    let rows = rows_of(op, "x", x.len(), width)?;
    expect_len(op, "residual", &[rows, width], residual.len())?;
    expect_len(op, "sum", &[rows, width], sum.len())?;
    expect_len(op, "out", &[rows, width], out.len())?;
    for ((sum, &x), &residual) in sum.iter_mut().zip(x).zip(residual) {
        *sum = x + residual;
    }
    norm_rows(norm, sum, out);
    Ok(())
}

/// `out = rms_norm(o) * silu(z)`, the norm over each head of `norm.weight.len()` values; all `[N, Hv Dv]`.
pub fn gated_rms_norm(norm: Norm<'_>, o: &[f32], z: &[f32], out: &mut [f32]) -> Result<()> {
    let op = "gated-rms-norm";
    let width = norm.width(op)?;
    let heads = rows_of(op, "o", o.len(), width)?;
    expect_len(op, "z", &[heads, width], z.len())?;
    expect_len(op, "out", &[heads, width], out.len())?;
    let piece = team::piece(out.len(), width, PIECE);
    let parts = o.chunks(piece).zip(z.chunks(piece)).zip(out.chunks_mut(piece));
    team::for_all(parts, |((o, z), out)| gated_norm_rows(norm, o, z, out));
    Ok(())
}

vectorised!(fn gated_norm_rows(norm: Norm<'_>, o: &[f32], z: &[f32], out: &mut [f32]) = gated_norm_rows_body);

#[inline(always)]
fn gated_norm_rows_body<const FMA: bool>(norm: Norm<'_>, o: &[f32], z: &[f32], out: &mut [f32]) {
    norm_rows_body::<FMA>(norm, o, out);
    for (out, &z) in out.iter_mut().zip(z) {
        *out *= silu::<FMA>(z);
    }
}

/// `out = silu(gate) * up`; all `[N, width]`.
pub fn swiglu(gate: &[f32], up: &[f32], out: &mut [f32]) -> Result<()> {
    expect_len("swiglu", "up", &[gate.len()], up.len())?;
    expect_len("swiglu", "out", &[gate.len()], out.len())?;
    let piece = team::piece(out.len(), LANES, PIECE);
    let parts = gate.chunks(piece).zip(up.chunks(piece)).zip(out.chunks_mut(piece));
    team::for_all(parts, |((gate, up), out)| swiglu_all(gate, up, out));
    Ok(())
}

vectorised!(fn swiglu_all(gate: &[f32], up: &[f32], out: &mut [f32]) = swiglu_body);

#[inline(always)]
fn swiglu_body<const FMA: bool>(gate: &[f32], up: &[f32], out: &mut [f32]) {
    for ((out, &gate), &up) in out.iter_mut().zip(gate).zip(up) {
        *out = silu::<FMA>(gate) * up;
    }
}

/// How projected queries and keys become attention inputs.
#[derive(Clone, Copy, Debug)]
pub struct QkNormRope<'a> {
    /// Heads.
    pub dims: AttnDims,
    /// Each query head is followed by its output gate: `[q | gate]` per head, 2 D wide.
    pub gated: bool,
    /// Norm of every query head, `[D]`.
    pub q_norm: Norm<'a>,
    /// Norm of every key head, `[D]`.
    pub k_norm: Norm<'a>,
    /// `[rotary_dim / 2]`; rotate-half over the first `rotary_dim` values, the rest pass through.
    pub inv_freq: &'a [f32],
    /// `[N]` absolute positions.
    pub positions: &'a [i32],
}

impl QkNormRope<'_> {
    const OP: &'static str = "qk-norm-rope";

    fn check(&self, q_proj: &[f32], k_proj: &[f32], q: &[f32], k: &[f32]) -> Result<()> {
        let (dims, rows) = (self.dims, self.positions.len());
        let d = dims.head_dim;
        expect_len(Self::OP, "q_norm.weight", &[d], self.q_norm.weight.len())?;
        expect_len(Self::OP, "k_norm.weight", &[d], self.k_norm.weight.len())?;
        if 2 * self.inv_freq.len() > d {
            let (arg, expected) = ("inv_freq length", format!("at most head_dim / 2 = {}", d / 2));
            return Err(Error::Value { op: Self::OP, arg, expected, got: self.inv_freq.len().to_string() });
        }
        let stride = if self.gated { 2 * d } else { d };
        expect_len(Self::OP, "q_proj", &[rows, dims.q_heads, stride], q_proj.len())?;
        expect_len(Self::OP, "k_proj", &[rows, dims.kv_heads, d], k_proj.len())?;
        expect_len(Self::OP, "q", &[rows, dims.q_heads, d], q.len())?;
        expect_len(Self::OP, "k", &[rows, dims.kv_heads, d], k.len())
    }
}

/// `q_proj` `[N, Hq D]` or `[N, Hq 2 D]`, `k_proj` `[N, Hkv D]` -> `q` `[N, Hq, D]`, `k` `[N, Hkv, D]`: RMSNorm per
/// head, then RoPE.
pub fn qk_norm_rope(
    args: QkNormRope<'_>,
    q_proj: &[f32],
    k_proj: &[f32],
    q: &mut [f32],
    k: &mut [f32],
) -> Result<()> {
    args.check(q_proj, k_proj, q, k)?;
    let (dims, d) = (args.dims, args.dims.head_dim);
    let (q_width, k_width) = (dims.q_width(), dims.kv_width());
    let rows = team::piece(args.positions.len() * q_width, q_width, PIECE) / q_width;
    let q_stride = if args.gated { 2 * d } else { d };
    let inputs = q_proj.chunks(rows * dims.q_heads * q_stride).zip(k_proj.chunks(rows * k_width));
    let outs = q.chunks_mut(rows * q_width).zip(k.chunks_mut(rows * k_width));
    team::for_all(
        args.positions.chunks(rows).zip(inputs).zip(outs),
        |((positions, (q_proj, k_proj)), (q, k))| {
            rotated_heads(&QkNormRope { positions, ..args }, q_proj, k_proj, q, k);
        },
    );
    Ok(())
}

vectorised!(
    fn rotated_heads(
        args: &QkNormRope<'_>, q_proj: &[f32], k_proj: &[f32], q: &mut [f32], k: &mut [f32],
    ) = rotated_heads_body
);

#[inline(always)]
fn rotated_heads_body<const FMA: bool>(
    args: &QkNormRope<'_>,
    q_proj: &[f32],
    k_proj: &[f32],
    q: &mut [f32],
    k: &mut [f32],
) {
    let (dims, d) = (args.dims, args.dims.head_dim);
    let q_stride = if args.gated { 2 * d } else { d };
    let mut table = rotary::Table::new(args.inv_freq);
    for (row, &position) in args.positions.iter().enumerate() {
        table.set(position);
        let q_heads = row * dims.q_heads..(row + 1) * dims.q_heads;
        heads::<FMA>(&args.q_norm, &table, q_proj, (q_heads, q_stride), q);
        let k_heads = row * dims.kv_heads..(row + 1) * dims.kv_heads;
        heads::<FMA>(&args.k_norm, &table, k_proj, (k_heads, d), k);
    }
}

/// Norm and rotation of some heads, `stride` apart in `x`.
#[inline(always)]
fn heads<const FMA: bool>(
    norm: &Norm<'_>,
    table: &rotary::Table<'_>,
    x: &[f32],
    (heads, stride): (Range<usize>, usize),
    out: &mut [f32],
) {
    let d = norm.weight.len();
    for head in heads {
        let out = &mut out[head * d..][..d];
        norm.row::<FMA>(&x[head * stride..][..d], out);
        table.rotate(out);
    }
}

/// `out = attn * sigmoid(gate)`, the gate taken from `q_proj` `[N, Hq, 2 D]` as [`QkNormRope::gated`] lays it.
pub fn attn_gate(dims: AttnDims, attn: &[f32], q_proj: &[f32], out: &mut [f32]) -> Result<()> {
    let op = "attn-gate";
    let d = dims.head_dim;
    let rows = rows_of(op, "attn", attn.len(), dims.q_width())?;
    expect_len(op, "q_proj", &[rows, dims.q_heads, 2 * d], q_proj.len())?;
    expect_len(op, "out", &[rows, dims.q_heads, d], out.len())?;
    let piece = team::piece(out.len(), d, PIECE);
    let parts = attn.chunks(piece).zip(q_proj.chunks(2 * piece)).zip(out.chunks_mut(piece));
    team::for_all(parts, |((attn, q_proj), out)| gated_heads(d, attn, q_proj, out));
    Ok(())
}

vectorised!(fn gated_heads(d: usize, attn: &[f32], q_proj: &[f32], out: &mut [f32]) = gated_heads_body);

#[inline(always)]
fn gated_heads_body<const FMA: bool>(d: usize, attn: &[f32], q_proj: &[f32], out: &mut [f32]) {
    let heads = attn.chunks_exact(d).zip(q_proj.chunks_exact(2 * d)).zip(out.chunks_exact_mut(d));
    for ((attn, q_gate), out) in heads {
        for ((out, &attn), &gate) in out.iter_mut().zip(attn).zip(&q_gate[d..]) {
            *out = attn * sigmoid::<FMA>(gate);
        }
    }
}
