//! Which CUDA design verifies a batch: a pure function of architecture, output type, batch, nodes and depth, read from a table of
//! measured times (`dispatch.tsv`, written by `canopy-bench dispatch`).

use std::collections::HashMap;
use std::fmt;
use std::str::FromStr;
use std::sync::{Mutex, OnceLock};

use super::Schedule;
use crate::error::{Error, Result};
use crate::{DraftTree, GdnDims};

const OP: &str = "tree-gdn-dispatch";

/// Value heads of the model that the times were measured with.
const MEASURED_HEADS: usize = 32;

/// One way to verify a batch on CUDA.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash)]
pub enum Design {
    /// Two launches, f32 throughout, any rows.
    Split,
    /// One launch, bf16 rows.
    Fused {
        /// Value columns of a block.
        columns: usize,
        /// How the system is walked.
        schedule: Schedule,
    },
    /// One launch, bf16 rows and outputs, dense blocks on tensor cores. Other bits than [`Self::Fused`]'s.
    Blocked {
        /// Value columns of a block.
        columns: usize,
    },
    /// `tree_gdn_serial`'s chain form, any rows.
    Chain {
        /// Value columns of a block.
        columns: usize,
    },
}

impl Design {
    /// The variable that [`Self::from_env`] reads.
    pub const ENV: &'static str = "CANOPY_TREE_GDN_DESIGN";

    /// The design that `CANOPY_TREE_GDN_DESIGN` names, if any.
    ///
    /// # Errors
    /// [`Error::Value`] for a name that is none.
    pub fn from_env() -> Result<Option<Self>> {
        std::env::var(Self::ENV).ok().map(|name| name.parse()).transpose()
    }
}

impl fmt::Display for Design {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        match self {
            Self::Split => f.write_str("split"),
            Self::Fused { columns, schedule: Schedule::Levels } => write!(f, "fused-v{columns}-levels"),
            Self::Fused { columns, schedule: Schedule::Chains } => write!(f, "fused-v{columns}-chains"),
            Self::Blocked { columns } => write!(f, "blocked-v{columns}"),
            Self::Chain { columns } => write!(f, "chain-v{columns}"),
        }
    }
}

impl FromStr for Design {
    type Err = Error;

    fn from_str(name: &str) -> Result<Self> {
        let mut all = vec![Self::Split];
        for columns in [32, 64, 128] {
            all.extend(
                [Schedule::Levels, Schedule::Chains].map(|schedule| Self::Fused { columns, schedule }),
            );
            all.extend([Self::Blocked { columns }, Self::Chain { columns }]);
        }
        all.into_iter().find(|design| design.to_string() == name).ok_or_else(|| Error::Value {
            op: OP,
            arg: "design",
            expected: "split, fused-v32-levels, fused-v32-chains, blocked-v32, chain-v32, or the same with 64 or 128"
                .into(),
            got: format!("{name:?}"),
        })
    }
}

/// The type that `o` is wanted in, which is also the accuracy: f32 for tier A, bf16 for tier B.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash)]
pub enum Dtype {
    /// Tier A.
    F32,
    /// Tier B.
    Bf16,
}

/// Forms of the delta rule whose rows have different bits: which one a tree gets is a matter of its own shape, never of its batch.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash)]
pub enum Form {
    /// Chains, walked row after row ([`walks`]).
    Walk,
    /// One solve, sums along the path.
    Solve,
    /// One solve in dense blocks, bf16 outputs alone ([`blocks`]).
    Blocked,
}

impl Form {
    fn of(design: Design) -> Self {
        match design {
            Design::Chain { .. } => Self::Walk,
            Design::Blocked { .. } => Self::Blocked,
            Design::Split | Design::Fused { .. } => Self::Solve,
        }
    }
}

/// What is to be verified by one launch.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash)]
pub struct Query {
    /// Compute capability, 90 for 9.0.
    pub sm: u32,
    /// Type of `o`.
    pub dtype: Dtype,
    /// Sequences of 32 value heads, the 9B model's; so many heads of other models count as one.
    pub batch: usize,
    /// Most nodes of one tree.
    pub nodes: usize,
    /// Deepest node.
    pub depth: usize,
    /// What all of its trees get.
    pub form: Form,
}

