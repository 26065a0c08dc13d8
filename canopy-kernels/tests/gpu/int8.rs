//! The product over int8 weights: bit for bit the bf16 product over the weights that those stand for.

use std::sync::Arc;

use canopy_kernels::linear::int8;
use canopy_kernels::linear::launch::{Rounding, WeightShape, lookup};
use cudarc::driver::CudaStream;
use half::bf16;

use crate::Check;
use crate::data::{Random, bits, round_bf16, text};
use crate::linear::Product;

pub const TESTS: &[(&str, Check)] = &[
    ("int8::the_product_has_the_bits_of_the_weights_that_it_stands_for", same_bits),
    ("int8::every_shape_is_within_the_bound", bounds),
    ("int8::a_rows_bits_do_not_depend_on_its_company", company),
    ("int8::a_nan_stays_in_its_row", nonfinite_row),
    ("int8::a_group_without_a_scale_is_nan_and_no_other_output", nonfinite_weight),
    ("int8::lookup_returns_what_the_values_stand_for", rows_by_index),
    ("int8::a_second_rounding_changes_nothing", twice),
];

const RULES: [Rounding; 2] = [Rounding::Split, Rounding::Bf16];

/// Widths that are no multiple of 8 never take the warpgroups' kernel.
const SHAPES: [(usize, &[usize]); 10] = [
    (4, &[1]),
    (128, &[16]),
    (256, &[1024, 512, 8]),
    (260, &[20, 130, 17]),
    (264, &[21]),
    (768, &[256]),
    (1028, &[300, 40]),
    (4096, &[256, 64]),
    (12288, &[144]),
    (1024, &[12288]),
];

/// A matrix in int8, and the bf16 matrix that it stands for.
fn pair(
    stream: &Arc<CudaStream>,
    inputs: usize,
    outputs: &[usize],
    edit: impl FnOnce(&mut Vec<Vec<bf16>>),
) -> Result<[Product; 2], String> {
    let shape = WeightShape::new(inputs, outputs).map_err(text)?;
    let mut random = Random::new(inputs as u64);
    let part = |&out: &usize| random.normals(out * inputs).into_iter().map(bf16::from_f32).collect();
    let mut values: Vec<Vec<bf16>> = outputs.iter().map(part).collect();
    edit(&mut values);
    let mut quantised = Product::of(stream, shape.clone(), values.clone())?;
    quantised.on_device = quantised.on_device.to_int8(stream).map_err(text)?;
    if quantised.on_device.bytes() != shape.int8_len() {
        return Err("another number of bytes than counted".into());
    }
    values.iter_mut().for_each(|part| int8::round_trip(inputs, part));
    quantised.values = values.clone();
    Ok([quantised, Product::of(stream, shape, values)?])
}

fn same_bits(stream: &Arc<CudaStream>) -> Result<(), String> {
    for (inputs, outputs) in SHAPES {
        let [mut quantised, mut plain] = pair(stream, inputs, outputs, |_| ())?;
        for rows in [1usize, 2, 3, 8, 9, 16, 17, 32, 33, 64, 65, 127, 128, 130, 257, 513] {
            if rows * inputs > 1 << 20 {
                continue;
            }
            let x = Random::new(rows as u64).normals(rows * inputs);
            for rule in RULES {
                let got = quantised.run(stream, rule, &x)?;
                let want = plain.run(stream, rule, &x)?;
                if got.iter().zip(&want).any(|(got, want)| bits(got) != bits(want)) {
                    return Err(format!("{inputs} -> {outputs:?}, {rows} rows, {rule:?}: bits differ"));
                }
            }
        }
    }
    Ok(())
}

fn bounds(stream: &Arc<CudaStream>) -> Result<(), String> {
    let mut worst = 0f64;
    for &(inputs, outputs) in &SHAPES[..9] {
        let [mut quantised, _] = pair(stream, inputs, outputs, |_| ())?;
        for rows in [1usize, 5, 16, 40, 100] {
            let x = Random::new(rows as u64).normals(rows * inputs);
            let case = |e| format!("{inputs} -> {outputs:?}, {rows} rows: {e}");
            let planes = quantised.run(stream, Rounding::Split, &x)?;
            worst = worst.max(quantised.worst(&x, &planes).map_err(case)?);
            let rounded: Vec<f32> = x.iter().map(|&x| round_bf16(x)).collect();
            let planes = quantised.run(stream, Rounding::Bf16, &x)?;
            worst = worst.max(quantised.worst(&rounded, &planes).map_err(case)?);
        }
    }
    eprintln!("int8: worst error {worst:.2e} of sum |x w|");
    Ok(())
}

