//! The four gates that a CPU can run. Each returns what it covered, or the first thing wrong.

use super::fault::{self, Fault};
use super::scene::{Scene, Shape};
use super::subjects::Subject;

/// A gate's function.
pub(super) type Check = fn(&dyn Subject, Option<Fault>) -> Result<String, String>;

/// Bits of a NaN that no arithmetic makes: what outputs hold before a run.
pub(super) const POISON: u32 = 0x7fc5_a5a5;
/// Elements around an output that must keep their bits.
const GUARD: usize = 64;

fn run(subject: &dyn Subject, scene: &Scene, fault: Option<Fault>, index: usize) -> Result<Vec<f32>, String> {
    let len = subject.out_len(scene);
    let mut buffer = vec![f32::from_bits(POISON); len + 2 * GUARD];
    fault::run(subject, scene, fault, index, &mut buffer, GUARD..GUARD + len)
        .map_err(|error| error.to_string())?;
    let poisoned = |x: &f32| x.to_bits() == POISON;
    if !buffer[..GUARD].iter().chain(&buffer[GUARD + len..]).all(poisoned) {
        return Err("wrote outside its output".into());
    }
    let out = buffer[GUARD..GUARD + len].to_vec();
    match out.iter().position(poisoned) {
        Some(at) => Err(format!("output {at} of {len} never written")),
        None => Ok(out),
    }
}

/// Largest error, absolute up to 1 and relative above, when the bound holds everywhere.
fn compare(bound: f64, got: &[f32], expected: &[f64]) -> Result<f64, String> {
    if got.len() != expected.len() {
        return Err(format!("{} outputs, expected {}", got.len(), expected.len()));
    }
    let mut worst = 0f64;
    for (at, (&got, &expected)) in got.iter().zip(expected).enumerate() {
        let error = (f64::from(got) - expected).abs() / expected.abs().max(1.0);
        if error.is_nan() || error > bound {
            return Err(format!("output {at} is {got:e}, float64 {expected:e}"));
        }
        worst = worst.max(error);
    }
    Ok(worst)
}

fn bits(values: &[f32]) -> Vec<u32> {
    values.iter().map(|x| x.to_bits()).collect()
}

pub(super) fn nonfinite(subject: &dyn Subject, fault: Option<Fault>) -> Result<String, String> {
    let shape = Shape { nodes: vec![9, 5], chain: false, context: 4, wide: false };
    let clean = subject.scene(&shape).map_err(|error| error.to_string())?;
    let untouched = run(subject, &clean, fault, 0)?;
    let expected = subject.oracle(&clean);
    let mut planted = 0;
    for (input, buffer) in clean.inputs.iter().enumerate() {
        let len = buffer.values.len();
        for at in [0, len / 5, len / 2, 3 * len / 4, len - 1] {
            for value in [f32::NAN, f32::INFINITY, f32::NEG_INFINITY] {
                let mut scene = clean.clone();
                scene.inputs[input].values[at] = value;
                let got = run(subject, &scene, fault, 0)?;
                let truth = subject.oracle(&scene);
                judge(subject, &clean, (&got, &truth), (&untouched, &expected))
                    .map_err(|error| format!("{value} in {}[{at}]: {error}", buffer.name))?;
                planted += 1;
            }
        }
    }
    Ok(format!("{planted} plants"))
}

/// The run with a plant against float64, and against the run without it where float64 did not change.
fn judge(
    subject: &dyn Subject,
    scene: &Scene,
    (got, truth): (&[f32], &[f64]),
    (untouched, expected): (&[f32], &[f64]),
) -> Result<(), String> {
    for (out, (&got, &truth)) in got.iter().zip(truth).enumerate() {
        let near = !truth.is_finite() || compare(subject.bound(), &[got], &[truth]).is_ok();
        if !near || !same_class(got, truth, subject.exact_classes()) {
            return Err(format!("output {out} is {got:e}, float64 {truth:e}"));
        }
    }
    let group = subject.group(scene);
    for start in (0..got.len()).step_by(group) {
        let range = start..(start + group).min(got.len());
        let reached = truth[range.clone()] != expected[range.clone()];
        if !reached && bits(&got[range.clone()]) != bits(&untouched[range.clone()]) {
            return Err(format!("outputs {range:?} changed, though float64's did not"));
        }
    }
    Ok(())
}