impl Query {
    /// The query of trees that share a launch.
    pub fn new<'a>(
        sm: u32,
        dtype: Dtype,
        dims: GdnDims,
        trees: impl IntoIterator<Item = &'a DraftTree>,
        form: Form,
    ) -> Self {
        let mut query = Self { sm, dtype, batch: 0, nodes: 0, depth: 0, form };
        for tree in trees {
            query.batch += 1;
            query.nodes = query.nodes.max(tree.len());
            query.depth = query.depth.max(tree.max_depth());
        }
        query.batch = (query.batch * dims.v_heads).div_ceil(MEASURED_HEADS);
        query
    }

    /// How far apart two queries are: another architecture first, then factors of batch, nodes and depth.
    fn distance(self, other: Self) -> f64 {
        let factor = |a: usize, b: usize| ((a + 1) as f64 / (b + 1) as f64).ln().abs();
        100.0 * f64::from(self.sm.abs_diff(other.sm))
            + factor(self.batch, other.batch)
            + factor(self.nodes, other.nodes)
            + factor(self.depth, other.depth)
    }
}

/// What [`Design::ENV`] names, read once.
fn named() -> Result<Option<Design>> {
    static NAMED: OnceLock<Result<Option<Design>>> = OnceLock::new();
    NAMED.get_or_init(Design::from_env).clone()
}

/// Whether a tree's f32 outputs come from `tree_gdn_serial`'s chain form, which gives other bits than the solve: a matter of its own shape
/// alone, whatever shares its batch. [`Design::ENV`] decides for all chains when it names a design.
///
/// # Errors
/// [`Error::Value`] when the variable names no design.
pub fn walks(sm: u32, tree: &DraftTree) -> Result<bool> {
    Ok(tree.is_chain()
        && match named()? {
            None => Table::built_in().walks(sm, tree.len()),
            Some(design) => matches!(design, Design::Chain { .. }),
        })
}

/// Whether a tree's bf16 outputs come from the blocked design, which gives other bits than the fused one: a matter of its own shape alone.
/// [`Design::ENV`] decides for all trees when it names a design.
///
/// # Errors
/// [`Error::Value`] when the variable names no design.
pub fn blocks(sm: u32, tree: &DraftTree) -> Result<bool> {
    Ok(match named()? {
        None => Table::built_in().blocks(sm, tree.len(), tree.max_depth()),
        Some(design) => matches!(design, Design::Blocked { .. }),
    })
}

/// The design for a query: what [`Design::ENV`] names where it fits, else the built-in table's choice, remembered for every layer and round
/// that asks again. Its bits do not depend on the batch.
///
/// # Errors
/// [`Error::Value`] when the variable names no design.
pub fn design(query: Query) -> Result<Design> {
    static CHOSEN: OnceLock<Mutex<HashMap<Query, Design>>> = OnceLock::new();
    match named()? {
        Some(design) if Form::of(design) == query.form => return Ok(design),
        _ => {}
    }
    let mut chosen = CHOSEN.get_or_init(Mutex::default).lock().expect("no holder of this lock panics");
    Ok(*chosen.entry(query).or_insert_with(|| Table::built_in().choose(query)))
}

/// One measured time.
#[derive(Clone, Copy, Debug, PartialEq)]
struct Row {
    at: Query,
    design: Design,
    us: f64,
}

/// Measured times, and the choice from them.
#[derive(Clone, Debug, PartialEq)]
pub struct Table(Vec<Row>);

impl Table {
    /// First line of a table.
    pub const HEADER: &'static str = "sm\tdtype\tbatch\tnodes\tdepth\tdesign\tus";

