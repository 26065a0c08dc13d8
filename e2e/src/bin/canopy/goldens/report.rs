//! What one golden set's comparison found.

use std::collections::HashMap;

use anyhow::{Context, Result, ensure};
use candle_core::{DType, Device, Tensor};
use canopy_e2e::model::Qwen35;

use super::SLOT;

/// Tensors of a stored file by name.
pub type Golden = HashMap<String, Tensor>;

/// How far one set is from what was stored.
#[derive(Default)]
pub struct Report {
    /// Largest absolute difference.
    pub largest: f64,
    /// Largest `|got - golden| / |golden|` of a tensor.
    pub relative: f64,
    /// Rows of logits.
    pub rows: usize,
    /// Of them, those whose best token is another.
    pub others: usize,
    /// How far apart the golden's two tokens were there at most.
    pub widest: f64,
}

impl Report {
    /// The report in words.
    pub fn line(&self, bound: f64) -> String {
        let verdict = if self.relative <= bound { "ok" } else { "FAILED" };
        let rows = match self.rows {
            0 => String::new(),
            rows => format!("; {} of {rows} best tokens differ, widest tie {:.4}", self.others, self.widest),
        };
        format!(
            "max {:.2e}, relative {:.2e} of at most {bound:.0e}: {verdict}{rows}",
            self.largest, self.relative
        )
    }

    /// Takes in one tensor.
    pub fn compare(&mut self, got: &Tensor, want: &Tensor) -> Result<()> {
        ensure!(got.dims() == want.dims(), "expected shape {:?}, got {:?}", want.dims(), got.dims());
        let (got, want) = (floats(got)?, floats(want)?);
        let (mut distance, mut size) = (0.0, 0.0);
        for (got, want) in got.iter().zip(&want) {
            ensure!(got.is_finite(), "expected finite values, got {got}");
            let difference = f64::from(*got) - f64::from(*want);
            self.largest = self.largest.max(difference.abs());
            distance += difference * difference;
            size += f64::from(*want) * f64::from(*want);
        }
        self.relative = self.relative.max((distance / size.max(f64::MIN_POSITIVE)).sqrt());
        Ok(())
    }

    /// Rows of logits, whose best tokens count too.
    pub fn compare_logits(&mut self, got: &Tensor, want: &Tensor) -> Result<()> {
        self.compare(got, want)?;
        let width = want.dim(1)?;
        let (got, want) = (floats(got)?, floats(want)?);
        for (got, want) in got.chunks(width).zip(want.chunks(width)) {
            let best =
                |row: &[f32]| (0..row.len()).fold(0, |best, id| if row[id] > row[best] { id } else { best });
            let (own, stored) = (best(got), best(want));
            self.rows += 1;
            if own != stored {
                self.others += 1;
                self.widest = self.widest.max(f64::from(want[stored]) - f64::from(want[own]));
            }
        }
        Ok(())
    }

    /// Every committed state against `{prefix}layer{i}_S, _conv, _k, _v`.
    pub fn compare_states(&mut self, target: &Qwen35, golden: &Golden, prefix: &str) -> Result<()> {
        for (name, tensor) in target.state_tensors(SLOT)? {
            let (layer, part) = name.split_once('.').context("a state's name")?;
            let stored = |part: &str| get(golden, &format!("{prefix}{layer}_{part}"));
            let want = match part {
                "state" => stored("S")?.transpose(1, 2)?.contiguous()?,
                "conv_state" => stored("conv")?.clone(),
                part => stored(part)?.clone(),
            };
            self.compare(&tensor, &want)?;
        }
        Ok(())
    }
}

/// The tensor of this name.
pub fn get<'a>(golden: &'a Golden, name: &str) -> Result<&'a Tensor> {
    golden.get(name).with_context(|| format!("expected a tensor {name}, got none"))
}

/// A stored tensor of integers.
pub fn ids<T: TryFrom<i64>>(golden: &Golden, name: &str) -> Result<Vec<T>> {
    let values = get(golden, name)?.to_dtype(DType::I64)?.flatten_all()?.to_vec1::<i64>()?;
    let fits = |value| T::try_from(value).ok().with_context(|| format!("{name}: {value} does not fit"));
    values.into_iter().map(fits).collect()
}

/// Values as f32 on the CPU.
pub fn floats(tensor: &Tensor) -> Result<Vec<f32>> {
    Ok(tensor.to_device(&Device::Cpu)?.to_dtype(DType::F32)?.flatten_all()?.to_vec1()?)
}
