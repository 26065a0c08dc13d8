//! The one error type of this crate.

/// What can be wrong with a tree, an argument or a device.
#[non_exhaustive]
#[derive(Debug, Clone, PartialEq, thiserror::Error)]
pub enum Error {
    /// A buffer has another element count or shape than the op needs.
    #[error("{op}: {arg}, expected: {expected:?}, got: {got:?}")]
    Shape {
        /// Name of the op.
        op: &'static str,
        /// Name of the argument.
        arg: &'static str,
        /// What the op needs.
        expected: Box<[usize]>,
        /// What came.
        got: Box<[usize]>,
    },
    /// A scalar argument is out of its range.
    #[error("{op}: {arg}, expected: {expected}, got: {got}")]
    Value {
        /// Name of the op.
        op: &'static str,
        /// Name of the argument.
        arg: &'static str,
        /// The range, in words.
        expected: String,
        /// What came.
        got: String,
    },
    /// A parent array is not in topological order.
    #[error("draft tree: node {node} has parent {parent}; a parent must come before its child")]
    ParentOrder {
        /// The offending node.
        node: usize,
        /// Its parent as given.
        parent: i32,
    },
    /// A parent array has a second root.
    #[error("draft tree: node {node} has parent {parent}; only node 0 is a root (parent -1)")]
    SecondRoot {
        /// The offending node.
        node: usize,
        /// Its parent as given.
        parent: i32,
    },
    /// Node 0 has a parent.
    #[error("draft tree: node 0 has parent {parent}; the root's parent is -1")]
    RootParent {
        /// The parent as given.
        parent: i32,
    },
    /// A tree without a node.
    #[error("draft tree: no nodes; the root is a node")]
    EmptyTree,
    /// More nodes than a tree may have.
    #[error("draft tree: {nodes} nodes, at most {max}")]
    TooManyNodes {
        /// Nodes given.
        nodes: usize,
        /// The limit.
        max: usize,
    },
    /// A parent array whose links run in a circle.
    #[error("draft tree: node {node} is its own ancestor through parent {parent}")]
    Cycle {
        /// A node on the circle.
        node: usize,
        /// Its parent as given.
        parent: i32,
    },
    /// A parent that is no node of the tree.
    #[error("draft tree: node {node} has parent {parent}, but there are {nodes} nodes")]
    NoSuchParent {
        /// The offending node.
        node: usize,
        /// Its parent as given.
        parent: i32,
        /// Nodes of the tree.
        nodes: usize,
    },
    /// No node has parent -1.
    #[error("draft tree: none of the {nodes} nodes is a root (parent -1)")]
    NoRoot {
        /// Nodes given.
        nodes: usize,
    },
    /// A new order of a tree's nodes that is no order, or puts a child before its parent.
    #[error("draft tree: new order, position {position} holds node {node}: {problem}")]
    Order {
        /// The offending position.
        position: usize,
        /// The node given there.
        node: usize,
        /// What is wrong with it.
        problem: &'static str,
    },
    /// An accepted path that does not run from the root along parent links.
    #[error("accepted path of sequence {sequence}: entry {entry} is node {node}, expected {expected}")]
    Path {
        /// Which sequence of the batch.
        sequence: usize,
        /// Which entry of its path.
        entry: usize,
        /// The node given.
        node: usize,
        /// What would be right there.
        expected: String,
    },
    /// The device is older than every image of this build.
    #[error("this build has kernels for sm {built}; the device is sm {sm}")]
    UnsupportedArch {
        /// The device's compute capability, as 90 for 9.0.
        sm: u32,
        /// What was built.
        built: &'static str,
    },
    /// The CUDA driver refused a call.
    #[cfg(feature = "cuda")]
    #[error("{op}: {source}")]
    Driver {
        /// Name of the op.
        op: &'static str,
        /// The driver's error.
        source: cudarc::driver::DriverError,
    },
    /// No kernel was built for what was asked.
    #[error("{op}: no kernel for {wanted}; built: {built}")]
    Unsupported {
        /// Name of the op.
        op: &'static str,
        /// What was asked for.
        wanted: String,
        /// What there is.
        built: &'static str,
    },
}

/// `Result` with this crate's [`Error`].
pub type Result<T> = std::result::Result<T, Error>;

/// Checks an element count and names the argument when it is off.
pub(crate) fn expect_len(op: &'static str, arg: &'static str, expected: &[usize], got: usize) -> Result<()> {
    if expected.iter().fold(1usize, |len, &size| len.saturating_mul(size)) == got {
        return Ok(());
    }
    Err(Error::Shape { op, arg, expected: expected.into(), got: Box::new([got]) })
}

/// Slots of a pool with `slot_len` elements each; an error that names the argument when they do not divide it.
pub(crate) fn expect_pool(op: &'static str, arg: &'static str, slot_len: usize, got: usize) -> Result<usize> {
    if got.is_multiple_of(slot_len) {
        return Ok(got / slot_len);
    }
    let expected = format!("whole slots of {slot_len} elements");
    Err(Error::Value { op, arg, expected, got: format!("{got} elements") })
}