fn company(stream: &Arc<CudaStream>) -> Result<(), String> {
    for (inputs, outputs) in [(4096usize, &[256usize, 48][..]), (260, &[768])] {
        let [mut quantised, _] = pair(stream, inputs, outputs, |_| ())?;
        let x = Random::new(6).normals(300 * inputs);
        for rule in RULES {
            let together = quantised.run(stream, rule, &x)?;
            for (first, rows) in
                [(0usize, 1usize), (69, 2), (3, 8), (11, 13), (30, 33), (60, 100), (137, 129)]
            {
                let alone = quantised.run(stream, rule, &x[first * inputs..(first + rows) * inputs])?;
                for ((alone, together), &out) in alone.iter().zip(&together).zip(outputs) {
                    if bits(alone) != bits(&together[first * out..(first + rows) * out]) {
                        return Err(format!(
                            "{inputs} -> {outputs:?}: rows {first}..{} differ",
                            first + rows
                        ));
                    }
                }
            }
        }
    }
    Ok(())
}

fn nonfinite_row(stream: &Arc<CudaStream>) -> Result<(), String> {
    let inputs = 512;
    // a weight of 0 would make a NaN of an infinity; a value of 0 does
    let [mut quantised, _] = pair(stream, inputs, &[200], |_| ())?;
    let mut x = Random::new(8).normals(20 * inputs);
    for (value, rule) in [f32::NAN, f32::INFINITY].iter().flat_map(|&value| RULES.map(|rule| (value, rule))) {
        x[5 * inputs + 300] = 1.0;
        let clean = quantised.run(stream, rule, &x)?;
        x[5 * inputs + 300] = value;
        let got = quantised.run(stream, rule, &x)?;
        for row in 0..20 {
            let (got, clean) = (&got[0][row * 200..][..200], &clean[0][row * 200..][..200]);
            if row != 5 && bits(got) != bits(clean) {
                return Err(format!("{value} in row 5 changed row {row}"));
            }
            if row == 5 && got.iter().any(|y| y.is_finite()) {
                return Err(format!("{value} in row 5 left a finite output there"));
            }
        }
    }
    Ok(())
}

fn nonfinite_weight(stream: &Arc<CudaStream>) -> Result<(), String> {
    let (inputs, out) = (300, 40);
    for bad in [f32::NAN, f32::INFINITY, f32::NEG_INFINITY, 3e38] {
        let [mut quantised, _] =
            pair(stream, inputs, &[out], |values| values[0][17 * inputs + 200] = bf16::from_f32(bad))?;
        let x = Random::new(3).normals(5 * inputs);
        for rule in RULES {
            let got = quantised.run(stream, rule, &x)?;
            if got[0].iter().enumerate().any(|(at, y)| y.is_nan() != (at % out == 17)) {
                return Err(format!("{bad} in output 17, {rule:?}: other outputs are NaN, or it is not"));
            }
        }
    }
    Ok(())
}

fn rows_by_index(stream: &Arc<CudaStream>) -> Result<(), String> {
    let inputs = 260;
    let [quantised, _] = pair(stream, inputs, &[137, 16], |_| ())?;
    let ids = [0u32, 36, 136, 137, 152, 8, 7, 140, 129];
    let on_device = stream.clone_htod(&ids).map_err(text)?;
    let mut y = stream.clone_htod(&vec![f32::NAN; ids.len() * inputs]).map_err(text)?;
    lookup(stream, &quantised.on_device, on_device.as_view(), 152, y.as_view_mut()).map_err(text)?;
    let y = stream.clone_dtoh(&y).map_err(text)?;
    for (&id, got) in ids.iter().zip(y.chunks(inputs)) {
        let id = id as usize;
        let (part, row) = if id < 137 { (0, id) } else { (1, id - 137) };
        let expected: Vec<f32> =
            quantised.values[part][row * inputs..][..inputs].iter().map(|w| w.to_f32()).collect();
        if bits(got) != bits(&expected) {
            return Err(format!("row {id} differs"));
        }
    }
    Ok(())
}

fn twice(stream: &Arc<CudaStream>) -> Result<(), String> {
    let [mut quantised, _] = pair(stream, 260, &[40], |_| ())?;
    let x = Random::new(3).normals(5 * 260);
    let once = quantised.run(stream, Rounding::Bf16, &x)?;
    quantised.on_device = quantised.on_device.to_int8(stream).map_err(text)?;
    match bits(&once[0]) == bits(&quantised.run(stream, Rounding::Bf16, &x)?[0]) {
        true => Ok(()),
        false => Err("int8 weights made int8 again differ".into()),
    }
}