    /// The table of this build.
    pub fn built_in() -> &'static Self {
        static TABLE: OnceLock<Table> = OnceLock::new();
        TABLE.get_or_init(|| Self::parse(include_str!("dispatch.tsv")).unwrap_or(Self(Vec::new())))
    }

    /// Reads a table: [`Self::HEADER`], then a tab-separated line a measured time.
    ///
    /// # Errors
    /// [`Error::Value`] naming the line.
    pub fn parse(text: &str) -> Result<Self> {
        let bad = |line: usize, got: &str| {
            let expected = Self::HEADER.replace('\t', ", ");
            Error::Value { op: OP, arg: "table", expected, got: format!("line {line}: {got:?}") }
        };
        let mut lines = text.lines().enumerate();
        match lines.next() {
            Some((_, Self::HEADER)) => {}
            other => return Err(bad(1, other.map_or("", |(_, line)| line))),
        }
        lines
            .map(|(at, line)| Row::parse(line).ok_or_else(|| bad(at + 1, line)))
            .collect::<Result<_>>()
            .map(Self)
    }

    /// Whether the measured chain of about so many nodes, alone in its batch, is faster walked than solved.
    pub fn walks(&self, sm: u32, nodes: usize) -> bool {
        let depth = nodes.saturating_sub(1);
        self.is_faster(Form::Walk, Query { sm, dtype: Dtype::F32, batch: 1, nodes, depth, form: Form::Solve })
    }

    /// Whether the measured tree of about this size, alone in its batch, has its bf16 outputs faster in dense blocks.
    pub fn blocks(&self, sm: u32, nodes: usize, depth: usize) -> bool {
        self.is_faster(
            Form::Blocked,
            Query { sm, dtype: Dtype::Bf16, batch: 1, nodes, depth, form: Form::Solve },
        )
    }

    /// Whether `form` is faster than the query's: at the nearest point that has it, unless the other's nearest is another one.
    fn is_faster(&self, form: Form, query: Query) -> bool {
        let Some(row) = self.best(Query { form, ..query }) else { return false };
        let distance = |a: Query, b: Query| a.distance(Query { form: a.form, ..b });
        self.best(query).is_none_or(|other| distance(row.at, other.at) > 0.0 || row.us < other.us)
    }

    /// The fastest design of the query's form at the measured point that lies nearest; [`Design::Split`] where the table has none.
    pub fn choose(&self, query: Query) -> Design {
        self.best(query).map_or(Design::Split, |row| row.design)
    }

    fn best(&self, query: Query) -> Option<&Row> {
        let fits = |row: &&Row| row.at.dtype == query.dtype && row.at.form == query.form;
        let rank = |row: &Row| (row.at.distance(query), row.us);
        self.0.iter().filter(fits).min_by(|a, b| {
            let (a, b) = (rank(a), rank(b));
            a.0.total_cmp(&b.0).then(a.1.total_cmp(&b.1))
        })
    }
}

impl Row {
    fn parse(line: &str) -> Option<Self> {
        let cells: Vec<&str> = line.split('\t').collect();
        let &[sm, dtype, batch, nodes, depth, design, us] = cells.as_slice() else { return None };
        let dtype = match dtype {
            "f32" => Dtype::F32,
            "bf16" => Dtype::Bf16,
            _ => return None,
        };
        let design: Design = design.parse().ok()?;
        let at = Query {
            sm: sm.parse().ok()?,
            dtype,
            batch: batch.parse().ok()?,
            nodes: nodes.parse().ok()?,
            depth: depth.parse().ok()?,
            form: Form::of(design),
        };
        Some(Self { at, design, us: us.parse().ok()? })
    }
}

#[cfg(test)]
mod tests {
    use super::{Design, Dtype, Form, Query, Table, blocks, design, walks};
    use crate::tree_gdn::Schedule;
    use crate::{DraftTree, GdnDims};

    const TEXT: &str = "sm\tdtype\tbatch\tnodes\tdepth\tdesign\tus
90\tf32\t1\t4\t3\tfused-v32-chains\t5
90\tf32\t1\t4\t3\tchain-v32\t6
90\tf32\t1\t16\t15\tfused-v32-chains\t10
90\tf32\t1\t16\t15\tchain-v32\t5
90\tf32\t16\t16\t15\tchain-v128\t60
90\tf32\t16\t16\t15\tfused-v128-chains\t40
90\tf32\t1\t256\t255\tchain-v32\t50
90\tf32\t1\t64\t8\tfused-v32-levels\t11
90\tf32\t16\t64\t8\tfused-v128-levels\t50
90\tbf16\t1\t64\t8\tfused-v64-levels\t9
90\tbf16\t1\t64\t8\tblocked-v32\t8
90\tbf16\t16\t64\t8\tblocked-v64\t30
90\tbf16\t1\t256\t8\tfused-v32-levels\t29
90\tbf16\t1\t256\t8\tblocked-v32\t40";

