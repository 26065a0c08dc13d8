//! The product against its float64 oracle, row bits, and lookups.

use std::sync::Arc;

use canopy_kernels::linear::launch::{Rounding, WeightOnDevice, WeightShape, forward, lookup};
use canopy_kernels::linear::{oracle, random};
use cudarc::driver::CudaStream;
use half::bf16;

use crate::Check;
use crate::data::{Random, bits, round_bf16, text};

pub const TESTS: &[(&str, Check)] = &[
    ("linear::every_shape_is_within_the_bound", shapes),
    ("linear::a_rows_bits_do_not_depend_on_its_company", company),
    ("linear::a_nan_stays_in_its_row", nonfinite),
    ("linear::lookup_returns_the_weights_rows", rows_by_index),
    ("linear::random_weights_are_the_cpus", random_weights),
    ("linear::bad_arguments_are_named", refusals),
];

/// A matrix on both sides.
pub struct Product {
    shape: WeightShape,
    pub values: Vec<Vec<bf16>>,
    pub on_device: WeightOnDevice,
}

impl Product {
    fn new(stream: &Arc<CudaStream>, inputs: usize, outputs: &[usize], seed: u64) -> Result<Self, String> {
        let mut random = Random::new(seed);
        let shape = WeightShape::new(inputs, outputs).map_err(text)?;
        let part = |&out: &usize| random.normals(out * inputs).into_iter().map(bf16::from_f32).collect();
        Self::of(stream, shape, outputs.iter().map(part).collect())
    }

    /// These values.
    pub fn of(stream: &Arc<CudaStream>, shape: WeightShape, values: Vec<Vec<bf16>>) -> Result<Self, String> {
        let packed = shape.pack(&values.iter().map(Vec::as_slice).collect::<Vec<_>>()).map_err(text)?;
        let packed = stream.clone_htod(&packed).map_err(text)?;
        let on_device = WeightOnDevice::new(stream, shape.clone(), packed).map_err(text)?;
        Ok(Self { shape, values, on_device })
    }

    /// All planes, one after another, each on a multiple of 32 elements; what lies between must stay NaN.
    pub fn run(
        &mut self,
        stream: &Arc<CudaStream>,
        rounding: Rounding,
        x: &[f32],
    ) -> Result<Vec<Vec<f32>>, String> {
        let rows = x.len() / self.shape.inputs();
        let (mut starts, mut end) = (Vec::new(), 0usize);
        for out in self.shape.outputs() {
            let start = end.next_multiple_of(32);
            starts.push(start);
            end = start + rows * out;
        }
        let x = stream.clone_htod(x).map_err(text)?;
        let scratch_len = self.on_device.scratch_len(rows).max(1);
        let mut scratch = stream.clone_htod(&vec![f32::NAN; scratch_len]).map_err(text)?;
        let mut y = stream.clone_htod(&vec![f32::NAN; end + 32]).map_err(text)?;
        forward(stream, &mut self.on_device, rounding, x.as_view(), &mut scratch, &starts, y.as_view_mut())
            .map_err(text)?;
        let y = stream.clone_dtoh(&y).map_err(text)?;
        if y[end..].iter().any(|y| !y.is_nan()) {
            return Err("wrote behind the last plane".into());
        }
        let plane = |(&start, &out): (&usize, &usize)| y[start..start + rows * out].to_vec();
        Ok(starts.iter().zip(self.shape.outputs()).map(plane).collect())
    }

    /// Largest error as a share of `sum |x w|`.
    pub fn worst(&self, x: &[f32], planes: &[Vec<f32>]) -> Result<f64, String> {
        let inputs = self.shape.inputs();
        let wide = |x: &[f32]| x.iter().map(|&x| f64::from(x)).collect::<Vec<_>>();
        let absolute = |x: &[f64]| x.iter().map(|x| x.abs()).collect::<Vec<_>>();
        let x = wide(x);
        let mut worst = 0f64;
        for (values, plane) in self.values.iter().zip(planes) {
            let weight: Vec<f64> = values.iter().map(|w| w.to_f64()).collect();
            let truth = oracle::forward(inputs, &weight, &x);
            let scale = oracle::forward(inputs, &absolute(&weight), &absolute(&x));
            for (at, ((&got, truth), scale)) in plane.iter().zip(truth).zip(scale).enumerate() {
                let error = (f64::from(got) - truth).abs();
                if error.is_nan() || error > scale / 32768.0 {
                    return Err(format!("output {at}: got {got}, expected {truth}, sum |x w| {scale}"));
                }
                worst = worst.max(error / scale.max(f64::MIN_POSITIVE));
            }
        }
        Ok(worst)
    }
}

fn shapes(stream: &Arc<CudaStream>) -> Result<(), String> {
    let mut worst = 0f64;
    for (inputs, outputs) in [
        (4usize, &[1usize][..]),
        (128, &[16]),
        (256, &[1024, 512, 8]),
        (260, &[20, 130, 17]),
        (768, &[256]),
        (4096, &[256, 64]),
        (4096, &[640, 128]),
        (12288, &[144]),
    ] {
        let mut product = Product::new(stream, inputs, outputs, inputs as u64)?;
        for rows in [1usize, 3, 7, 8, 9, 16, 17, 31, 33, 63, 64, 65, 130, 513] {
            if rows * inputs > 1 << 20 {
                continue;
            }
            let x = Random::new(rows as u64).normals(rows * inputs);
            let case = |e| format!("{inputs} -> {outputs:?}, {rows} rows: {e}");
            let planes = product.run(stream, Rounding::Split, &x)?;
            worst = worst.max(product.worst(&x, &planes).map_err(case)?);
            // Rows that are bf16 already lose nothing by the rounding.
            let rounded: Vec<f32> = x.iter().map(|&x| round_bf16(x)).collect();
            for rounding in [Rounding::Bf16, Rounding::Whole] {
                let planes = product.run(stream, rounding, &x)?;
                worst = worst.max(product.worst(&rounded, &planes).map_err(case)?);
            }
        }
    }
    eprintln!("linear: worst error {worst:.2e} of sum |x w|");
    Ok(())
}

