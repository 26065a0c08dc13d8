//! accept_walk and drafted_tokens.

use super::Kernel;
use super::buffers::{Gpu, Guarded};
use crate::Result;
use crate::accept_walk::launch::{self, Buffers};
use crate::accept_walk::row_words;
use crate::contract::Gate::{self, Nonfinite, Repeat, Shapes};
use crate::contract::bound::Bound;
use crate::contract::scene::Scene;
use crate::contract::subjects::walk::{CANDIDATES, Words, drafted, read};
use crate::cuda::{DeviceList, Words as Lists};
use crate::{Error, drafted_tokens};

const WALK: &[(Gate, &str)] =
    &[(Nonfinite, "swallow"), (Repeat, "touched"), (Shapes, "off_by_one"), (Shapes, "missed_node")];

const TOKENS: &[(Gate, &str)] = &[(Repeat, "touched"), (Shapes, "off_by_one")];

type Run = fn(&Gpu, &Scene, &mut [f32]) -> Result<()>;

pub(super) fn kernels(gpu: &Gpu) -> Vec<Kernel> {
    let kernel = |name: &str, call: Run| Kernel::new(gpu, name, name, Bound::Element(0.0), call);
    vec![
        kernel("accept_walk", walk).planted("accept_walk/", WALK),
        kernel("drafted_tokens", tokens).planted("drafted_tokens/", TOKENS),
    ]
}

fn walk(gpu: &Gpu, scene: &Scene, out: &mut [f32]) -> Result<()> {
    let of = Words::new(scene);
    let (trees, rows) = (scene.batch.sequences(), scene.batch.rows());
    let parents = Guarded::<i32>::exactly(gpu, "parents", &of.parents)?;
    let tokens = Guarded::<u32>::exactly(gpu, "tokens", &of.tokens)?;
    let cu_nodes = Guarded::<i32>::exactly(gpu, "cu_nodes", scene.batch.cu_nodes())?;
    let best = Guarded::<u32>::exactly(gpu, "best", &of.best)?;
    let mut words = Guarded::<u32>::output(gpu, "words", trees * row_words(of.most))?;
    let mut packed = Guarded::<i32>::output(gpu, "rows", rows)?;
    let mut cu_rows = Guarded::<i32>::output(gpu, "cu_rows", trees + 1)?;
    let buffers = Buffers {
        parents: parents.view(),
        tokens: tokens.view(),
        cu_nodes: cu_nodes.view(),
        best: best.view(),
        stated: None,
        words: words.view_mut(),
        rows: packed.view_mut(),
        cu_rows: cu_rows.view_mut(),
    };
    launch::forward(&gpu.0, scene.batch.cu_nodes(), of.most, buffers)?;
    for input in [parents.untouched(gpu), tokens.untouched(gpu), cu_nodes.untouched(gpu), best.untouched(gpu)]
    {
        input?;
    }
    let (words, packed, cu_rows) = (words.values(gpu)?, packed.values(gpu)?, cu_rows.values(gpu)?);
    read(scene, of.most, (&words, &packed, &cu_rows), out)
}

/// The list that is filled lies between two others, which stay.
fn tokens(gpu: &Gpu, scene: &Scene, out: &mut [f32]) -> Result<()> {
    let (best, sources) = drafted(scene);
    let best = Guarded::<u32>::exactly(gpu, "best", &best)?;
    let mut lists = Lists::default();
    let of_sources = lists.push(sources.iter().copied(), sources.len());
    let of_tokens = lists.push(vec![u32::MAX; out.len()], out.len());
    lists.push([u32::MAX; 4], 4);
    let upload = lists.upload(&gpu.0)?;
    let on_device = DeviceList::new(&upload, of_sources);
    let list = DeviceList::new(&upload, of_tokens.clone());
    drafted_tokens::launch::forward(&gpu.0, CANDIDATES, &best.view(), (&sources, &on_device), &list)?;
    best.untouched(gpu)?;
    let words = gpu.down(&upload)?;
    let around = |at: &usize| !of_tokens.contains(at) && words[*at] != lists.as_slice()[*at];
    if let Some(at) = (0..words.len()).find(around) {
        let (expected, got) = ("the tokens alone written".into(), format!("word {at} too"));
        return Err(Error::Value { op: "contract", arg: "tokens", expected, got });
    }
    out.iter_mut().zip(&words[of_tokens]).for_each(|(out, &word)| *out = f32::from_bits(word));
    Ok(())
}
