//! Which CUDA design verifies a batch: a pure function of architecture, output type, batch, nodes and depth, read from a table of
//! measured times (`dispatch.tsv`, written by `canopy-bench dispatch`).

use std::collections::HashMap;
use std::fmt;
use std::str::FromStr;
use std::sync::{Mutex, OnceLock};

use super::Schedule;
use crate::error::{Error, Result};
use crate::{DraftTree, GdnDims, TreeBatch};

const OP: &str = "tree-gdn-dispatch";

/// Value heads of the model that the times were measured with.
const MEASURED_HEADS: usize = 32;

/// One way to verify a batch on CUDA.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
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

    /// Designs of one family give a row the same bits.
    fn family(self) -> u8 {
        match self {
            Self::Split => 0,
            Self::Fused { .. } => 1,
            Self::Chain { .. } => 2,
        }
    }
}

impl fmt::Display for Design {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        match self {
            Self::Split => f.write_str("split"),
            Self::Fused { columns, schedule: Schedule::Levels } => write!(f, "fused-v{columns}-levels"),
            Self::Fused { columns, schedule: Schedule::Chains } => write!(f, "fused-v{columns}-chains"),
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
            all.push(Self::Chain { columns });
        }
        all.into_iter().find(|design| design.to_string() == name).ok_or_else(|| Error::Value {
            op: OP,
            arg: "design",
            expected: "split, fused-v32-levels, fused-v32-chains, chain-v32, or the same with 64 or 128"
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

/// What is to be verified.
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
    /// Every tree is a chain, and chains never share a batch with other trees: [`Self::of_chains`].
    pub chains: bool,
}

impl Query {
    /// The query of a batch, for the designs that take any tree.
    pub fn new(sm: u32, dtype: Dtype, dims: GdnDims, batch: &TreeBatch) -> Self {
        let most = |of: fn(&DraftTree) -> usize| batch.trees().iter().map(of).max().unwrap_or(0);
        Self {
            sm,
            dtype,
            batch: (batch.sequences() * dims.v_heads).div_ceil(MEASURED_HEADS),
            nodes: most(DraftTree::len),
            depth: most(DraftTree::max_depth),
            chains: false,
        }
    }

    /// The same for callers whose batches are always chains (prompt chunks, plain decoding), whatever else runs: [`Design::Chain`] may be
    /// chosen. Where chains and other trees meet in a batch, a chain's bits would depend on its company.
    #[must_use]
    pub fn of_chains(self) -> Self {
        Self { chains: true, ..self }
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

/// What [`Design::ENV`] names, else the built-in table's choice, remembered for every layer and round that asks again. The variable is read
/// once.
///
/// # Errors
/// [`Error::Value`] when the variable names no design.
pub fn design(query: Query) -> Result<Design> {
    static NAMED: OnceLock<Result<Option<Design>>> = OnceLock::new();
    static CHOSEN: OnceLock<Mutex<HashMap<Query, Design>>> = OnceLock::new();
    if let Some(design) = NAMED.get_or_init(Design::from_env).clone()? {
        return Ok(design);
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

    /// The design for a query. A row's bits must not depend on the batch, so the family of designs follows from architecture, type and
    /// trees alone, and the batch chooses block and schedule within it, which leave the bits as they are. [`Design::Split`] where the
    /// table has nothing for it.
    pub fn choose(&self, query: Query) -> Design {
        let alone = Query { batch: 1, ..query };
        let Some(family) = self.best(alone, |_| true).map(Design::family) else { return Design::Split };
        self.best(query, |design| design.family() == family).unwrap_or(Design::Split)
    }

    /// The fastest design for a query, whatever it does to the bits of a row that is also verified in another batch.
    pub fn fastest(&self, query: Query) -> Design {
        self.best(query, |_| true).unwrap_or(Design::Split)
    }

    /// The fastest allowed design of the measured point that lies nearest.
    fn best(&self, query: Query, allowed: impl Fn(Design) -> bool) -> Option<Design> {
        let fits = |row: &&Row| {
            let chain = matches!(row.design, Design::Chain { .. });
            row.at.dtype == query.dtype && (query.chains || !chain) && allowed(row.design)
        };
        let rank = |row: &Row| (row.at.distance(query), row.us);
        let best = self.0.iter().filter(fits).min_by(|a, b| {
            let (a, b) = (rank(a), rank(b));
            a.0.total_cmp(&b.0).then(a.1.total_cmp(&b.1))
        });
        best.map(|row| row.design)
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
        let (nodes, depth) = (nodes.parse().ok()?, depth.parse().ok()?);
        let at =
            Query { sm: sm.parse().ok()?, dtype, batch: batch.parse().ok()?, nodes, depth, chains: false };
        Some(Self { at, design: design.parse().ok()?, us: us.parse().ok()? })
    }
}

#[cfg(test)]
mod tests {
    use super::{Design, Dtype, Query, Table, design};
    use crate::tree_gdn::Schedule;
    use crate::{DraftTree, GdnDims, TreeBatch};

    const TEXT: &str = "sm\tdtype\tbatch\tnodes\tdepth\tdesign\tus
90\tf32\t1\t16\t15\tfused-v32-chains\t10
90\tf32\t1\t16\t15\tchain-v32\t5
90\tf32\t16\t16\t15\tfused-v128-chains\t4
90\tf32\t16\t16\t15\tchain-v128\t6
90\tf32\t1\t64\t8\tfused-v32-levels\t11
90\tf32\t16\t64\t8\tfused-v128-levels\t50
90\tbf16\t1\t64\t8\tfused-v64-levels\t9";

    fn query(batch: usize, tree: DraftTree) -> Query {
        let slots = (0..batch as i32).collect();
        let dims = GdnDims::new(16, 32, 128, 128).unwrap();
        Query::new(90, Dtype::F32, dims, &TreeBatch::new(vec![tree; batch], slots).unwrap())
    }

    #[test]
    fn the_nearest_measured_point_decides() {
        let table = Table::parse(TEXT).unwrap();
        let bole = |batch| query(batch, DraftTree::bole(80, 1).unwrap());
        let fused = |columns| Design::Fused { columns, schedule: Schedule::Levels };
        assert_eq!(table.choose(bole(1)), fused(32));
        assert_eq!(table.choose(bole(12)), fused(128));
        assert_eq!(table.choose(Query { dtype: Dtype::Bf16, ..bole(16) }), fused(64));
        assert_eq!(table.choose(Query { sm: 120, ..bole(1) }), fused(32), "the only architecture there is");
        assert_eq!(Table(Vec::new()).choose(bole(1)), Design::Split);
    }

    #[test]
    fn the_batch_changes_blocks_but_no_bits() {
        let table = Table::parse(TEXT).unwrap();
        let chain = |batch| query(batch, DraftTree::chain(16).unwrap()).of_chains();
        assert_eq!(table.choose(chain(1)), Design::Chain { columns: 32 });
        assert_eq!(table.choose(chain(16)), Design::Chain { columns: 128 }, "the family of batch 1");
        let fastest = Design::Fused { columns: 128, schedule: Schedule::Chains };
        assert_eq!(table.fastest(chain(16)), fastest);
        let among_trees = query(16, DraftTree::chain(16).unwrap());
        assert!(
            matches!(table.choose(among_trees), Design::Fused { .. }),
            "chains that may meet other trees"
        );
    }

    #[test]
    fn names_are_read_back_and_bad_lines_are_named() {
        for name in ["split", "fused-v64-chains", "chain-v128"] {
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
                let query = query(batch, DraftTree::chain(nodes).unwrap());
                assert!(
                    matches!(design(query).unwrap(), Design::Fused { .. }),
                    "{nodes} nodes, batch {batch}"
                );
            }
        }
    }
}
