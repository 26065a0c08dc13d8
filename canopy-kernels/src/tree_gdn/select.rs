//! Which form of the delta rule runs.

/// How the unit lower triangular system `(I + G) U = R` is solved.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Solve {
    /// Dense inverse by Gauss-Jordan elimination.
    Dense,
    /// Forward substitution, row by row.
    Forward,
    /// Blocked forward substitution with diagonal tiles of 64, 32 or 16 nodes.
    Blocked(usize),
    /// The finite Neumann series.
    Neumann,
    /// `(I - G)(I + G^2)(I + G^4)...`.
    Squaring,
    /// Level by level.
    Level,
    /// Heavy-light chains, each serial, in dependency order.
    Chains,
}

/// One form of verify and its matching commit.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Variant {
    /// Node by node in depth-first order; its bits equal plain serial decoding. Its commit replays the path.
    Walk,
    /// The tree closed form with one triangular solve. Its commit is the closed form.
    Solve(Solve),
}