fn company(stream: &Arc<CudaStream>) -> Result<(), String> {
    for (inputs, outputs) in [(4096usize, &[256usize, 48][..]), (256, &[768, 768]), (1024, &[12288])] {
        let mut product = Product::new(stream, inputs, outputs, 5)?;
        let x = Random::new(6).normals(300 * inputs);
        let together = [Rounding::Split, Rounding::Bf16, Rounding::Whole]
            .map(|rounding| (rounding, product.run(stream, rounding, &x)));
        let cases = [
            (0usize, 1usize),
            (69, 1),
            (3, 8),
            (11, 13),
            (30, 33),
            (0, 64),
            (60, 100),
            (137, 129),
            (17, 270),
        ];
        for ((rounding, together), (first, rows)) in
            together.iter().flat_map(|all| cases.map(|case| (all, case)))
        {
            let together = together.as_ref().map_err(Clone::clone)?;
            let alone = product.run(stream, *rounding, &x[first * inputs..(first + rows) * inputs])?;
            for ((alone, together), &out) in alone.iter().zip(together).zip(outputs) {
                if bits(alone) != bits(&together[first * out..(first + rows) * out]) {
                    return Err(format!("{inputs} -> {outputs:?}: rows {first}..{} differ", first + rows));
                }
            }
        }
    }
    Ok(())
}

fn nonfinite(stream: &Arc<CudaStream>) -> Result<(), String> {
    let inputs = 512;
    let mut product = Product::new(stream, inputs, &[200], 7)?;
    let mut x = Random::new(8).normals(20 * inputs);
    let rules = [Rounding::Split, Rounding::Bf16, Rounding::Whole];
    for (value, rounding) in
        [f32::NAN, f32::INFINITY, f32::NEG_INFINITY].iter().flat_map(|&value| rules.map(|rule| (value, rule)))
    {
        x[5 * inputs + 300] = 1.0;
        let clean = product.run(stream, rounding, &x)?;
        x[5 * inputs + 300] = value;
        let got = product.run(stream, rounding, &x)?;
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

fn rows_by_index(stream: &Arc<CudaStream>) -> Result<(), String> {
    let inputs = 260;
    let product = Product::new(stream, inputs, &[37, 16], 9)?;
    let ids = [0u32, 36, 37, 52, 8, 7, 40];
    let on_device = stream.clone_htod(&ids).map_err(text)?;
    let mut y = stream.clone_htod(&vec![f32::NAN; ids.len() * inputs]).map_err(text)?;
    lookup(stream, &product.on_device, on_device.as_view(), 52, y.as_view_mut()).map_err(text)?;
    let y = stream.clone_dtoh(&y).map_err(text)?;
    for (&id, got) in ids.iter().zip(y.chunks(inputs)) {
        let id = id as usize;
        let (part, row) = if id < 37 { (0, id) } else { (1, id - 37) };
        let expected: Vec<f32> =
            product.values[part][row * inputs..][..inputs].iter().map(|w| w.to_f32()).collect();
        if got != expected {
            return Err(format!("row {id} differs"));
        }
    }
    Ok(())
}

fn random_weights(stream: &Arc<CudaStream>) -> Result<(), String> {
    let (inputs, outputs) = (260, [37, 16]);
    let shape = WeightShape::new(inputs, &outputs).map_err(text)?;
    let weight = WeightOnDevice::random(stream, shape, 77, 0.02).map_err(text)?;
    let ids: Vec<u32> = (0..53).collect();
    let on_device = stream.clone_htod(&ids).map_err(text)?;
    let mut y = stream.clone_htod(&vec![f32::NAN; ids.len() * inputs]).map_err(text)?;
    lookup(stream, &weight, on_device.as_view(), 52, y.as_view_mut()).map_err(text)?;
    let expected = random::weights(inputs, &outputs, 77, 0.02).concat();
    let expected: Vec<f32> = expected.iter().map(|w| w.to_f32()).collect();
    match stream.clone_dtoh(&y).map_err(text)? == expected {
        true => Ok(()),
        false => Err("the device's weights differ from the CPU's".into()),
    }
}

fn refusals(stream: &Arc<CudaStream>) -> Result<(), String> {
    let mut product = Product::new(stream, 128, &[16], 1)?;
    let x = stream.alloc_zeros::<f32>(130).map_err(text)?;
    let mut scratch = stream.alloc_zeros::<f32>(1).map_err(text)?;
    let mut y = stream.alloc_zeros::<f32>(32).map_err(text)?;
    let wrong = forward(
        stream,
        &mut product.on_device,
        Rounding::Split,
        x.as_view(),
        &mut scratch,
        &[0],
        y.as_view_mut(),
    );
    named(wrong, "x")?;
    let wrong = forward(
        stream,
        &mut product.on_device,
        Rounding::Split,
        x.slice(..128),
        &mut scratch,
        &[20],
        y.as_view_mut(),
    );
    named(wrong, "starts")?;
    named(WeightShape::new(6, &[16]), "inputs")?;
    named(WeightShape::new(8, &[]), "parts")
}

fn named<T>(result: canopy_kernels::Result<T>, argument: &str) -> Result<(), String> {
    match result {
        Err(error) if error.to_string().contains(argument) => Ok(()),
        Err(error) => Err(format!("expected an error that names {argument}, got: {error}")),
        Ok(_) => Err(format!("expected an error that names {argument}, got a result")),
    }
}
