//! tree_gdn, fused design with the commit of the round before: the bits of commit and verify one after the other.

use std::sync::Arc;

use canopy_kernels::cuda::{PathsOnDevice, TreeOnDevice};
use canopy_kernels::tree_gdn::{fused, launch, oracle};
use canopy_kernels::{AcceptedPaths, DraftTree, TreeBatch};
use cudarc::driver::{CudaSlice, CudaStream};
use half::bf16;

use crate::Check;
use crate::data::{Case, Hardness, bits, compare, round_bf16, small, text, to_last, wide};

pub const TESTS: &[(&str, Check)] = &[
    ("tree_gdn::fused_commit_has_the_bits_of_commit_then_verify", same_bits),
    ("tree_gdn::fused_commit_equals_the_oracle", against_oracle),
    ("tree_gdn::fused_commit_refuses_other_slots_and_lengths", refused),
];

/// One round's buffers on the device.
struct Round {
    case: Case,
    tree: TreeOnDevice,
    qkv: CudaSlice<bf16>,
    gates: CudaSlice<f32>,
    u: CudaSlice<f32>,
    g_cum: CudaSlice<f32>,
}

impl Round {
    fn new(stream: &Arc<CudaStream>, trees: &[DraftTree], slots: &[i32], seed: u64) -> Result<Self, String> {
        let batch = TreeBatch::new(trees.to_vec(), slots.to_vec()).map_err(text)?;
        let case = Case::new(small(), batch, slots.len(), Hardness::Random, round_bf16, seed);
        let planes = case.batch.rows() * case.dims.v_heads;
        let qkv: Vec<bf16> = case.qkv.iter().map(|&x| bf16::from_f32(x)).collect();
        Ok(Self {
            tree: TreeOnDevice::new(stream, &case.batch).map_err(text)?,
            qkv: stream.clone_htod(&qkv).map_err(text)?,
            gates: stream.clone_htod(&case.gates).map_err(text)?,
            u: stream.clone_htod(&vec![f32::NAN; planes * case.dims.dv]).map_err(text)?,
            g_cum: stream.clone_htod(&vec![f32::NAN; planes]).map_err(text)?,
            case,
        })
    }

    fn o<Out: Clone + fused::Tier>(
        &self,
        stream: &Arc<CudaStream>,
        nan: Out,
    ) -> Result<CudaSlice<Out>, String> {
        stream.clone_htod(&vec![nan; self.u.len()]).map_err(text)
    }

    fn verify<Out: Clone + fused::Tier>(
        &mut self,
        stream: &Arc<CudaStream>,
        columns: usize,
        state: &CudaSlice<f32>,
        nan: Out,
    ) -> Result<Vec<Out>, String> {
        let mut o = self.o(stream, nan)?;
        let buffers = fused::FusedBuffers {
            qkv: self.qkv.as_view(),
            gates: self.gates.as_view(),
            state: state.as_view(),
            o: o.as_view_mut(),
            u: self.u.as_view_mut(),
            g_cum: self.g_cum.as_view_mut(),
        };
        fused::verify(stream, self.case.dims, &self.case.batch, &self.tree, columns, buffers)
            .map_err(text)?;
        stream.clone_dtoh(&o).map_err(text)
    }

    /// Commits `paths` of `last` into `state` and verifies this round from there, in one launch.
    fn after<Out: Clone + fused::Tier>(
        &mut self,
        stream: &Arc<CudaStream>,
        columns: usize,
        (last, paths): (&Round, &AcceptedPaths),
        state: &mut CudaSlice<f32>,
        nan: Out,
    ) -> Result<Vec<Out>, String> {
        let mut o = self.o(stream, nan)?;
        let on_device = PathsOnDevice::new(stream, paths).map_err(text)?;
        let pending = fused::Pending {
            qkv: last.qkv.as_view(),
            gates: last.gates.as_view(),
            u: last.u.as_view(),
            paths,
            on_device: &on_device,
        };
        let buffers = fused::FusedBuffers {
            qkv: self.qkv.as_view(),
            gates: self.gates.as_view(),
            state: state.as_view_mut(),
            o: o.as_view_mut(),
            u: self.u.as_view_mut(),
            g_cum: self.g_cum.as_view_mut(),
        };
        let (dims, batch) = (self.case.dims, &self.case.batch);
        fused::commit_and_verify(stream, dims, batch, &self.tree, columns, pending, buffers).map_err(text)?;
        stream.clone_dtoh(&o).map_err(text)
    }
}

/// The bits of outputs.
type Bits<Out> = fn(&[Out]) -> Vec<u32>;

