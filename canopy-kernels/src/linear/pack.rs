//! Weights in panels of 16 outputs, k-major.

use half::bf16;

use crate::{Error, Result};

/// Outputs of one panel.
pub(super) const PANEL: usize = 16;

/// The weights of one panel's 16 outputs at one k.
pub(super) trait Step: Copy + Send + Sync {
    /// In output order, as f32.
    fn widen(&self) -> [f32; PANEL];
}

/// 16 bf16: output i in the low half of word i, output i + 8 in its high half.
#[derive(Clone, Copy, Debug, Default)]
#[repr(C, align(32))]
pub(super) struct Bf16Step([u32; 8]);

/// 16 f32.
#[derive(Clone, Copy, Debug, Default)]
#[repr(C, align(64))]
pub(super) struct F32Step([f32; PANEL]);

impl Step for Bf16Step {
    #[inline(always)]
    fn widen(&self) -> [f32; PANEL] {
        let bits = |o: usize| if o < 8 { self.0[o] << 16 } else { self.0[o - 8] & 0xffff_0000 };
        std::array::from_fn(|o| f32::from_bits(bits(o)))
    }
}

impl Step for F32Step {
    #[inline(always)]
    fn widen(&self) -> [f32; PANEL] {
        self.0
    }
}

/// Where a panel's outputs go.
#[derive(Clone, Copy, Debug)]
pub(super) struct PanelPlace {
    /// Which part's buffer.
    pub part: usize,
    /// First column there.
    pub column: usize,
    /// Outputs, at most [`PANEL`].
    pub width: usize,
}

/// All panels, each `inputs` steps long, in the weights' own dtype.
#[derive(Clone, Debug)]
pub(super) enum Panels {
    Bf16(Vec<Bf16Step>),
    F32(Vec<F32Step>),
}

/// One weight matrix `[out, in]`, or several stacked along `out`, in the layout that the product reads once for
/// all rows. bf16 weights stay bf16 in memory.
#[derive(Clone, Debug)]
pub struct PackedWeight {
    inputs: usize,
    outputs: Vec<usize>,
    pub(super) places: Vec<PanelPlace>,
    pub(super) panels: Panels,
}

impl PackedWeight {
    /// Packs row-major bf16 matrices `[out_i, in]`.
    ///
    /// # Errors
    /// No part, an empty part, `inputs` 0, or a part whose length is not a multiple of `inputs`.
    pub fn from_bf16(inputs: usize, parts: &[&[bf16]]) -> Result<Self> {
        let (outputs, places) = plan(inputs, parts)?;
        let mut steps = vec![Bf16Step::default(); places.len() * inputs];
        for (place, panel) in places.iter().zip(steps.chunks_exact_mut(inputs)) {
            let rows = parts[place.part][place.column * inputs..].chunks_exact(inputs).take(place.width);
            for (o, row) in rows.enumerate() {
                for (step, w) in panel.iter_mut().zip(row) {
                    step.0[o % 8] |= u32::from(w.to_bits()) << (o / 8 * 16);
                }
            }
        }
        Ok(Self { inputs, outputs, places, panels: Panels::Bf16(steps) })
    }

    /// Packs row-major f32 matrices `[out_i, in]`, kept in f32.
    ///
    /// # Errors
    /// As [`PackedWeight::from_bf16`].
    pub fn from_f32(inputs: usize, parts: &[&[f32]]) -> Result<Self> {
        let (outputs, places) = plan(inputs, parts)?;
        let mut steps = vec![F32Step::default(); places.len() * inputs];
        for (place, panel) in places.iter().zip(steps.chunks_exact_mut(inputs)) {
            let rows = parts[place.part][place.column * inputs..].chunks_exact(inputs).take(place.width);
            for (o, row) in rows.enumerate() {
                for (step, &w) in panel.iter_mut().zip(row) {
                    step.0[o] = w;
                }
            }
        }
        Ok(Self { inputs, outputs, places, panels: Panels::F32(steps) })
    }

    /// Input width.
    pub fn inputs(&self) -> usize {
        self.inputs
    }

    /// Output width of every part.
    pub fn outputs(&self) -> &[usize] {
        &self.outputs
    }

    /// Bytes of the packed weights: what a product reads.
    pub fn bytes(&self) -> usize {
        match &self.panels {
            Panels::Bf16(steps) => size_of_val(steps.as_slice()),
            Panels::F32(steps) => size_of_val(steps.as_slice()),
        }
    }

    /// One row of the (stacked) matrix in f32: an embedding lookup for tied weights. `out` `[in]`.
    ///
    /// # Errors
    /// `index` not below the sum of the outputs, or `out` of another length.
    pub fn row(&self, index: usize, out: &mut [f32]) -> Result<()> {
        let op = "linear row";
        crate::error::expect_len(op, "out", &[self.inputs], out.len())?;
        let (mut column, mut part) = (index, 0);
        while part < self.outputs.len() && column >= self.outputs[part] {
            column -= self.outputs[part];
            part += 1;
        }
        if part == self.outputs.len() {
            let expected = format!("below {}", self.outputs.iter().sum::<usize>());
            return Err(Error::Value { op, arg: "index", expected, got: index.to_string() });
        }
        let before: usize = self.outputs[..part].iter().map(|out| out.div_ceil(PANEL)).sum();
        let (panel, lane) = (before + column / PANEL, column % PANEL);
        let span = panel * self.inputs..(panel + 1) * self.inputs;
        match &self.panels {
            Panels::Bf16(steps) => {
                for (out, step) in out.iter_mut().zip(&steps[span]) {
                    *out = f32::from_bits(step.0[lane % 8] >> (lane / 8 * 16) << 16);
                }
            }
            Panels::F32(steps) => {
                for (out, step) in out.iter_mut().zip(&steps[span]) {
                    *out = step.0[lane];
                }
            }
        }
        Ok(())
    }
}

/// Output widths and panel places, or what is wrong with the parts.
fn plan<T>(inputs: usize, parts: &[&[T]]) -> Result<(Vec<usize>, Vec<PanelPlace>)> {
    let op = "pack weight";
    let value =
        |arg, got: usize| Err(Error::Value { op, arg, expected: "at least 1".into(), got: got.to_string() });
    if inputs == 0 {
        return value("inputs", 0);
    }
    if parts.is_empty() {
        return value("parts", 0);
    }
    let (mut outputs, mut places) = (Vec::with_capacity(parts.len()), Vec::new());
    for (part, weights) in parts.iter().enumerate() {
        let out = weights.len() / inputs;
        crate::error::expect_len(op, "part", &[out.max(1), inputs], weights.len())?;
        outputs.push(out);
        let columns = (0..out).step_by(PANEL);
        places.extend(columns.map(|column| PanelPlace { part, column, width: PANEL.min(out - column) }));
    }
    Ok((outputs, places))
}
