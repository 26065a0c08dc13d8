//! Named tensors in, named tensors out, with errors that name the tensor.

use std::cell::RefCell;
use std::collections::{BTreeMap, BTreeSet, HashMap};
use std::path::Path;

use anyhow::{Context, Result, anyhow, bail};
use candle_core::{DType, Device, Tensor};
use canopy_candle::{AcceptedPaths, DraftTree, Sequences, TreeBatch};

/// The tensors of one input file.
pub struct Inputs {
    room: &'static str,
    tensors: BTreeMap<String, Tensor>,
    device: Device,
    asked: RefCell<BTreeSet<&'static str>>,
}

impl Inputs {
    /// Reads a whole file; float tensors go to `device`.
    pub fn read(room: &'static str, path: &Path, device: Device) -> Result<Self> {
        let tensors = candle_core::safetensors::load(path, &Device::Cpu)
            .with_context(|| format!("{room}: input {}", path.display()))?;
        Ok(Self { room, tensors: tensors.into_iter().collect(), device, asked: RefCell::default() })
    }

    /// Where the op runs.
    pub fn device(&self) -> &Device {
        &self.device
    }

    /// A float tensor of the rank that `shape` spells, as in `[N, 2, Hv]`.
    pub fn float(&self, name: &'static str, shape: &str) -> Result<Tensor> {
        let tensor = self.find(name).ok_or_else(|| self.missing(name, "F32, BF16 or F16", shape))?;
        let float = matches!(tensor.dtype(), DType::F32 | DType::BF16 | DType::F16);
        if !float || tensor.rank() != shape.split(',').count() {
            return Err(self.wrong(name, "F32, BF16 or F16", shape, tensor));
        }
        Ok(tensor.to_device(&self.device)?)
    }

    /// A list of integers.
    pub fn ints(&self, name: &'static str, shape: &str) -> Result<Vec<i32>> {
        self.optional_ints(name, shape)?.ok_or_else(|| self.missing(name, "I32", shape))
    }

    /// A list of integers that may be absent.
    pub fn optional_ints(&self, name: &'static str, shape: &str) -> Result<Option<Vec<i32>>> {
        let Some(tensor) = self.find(name) else { return Ok(None) };
        if tensor.rank() != 1 {
            return Err(self.wrong(name, "I32", shape, tensor));
        }
        let wide: Vec<i64> = match tensor.dtype() {
            DType::I32 => tensor.to_vec1::<i32>()?.into_iter().map(i64::from).collect(),
            DType::U32 => tensor.to_vec1::<u32>()?.into_iter().map(i64::from).collect(),
            DType::U8 => tensor.to_vec1::<u8>()?.into_iter().map(i64::from).collect(),
            DType::I64 => tensor.to_vec1::<i64>()?,
            _ => return Err(self.wrong(name, "I32", shape, tensor)),
        };
        let narrow = |value: i64| {
            i32::try_from(value)
                .map_err(|_| anyhow!("{}: tensor `{name}`, expected: 32-bit values, got: {value}", self.room))
        };
        wide.into_iter().map(narrow).collect::<Result<_>>().map(Some)
    }

    /// The draft trees: `parents`, and `cu_nodes` and `slots` for several.
    pub fn batch(&self) -> Result<TreeBatch> {
        let parents = self.ints("parents", "[N]")?;
        let rows = parents.len();
        let cu_nodes = self.optional_ints("cu_nodes", "[B + 1]")?.unwrap_or_else(|| vec![0, rows as i32]);
        self.check_offsets("cu_nodes", &cu_nodes, rows)?;
        let sequences = cu_nodes.len() - 1;
        let slots = match self.optional_ints("slots", "[B]")? {
            Some(slots) => slots,
            None if sequences == 1 => vec![0],
            None => return Err(self.missing("slots", "I32", &format!("[{sequences}]"))),
        };
        let tree = |(b, ends): (usize, &[i32])| {
            DraftTree::new(parents[ends[0] as usize..ends[1] as usize].to_vec())
                .with_context(|| format!("{}: tensor `parents`, tree {b}", self.room))
        };
        let trees = cu_nodes.windows(2).enumerate().map(tree).collect::<Result<_>>()?;
        TreeBatch::new(trees, slots).with_context(|| format!("{}: tensor `slots`", self.room))
    }