/// Both ways on the same inputs, with one tier.
fn both<Out: Clone + fused::Tier>(
    stream: &Arc<CudaStream>,
    [first, second]: [&[DraftTree]; 2],
    slots: &[i32],
    columns: usize,
    (nan, to_bits): (Out, Bits<Out>),
) -> Result<(), String> {
    let mut last = Round::new(stream, first, slots, 31)?;
    let mut now = Round::new(stream, second, slots, 32)?;
    let start = stream.clone_htod(&last.case.state).map_err(text)?;
    last.verify(stream, columns, &start, nan.clone())?;
    let mut accepted = to_last(&last.case.batch);
    accepted[0].clear();
    let paths = AcceptedPaths::new(&last.case.batch, &accepted).map_err(text)?;
    let mut apart = stream.clone_dtod(&start).map_err(text)?;
    let on_device = PathsOnDevice::new(stream, &paths).map_err(text)?;
    let tape =
        launch::LayerTape { qkv: last.qkv.as_view(), gates: last.gates.as_view(), u: last.u.as_view() };
    launch::commit(stream, small(), &paths, &on_device, &[tape], &mut apart.as_view_mut()).map_err(text)?;
    for wider in [64, 128] {
        let mut state = stream.clone_dtod(&start).map_err(text)?;
        let tape =
            launch::LayerTape { qkv: last.qkv.as_view(), gates: last.gates.as_view(), u: last.u.as_view() };
        let pool = &mut state.as_view_mut();
        launch::commit_in(stream, small(), &paths, &on_device, &[tape], wider, pool).map_err(text)?;
        let [got, want] = [&state, &apart].map(|pool| stream.clone_dtoh(pool).map(|pool| bits(&pool)));
        if got.map_err(text)? != want.map_err(text)? {
            return Err(format!("the committed state differs in blocks of {wider} columns"));
        }
    }
    let want = now.verify(stream, columns, &apart, nan.clone())?;
    let copy = |x: &CudaSlice<f32>| stream.clone_dtoh(x).map(|x| bits(&x)).map_err(text);
    let tape = [copy(&now.u)?, copy(&now.g_cum)?, copy(&apart)?];
    let mut now = Round::new(stream, second, slots, 32)?;
    let mut together = stream.clone_dtod(&start).map_err(text)?;
    let got = now.after(stream, columns, (&last, &paths), &mut together, nan)?;
    if to_bits(&got) != to_bits(&want) {
        return Err("o differs".into());
    }
    for (name, want, got) in
        [("u", &tape[0], &now.u), ("g_cum", &tape[1], &now.g_cum), ("state", &tape[2], &together)]
    {
        if *want != copy(got)? {
            return Err(format!("{name} differs"));
        }
    }
    Ok(())
}

fn same_bits(stream: &Arc<CudaStream>) -> Result<(), String> {
    let random = |nodes: usize| DraftTree::random(nodes, nodes as u64).map_err(text);
    let long = || DraftTree::chain(100).map_err(text);
    for nodes in [1, 9, 16, 17, 32, 33, 64, 65, 128, 129, 200] {
        let first = [random(7)?, long()?, random(30)?, DraftTree::chain(8).map_err(text)?];
        let second = [random(5)?, random(nodes)?, random(nodes.min(40))?, random(3)?];
        for slots in [[3, 0, 1, 2], [2, 1, -1, 0]] {
            for columns in [32, 128] {
                if columns == 128 && nodes > 128 {
                    continue;
                }
                let name =
                    |tier, e| format!("{nodes} nodes, {columns} columns, slots {slots:?}, tier {tier}: {e}");
                let trees = [&first[..], &second[..]];
                both::<f32>(stream, trees, &slots, columns, (f32::NAN, bits)).map_err(|e| name("A", e))?;
                let to_bits = |x: &[bf16]| x.iter().map(|x| u32::from(x.to_bits())).collect();
                both::<bf16>(stream, trees, &slots, columns, (bf16::NAN, to_bits))
                    .map_err(|e| name("B", e))?;
            }
        }
    }
    Ok(())
}

fn against_oracle(stream: &Arc<CudaStream>) -> Result<(), String> {
    let (first, second) = (DraftTree::random(40, 4).map_err(text)?, DraftTree::bole(60, 2).map_err(text)?);
    let mut last = Round::new(stream, std::slice::from_ref(&first), &[0], 41)?;
    let mut now = Round::new(stream, std::slice::from_ref(&second), &[0], 42)?;
    let mut state = stream.clone_htod(&last.case.state).map_err(text)?;
    last.verify(stream, 32, &state, f32::NAN)?;
    let paths = AcceptedPaths::new(&last.case.batch, &to_last(&last.case.batch)).map_err(text)?;
    let got = now.after(stream, 32, (&last, &paths), &mut state, f32::NAN)?;
    let input = |case: &Case| (wide(&case.qkv), wide(&case.gates));
    let (before, (qkv, gates)) = (wide(&last.case.state), input(&last.case));
    let tape = oracle::OracleInput { qkv: &qkv, gates: &gates, state: &before };
    let committed = oracle::commit(small(), &first, first.len() - 1, tape);
    let (qkv, gates) = input(&now.case);
    let truth =
        oracle::verify(small(), &second, oracle::OracleInput { qkv: &qkv, gates: &gates, state: &committed });
    compare("state", &stream.clone_dtoh(&state).map_err(text)?, &committed)?;
    compare("o", &got, &truth.o)?;
    compare("u", &stream.clone_dtoh(&now.u).map_err(text)?, &truth.u)
}

fn refused(stream: &Arc<CudaStream>) -> Result<(), String> {
    let trees = [DraftTree::chain(3).map_err(text)?, DraftTree::chain(4).map_err(text)?];
    let last = Round::new(stream, &trees, &[0, 1], 1)?;
    let mut state = stream.clone_htod(&last.case.state).map_err(text)?;
    let paths = AcceptedPaths::new(&last.case.batch, &to_last(&last.case.batch)).map_err(text)?;
    let mut expect = |what: &str, mut now: Round, last: &Round, columns| match now.after(
        stream,
        columns,
        (last, &paths),
        &mut state,
        f32::NAN,
    ) {
        Err(message) if message.contains(what) => Ok(()),
        Err(message) => Err(format!("the message does not name {what}: {message}")),
        Ok(_) => Err(format!("accepted, though {what} is wrong")),
    };
    expect("paths", Round::new(stream, &trees, &[1, 0], 2)?, &last, 32)?;
    expect("64 value columns", Round::new(stream, &trees, &[0, 1], 2)?, &last, 64)?;
    let short = Round::new(stream, &trees[..1], &[0], 1)?;
    expect("pending qkv", Round::new(stream, &trees, &[0, 1], 2)?, &short, 32)
}