    fn query(batch: usize, tree: &DraftTree, form: Form) -> Query {
        let dims = GdnDims::new(16, 32, 128, 128).unwrap();
        Query::new(90, Dtype::F32, dims, std::iter::repeat_n(tree, batch), form)
    }

    #[test]
    fn the_nearest_measured_point_decides() {
        let (table, bole) = (Table::parse(TEXT).unwrap(), DraftTree::bole(80, 1).unwrap());
        let bole = |batch| query(batch, &bole, Form::Solve);
        let fused = |columns| Design::Fused { columns, schedule: Schedule::Levels };
        assert_eq!(table.choose(bole(1)), fused(32));
        assert_eq!(table.choose(bole(12)), fused(128));
        assert_eq!(table.choose(Query { dtype: Dtype::Bf16, ..bole(16) }), fused(64));
        assert_eq!(table.choose(Query { sm: 120, ..bole(1) }), fused(32), "the only architecture there is");
        assert_eq!(Table(Vec::new()).choose(bole(1)), Design::Split);
    }

    #[test]
    fn a_chain_is_walked_by_its_own_length_and_the_batch_chooses_the_block() {
        let table = Table::parse(TEXT).unwrap();
        for (nodes, walked) in [(1, false), (4, false), (16, true), (30, true), (256, true)] {
            assert_eq!(table.walks(90, nodes), walked, "{nodes} nodes");
        }
        assert!(!Table(Vec::new()).walks(90, 16));
        let chain = DraftTree::chain(16).unwrap();
        assert_eq!(table.choose(query(1, &chain, Form::Walk)), Design::Chain { columns: 32 });
        assert_eq!(
            table.choose(query(16, &chain, Form::Walk)),
            Design::Chain { columns: 128 },
            "though a solve is faster"
        );
        assert!(!walks(90, &DraftTree::balanced(2, 2).unwrap()).unwrap());
    }

    #[test]
    fn dense_blocks_are_chosen_by_a_trees_own_shape_and_the_batch_chooses_the_block() {
        let table = Table::parse(TEXT).unwrap();
        for (nodes, depth, blocked) in [(64, 8, true), (70, 60, true), (256, 8, false), (200, 8, false)] {
            assert_eq!(table.blocks(90, nodes, depth), blocked, "{nodes} nodes");
        }
        assert!(!Table(Vec::new()).blocks(90, 64, 8), "the split design, which is no blocked one");
        let bole = DraftTree::bole(64, 1).unwrap();
        let bf16 = |batch| Query { dtype: Dtype::Bf16, ..query(batch, &bole, Form::Blocked) };
        assert_eq!(table.choose(bf16(1)), Design::Blocked { columns: 32 });
        assert_eq!(table.choose(bf16(16)), Design::Blocked { columns: 64 });
        assert!(blocks(90, &DraftTree::chain(128).unwrap()).unwrap(), "the built-in table");
    }

    #[test]
    fn names_are_read_back_and_bad_lines_are_named() {
        for name in ["split", "fused-v64-chains", "blocked-v128", "chain-v128"] {
            assert_eq!(name.parse::<Design>().unwrap().to_string(), name);
        }
        let message = |text: &str| Table::parse(text).unwrap_err().to_string();
        assert!(message("").contains("line 1"));
        let bad = format!("{}\n90\tf32\t1\t16\t15\tfused-v33-chains\t10", Table::HEADER);
        assert!(message(&bad).contains("line 2"));
        assert!("chain-v16".parse::<Design>().unwrap_err().to_string().contains("chain-v16"));
    }

    #[test]
    fn the_built_in_table_is_readable_and_serves_every_query() {
        let text = include_str!("dispatch.tsv");
        assert_eq!(Table::parse(text).unwrap(), *Table::built_in());
        for nodes in [1, 3, 17, 100, 256] {
            for batch in [1, 5, 32] {
                let chain = DraftTree::chain(nodes).unwrap();
                let solve = design(query(batch, &chain, Form::Solve)).unwrap();
                assert!(matches!(solve, Design::Fused { .. }), "{nodes} nodes, batch {batch}");
                let walk = design(query(batch, &chain, Form::Walk)).unwrap();
                assert!(matches!(walk, Design::Chain { .. }), "{nodes} nodes, batch {batch}");
            }
        }
    }
}