    /// Long chains: one of all rows of `qkv` on slot 0, or `cu_rows` and `slots`.
    pub fn sequences(&self) -> Result<Sequences> {
        let rows = self.float("qkv", "[N, 2 Hk Dk + Hv Dv]")?.dim(0)?;
        let cu_rows = self.optional_ints("cu_rows", "[B + 1]")?.unwrap_or_else(|| vec![0, rows as i32]);
        self.check_offsets("cu_rows", &cu_rows, rows)?;
        let slots = match self.optional_ints("slots", "[B]")? {
            Some(slots) => slots,
            None if cu_rows.len() == 2 => vec![0],
            None => return Err(self.missing("slots", "I32", &format!("[{}]", cu_rows.len() - 1))),
        };
        let lens: Vec<usize> = cu_rows.windows(2).map(|ends| (ends[1] - ends[0]) as usize).collect();
        Sequences::new(&lens, slots).with_context(|| format!("{}: tensors `cu_rows` and `slots`", self.room))
    }

    /// The accepted paths when the file has some: `paths`, and `cu_paths` for several trees.
    pub fn paths(&self, batch: &TreeBatch) -> Result<Option<AcceptedPaths>> {
        let Some(nodes) = self.optional_ints("paths", "[P]")? else { return Ok(None) };
        let cu_paths = match self.optional_ints("cu_paths", "[B + 1]")? {
            Some(cu_paths) => cu_paths,
            None if batch.sequences() == 1 => vec![0, nodes.len() as i32],
            None => return Err(self.missing("cu_paths", "I32", &format!("[{}]", batch.sequences() + 1))),
        };
        self.check_offsets("cu_paths", &cu_paths, nodes.len())?;
        let path = |ends: &[i32]| {
            let nodes = nodes[ends[0] as usize..ends[1] as usize].iter();
            // A negative node is past every tree, so that the path check names it.
            nodes.map(|&node| usize::try_from(node).unwrap_or(usize::MAX)).collect()
        };
        let paths = cu_paths.windows(2).map(path).collect::<Vec<Vec<usize>>>();
        AcceptedPaths::new(batch, &paths).map(Some).with_context(|| format!("{}: tensor `paths`", self.room))
    }

    /// Refuses tensors that the room does not read: a misspelt optional one would change the result in silence.
    pub fn finish(&self) -> Result<()> {
        let asked = self.asked.borrow();
        match self.tensors.keys().find(|name| !asked.contains(name.as_str())) {
            None => Ok(()),
            Some(name) => {
                let inputs = asked.iter().copied().collect::<Vec<_>>().join(", ");
                bail!("{}: tensor `{name}`, expected: one of {inputs}, got: an unknown name", self.room)
            }
        }
    }

    /// The error for a tensor that does not fit.
    pub fn wrong(&self, name: &str, dtype: &str, shape: &str, got: &Tensor) -> anyhow::Error {
        let (room, got_dtype, dims) = (self.room, got.dtype(), got.dims());
        anyhow!("{room}: tensor `{name}`, expected: {dtype} {shape}, got: {got_dtype:?} {dims:?}")
    }

    fn find(&self, name: &'static str) -> Option<&Tensor> {
        self.asked.borrow_mut().insert(name);
        self.tensors.get(name)
    }

    /// The error for a tensor that is not there; it lists what is.
    pub fn missing(&self, name: &str, dtype: &str, shape: &str) -> anyhow::Error {
        let there = self.tensors.iter().map(|(name, tensor)| format!("{name} {:?}", tensor.dims()));
        let there = there.collect::<Vec<_>>().join(", ");
        anyhow!("{}: tensor `{name}`, expected: {dtype} {shape}, got: none (the file has {there})", self.room)
    }

    fn check_offsets(&self, name: &str, offsets: &[i32], end: usize) -> Result<()> {
        if offsets.len() > 1
            && offsets[0] == 0
            && offsets.is_sorted()
            && offsets[offsets.len() - 1] as usize == end
        {
            return Ok(());
        }
        bail!("{}: tensor `{name}`, expected: ascending from 0 to {end}, got: {offsets:?}", self.room)
    }
}

/// Writes the outputs of an op.
pub fn write(path: &Path, outputs: Vec<(&'static str, Tensor)>) -> Result<()> {
    let contiguous = |(name, tensor): (&str, Tensor)| Ok((name.to_string(), tensor.contiguous()?));
    let outputs = outputs.into_iter().map(contiguous).collect::<Result<HashMap<_, _>>>()?;
    canopy_e2e::files::save_tensors(&outputs, path).with_context(|| format!("output {}", path.display()))
}