/// Finite where float64 is; where it is not, equally not a number or infinite if the formula fixes which.
fn same_class(got: f32, truth: f64, exact: bool) -> bool {
    match truth.is_finite() {
        true => got.is_finite(),
        false if exact && truth.is_nan() => got.is_nan(),
        false if exact => f64::from(got) == truth,
        false => !got.is_finite(),
    }
}

pub(super) fn repeat(subject: &dyn Subject, fault: Option<Fault>) -> Result<String, String> {
    let shape = Shape { nodes: vec![17, 1, 40], chain: false, context: 6, wide: false };
    let scene = subject.scene(&shape).map_err(|error| error.to_string())?;
    let before = scene.clone();
    let first = bits(&run(subject, &scene, fault, 0)?);
    for index in 1..5 {
        if bits(&run(subject, &scene, fault, index)?) != first {
            return Err(format!("run {index} differs from run 0"));
        }
    }
    for (input, before) in scene.inputs.iter().zip(&before.inputs) {
        if bits(&input.values) != bits(&before.values) {
            return Err(format!("input {} changed", before.name));
        }
    }
    Ok("5 runs".into())
}

/// Every tile edge alone, contexts around the key groups, batches of 1 to 16 ragged trees, the served widths.
fn shapes_to_run() -> Vec<Shape> {
    let edges = (1..=33).chain([63, 64, 65, 127, 128, 129, 255, 256]);
    let mut shapes = edges.clone().map(Shape::tree).collect::<Vec<_>>();
    shapes.extend(edges.map(|nodes| Shape { chain: true, ..Shape::tree(nodes) }));
    let contexts = [0, 1, 7, 8, 9, 15, 16, 17, 31, 32, 33, 63, 64, 65, 127, 128, 129];
    shapes.extend(contexts.map(|context| Shape { context, ..Shape::tree(12) }));
    shapes.extend((1..=16).map(|batch| {
        let nodes = (0..batch).map(|b| 1 + b * 7 % 23).collect();
        Shape { nodes, ..Shape::tree(1) }
    }));
    shapes.extend([1, 16, 33].map(|nodes| Shape { wide: true, ..Shape::tree(nodes) }));
    shapes
}

pub(super) fn shapes(subject: &dyn Subject, fault: Option<Fault>) -> Result<String, String> {
    let shapes = shapes_to_run();
    let (count, mut worst) = (shapes.len(), 0f64);
    for shape in shapes {
        let scene = subject.scene(&shape).map_err(|error| error.to_string())?;
        let out = run(subject, &scene, fault, 0).map_err(|error| format!("{shape:?}: {error}"))?;
        let error = compare(subject.bound(), &out, &subject.oracle(&scene))
            .map_err(|error| format!("{shape:?}: {error}"))?;
        worst = worst.max(error);
    }
    match crate::DraftTree::chain(crate::DraftTree::MAX_NODES + 1) {
        Err(crate::Error::TooManyNodes { .. }) => {
            Ok(format!("{count} shapes, worst {worst:.1e}, 257 nodes refused"))
        }
        _ => Err("a tree of 257 nodes was not refused".into()),
    }
}

pub(super) fn sums(subject: &dyn Subject, fault: Option<Fault>) -> Result<String, String> {
    let scene = subject.sums().ok_or("no sum to test")?.map_err(|error| error.to_string())?;
    let out = run(subject, &scene, fault, 0)?;
    let worst = compare(subject.sums_bound(), &out, &subject.oracle(&scene))?;
    Ok(format!("worst {worst:.1e}"))
}
