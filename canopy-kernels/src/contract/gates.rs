//! The gates that run a kernel. Each returns what it covered, or the first thing wrong.

use std::collections::HashMap;
use std::sync::{Arc, Mutex, OnceLock};

use rayon::prelude::*;

use super::bound::{Bound, finite};
use super::fault::{self, Control, NONE};
use super::scene::{Scene, Shape};
use super::subjects::Subject;

/// A gate's function.
pub(super) type Check = fn(&dyn Subject, Option<Control>) -> Result<String, String>;

/// Bits of a NaN that no arithmetic makes: what outputs hold before a run.
pub(super) const POISON: u32 = 0x7fc5_a5a5;
/// Elements around an output that must keep their bits.
const GUARD: usize = 64;

fn text(error: crate::Error) -> String {
    error.to_string()
}

fn run(
    subject: &dyn Subject,
    scene: &Scene,
    control: Option<Control>,
    index: usize,
) -> Result<Vec<f32>, String> {
    let len = subject.out_len(scene);
    let mut buffer = vec![f32::from_bits(POISON); len + 2 * GUARD];
    fault::run(subject, scene, control, index, &mut buffer, GUARD..GUARD + len).map_err(text)?;
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

/// Float64's outputs, and the sizes of their terms where the bound asks for them.
struct Truth {
    out: Vec<f64>,
    sizes: Vec<f64>,
}

impl Truth {
    fn new(subject: &dyn Subject, scene: &Scene) -> Self {
        let needs = subject.bound().needs_sizes();
        Self { out: subject.oracle(scene), sizes: if needs { subject.sizes(scene) } else { Vec::new() } }
    }

    /// The worst error of all planes as a share of the bound.
    fn worst(&self, subject: &dyn Subject, scene: &Scene, bound: Bound, got: &[f32]) -> Result<f64, String> {
        if got.len() != self.out.len() {
            return Err(format!("{} outputs, expected {}", got.len(), self.out.len()));
        }
        let (mut worst, mut at) = (0f64, 0);
        for plane in subject.planes(scene) {
            let range = at..at + plane.len;
            let sizes = self.sizes.get(range.clone()).unwrap_or_default();
            let share = bound
                .worst(&got[range.clone()], &self.out[range.clone()], sizes)
                .map_err(|error| format!("plane {} at {at}: {error}", plane.name))?;
            (worst, at) = (worst.max(share), range.end);
        }
        Ok(worst)
    }
}

fn bits(values: &[f32]) -> Vec<u32> {
    values.iter().map(|x| x.to_bits()).collect()
}

pub(super) fn nonfinite(subject: &dyn Subject, control: Option<Control>) -> Result<String, String> {
    let shape = Shape { nodes: vec![9, 5], chain: false, context: 4, ..Shape::tree(1) };
    let clean = subject.scene(&shape).map_err(text)?;
    let untouched = run(subject, &clean, control, 0)?;
    let expected = Truth::new(subject, &clean);
    let mut plants = Vec::new();
    for (input, buffer) in clean.inputs.iter().enumerate() {
        let len = buffer.values.len();
        for at in [0, len / 5, len / 2, 3 * len / 4, len - 1] {
            plants.extend([f32::NAN, f32::INFINITY, f32::NEG_INFINITY].map(|value| (input, at, value)));
        }
    }
    let truths = plants.par_iter().map(|&(input, at, value)| {
        let mut scene = clean.clone();
        scene.inputs[input].values[at] = value;
        let truth = Truth::new(subject, &scene);
        (scene, truth)
    });
    for ((scene, truth), (input, at, value)) in truths.collect::<Vec<_>>().iter().zip(&plants) {
        let got = run(subject, scene, control, 0)?;
        judge(subject, scene, (&got, truth), (&untouched, &expected))
            .map_err(|error| format!("{value} in {}[{at}]: {error}", clean.inputs[*input].name))?;
    }
    Ok(format!("{} plants", plants.len()))
}

/// The run with a plant against float64, and against the run without it where float64 did not change.
fn judge(
    subject: &dyn Subject,
    scene: &Scene,
    (got, truth): (&[f32], &Truth),
    (untouched, expected): (&[f32], &Truth),
) -> Result<(), String> {
    for (out, (&got, &truth)) in got.iter().zip(&truth.out).enumerate() {
        if !same_class(got, truth, subject.exact_classes()) {
            return Err(format!("output {out} is {got:e}, float64 {truth:e}"));
        }
    }
    truth.worst(subject, scene, subject.bound(), got)?;
    let group = subject.group(scene);
    for start in (0..got.len()).step_by(group) {
        let range = start..(start + group).min(got.len());
        let reached = truth.out[range.clone()] != expected.out[range.clone()];
        if !reached && bits(&got[range.clone()]) != bits(&untouched[range.clone()]) {
            return Err(format!("outputs {range:?} changed, though float64's did not"));
        }
    }
    Ok(())
}

/// Finite where float64 is; where it is not, equally not a number or infinite if the formula fixes which.
fn same_class(got: f32, truth: f64, exact: bool) -> bool {
    match finite(truth) {
        true => got.is_finite(),
        false if exact && truth.is_nan() => got.is_nan(),
        false if exact => got == truth as f32,
        false => !got.is_finite(),
    }
}

pub(super) fn repeat(subject: &dyn Subject, control: Option<Control>) -> Result<String, String> {
    let shape = Shape { nodes: vec![17, 1, 40], context: 6, ..Shape::tree(1) };
    let scene = subject.scene(&shape).map_err(text)?;
    let before = scene.clone();
    let first = bits(&run(subject, &scene, control, 0)?);
    for index in 1..5 {
        if bits(&run(subject, &scene, control, index)?) != first {
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

/// Every tile edge alone, contexts around the key groups, batches of 1 to 16 ragged trees, the served widths, inputs that are hard.
fn shapes_to_run() -> Vec<Shape> {
    let edges = (1..=33).chain([63, 64, 65, 127, 128, 129, 255, 256]);
    let mut shapes = edges.clone().map(Shape::tree).collect::<Vec<_>>();
    shapes.extend(edges.map(Shape::chain));
    let contexts = [0, 1, 7, 8, 9, 15, 16, 17, 31, 32, 33, 63, 64, 65, 127, 128, 129];
    shapes.extend(contexts.map(|context| Shape { context, ..Shape::tree(12) }));
    shapes.extend((1..=16).map(|batch| Shape { nodes: ragged(batch), ..Shape::tree(1) }));
    shapes.extend([1, 16, 33].map(|nodes| Shape { wide: true, ..Shape::tree(nodes) }));
    shapes.extend([16, 24, 32, 64, 128].map(|nodes| Shape { hard: true, ..Shape::chain(nodes) }));
    shapes.extend([64, 128].map(|nodes| Shape { hard: true, ..Shape::tree(nodes) }));
    shapes
}

fn ragged(batch: usize) -> Vec<usize> {
    (0..batch).map(|b| 1 + b * 7 % 23).collect()
}

/// A few shapes, within what the controls' images are built for.
fn shapes_of_controls() -> Vec<Shape> {
    let mut shapes = vec![Shape::tree(33), Shape::tree(64), Shape::chain(20)];
    shapes.push(Shape { context: 300, ..Shape::tree(12) });
    shapes.push(Shape { context: 129, nodes: ragged(5), ..Shape::tree(1) });
    shapes.push(Shape { hard: true, ..Shape::tree(17) });
    shapes
}

type Case = Arc<(Scene, Truth)>;

/// Scenes and truths of some shapes, on all threads; subjects of one family share them.
fn cases(subject: &dyn Subject, shapes: &[Shape]) -> Result<Vec<Case>, String> {
    static KNOWN: OnceLock<Mutex<HashMap<(String, Shape), Case>>> = OnceLock::new();
    let known = || KNOWN.get_or_init(Mutex::default).lock().expect("no holder of this lock panics");
    let case = |shape: &Shape| {
        let key = (subject.family(), shape.clone());
        if let Some(case) = known().get(&key) {
            return Ok(case.clone());
        }
        let scene = subject.scene(shape).map_err(text)?;
        let truth = Truth::new(subject, &scene);
        let case = Case::new((scene, truth));
        known().insert(key, case.clone());
        Ok(case)
    };
    shapes.par_iter().map(case).collect()
}

pub(super) fn shapes(subject: &dyn Subject, control: Option<Control>) -> Result<String, String> {
    let shapes = match control {
        Some(Control::Inside(_)) => [shapes_of_controls(), subject.control_shapes()].concat(),
        _ => [shapes_to_run(), subject.more_shapes()].concat(),
    };
    let (lost, shapes): (Vec<_>, Vec<_>) = shapes.into_iter().partition(|shape| subject.loses(shape));
    let (refused, shapes): (Vec<_>, Vec<_>) = shapes.into_iter().partition(|shape| subject.refuses(shape));
    for shape in &refused {
        let scene = subject.scene(shape).map_err(text)?;
        if run(subject, &scene, control, 0).is_ok() {
            return Err(format!("{shape:?}: was not refused"));
        }
    }
    let mut worst = 0f64;
    for (shape, case) in shapes.iter().zip(cases(subject, &shapes)?) {
        let (scene, truth) = &*case;
        let share = run(subject, scene, control, 0)
            .and_then(|out| truth.worst(subject, scene, subject.bound(), &out))
            .map_err(|error| format!("{shape:?}: {error}"))?;
        worst = worst.max(share);
    }
    match crate::DraftTree::chain(crate::DraftTree::MAX_NODES + 1) {
        Err(crate::Error::TooManyNodes { .. }) => {
            let refused =
                if refused.is_empty() { String::new() } else { format!("{} shapes and ", refused.len()) };
            let lost = match lost.len() {
                0 => String::new(),
                lost => format!(", {lost} shapes of nearly equal keys left out"),
            };
            Ok(format!(
                "{} shapes, worst {worst:.3} of the bound, {refused}257 nodes refused{lost}",
                shapes.len()
            ))
        }
        _ => Err("a tree of 257 nodes was not refused".into()),
    }
}

pub(super) fn sums(subject: &dyn Subject, control: Option<Control>) -> Result<String, String> {
    let shape = subject.sums().ok_or("no sum to test")?;
    let mut scene = subject.scene(&shape).map_err(text)?;
    subject.fill_sums(&mut scene);
    let out = run(subject, &scene, control, 0)?;
    let worst = Truth::new(subject, &scene).worst(subject, &scene, subject.sums_bound(), &out)?;
    Ok(format!("worst {worst:.3} of the bound"))
}

/// A sequence's bits alone in slot 0, in batches of 2 to 16 and in every variant that may be picked instead.
pub(super) fn invariant(subject: &dyn Subject, control: Option<Control>) -> Result<String, String> {
    // an inside fault is in the kernel that batches take, as a variant of its own would have it
    let sound = match control {
        Some(Control::Inside(_)) => Some(Control::Inside(NONE)),
        other => other,
    };
    let all = subject.scene(&Shape { nodes: ragged(16), context: 6, ..Shape::tree(1) }).map_err(text)?;
    let order: Vec<usize> = (0..16).map(|i| (5 * i + 3) % 16).collect();
    let mut alone = HashMap::new();
    for &b in &order {
        let scene = all.some(&[b]).map_err(text)?;
        let out = run(subject, &scene, sound, 0)?;
        alone.insert(b, (scene, out));
    }
    for count in 2..=16 {
        let scene = all.some(&order[..count]).map_err(text)?;
        let out = run(subject, &scene, control, 0)?;
        for (place, b) in order[..count].iter().enumerate() {
            let (own, expected) = &alone[b];
            let (got, expected) = (part(subject, &scene, &out, place), part(subject, own, expected, 0));
            if let Some(at) = got.iter().zip(&expected).position(|(got, expected)| got != expected) {
                return Err(format!(
                    "sequence {b} in a batch of {count}: element {at} has other bits than alone"
                ));
            }
        }
    }
    let variants = if control.is_none() { subject.variants() } else { Vec::new() };
    let scene = all.some(&order).map_err(text)?;
    let expected = bits(&run(subject, &scene, control, 0)?);
    for variant in &variants {
        if bits(&run(&**variant, &scene, None, 0)?) != expected {
            return Err(format!("{} has other bits", variant.name()));
        }
    }
    let mut covered = "alone, batches of 2 to 16".to_string();
    let own = subject.name();
    for variant in &variants {
        let name = variant.name();
        covered.push_str(&format!("; {}", name.trim_start_matches(&own).trim_start_matches(", ")));
    }
    Ok(covered)
}

/// The bits of one sequence's part of every plane.
fn part(subject: &dyn Subject, scene: &Scene, out: &[f32], b: usize) -> Vec<u32> {
    let (mut part, mut at) = (Vec::new(), 0);
    for plane in subject.planes(scene) {
        let own = scene.own(plane.axis, plane.len, b);
        part.extend(bits(&out[at..at + plane.len][own]));
        at += plane.len;
    }
    part
}
