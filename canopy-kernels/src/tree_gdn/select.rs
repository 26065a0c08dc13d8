//! Which form of the delta rule runs.

use std::fmt;
use std::str::FromStr;

use crate::error::{Error, Result};

/// How the unit lower triangular system `(I + G) U = R` is solved.
///
/// Neumann and Squaring are exact in exact arithmetic and lose all accuracy in floating point when a path's keys
/// are nearly equal and gates and write strengths are near 1; they are here to be compared.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Solve {
    /// Dense inverse by Gauss-Jordan elimination.
    Dense,
    /// Forward substitution, row by row.
    Forward,
    /// Blocked forward substitution with diagonal tiles of 64, 32 or 16 nodes.
    Blocked(usize),
    /// The finite Neumann series `sum (-G)^m`, m up to the tree's depth.
    Neumann,
    /// `(I - G)(I + G^2)(I + G^4)...`, `ceil(log2(depth + 1))` factors.
    Squaring,
    /// Level by level: a solved level is taken off everything below it at once.
    Level,
    /// Heavy-light chains, each serial, in dependency order.
    Chains,
}

/// One form of verify and its matching commit.
///
/// ```
/// use canopy_kernels::tree_gdn::{Solve, Variant};
/// assert_eq!("blocked32".parse::<Variant>()?, Variant::Solve(Solve::Blocked(32)));
/// assert_eq!(Variant::default().to_string(), "walk");
/// # Ok::<(), canopy_kernels::Error>(())
/// ```
#[derive(Clone, Copy, Debug, PartialEq, Eq, Default)]
pub enum Variant {
    /// Node by node in depth-first order; its bits equal plain serial decoding. Its commit replays the path.
    #[default]
    Walk,
    /// The tree closed form with one triangular solve. Its commit is the closed form.
    Solve(Solve),
}

impl Variant {
    /// Every variant with its name.
    pub const ALL: [(&'static str, Self); 10] = [
        ("walk", Self::Walk),
        ("dense", Self::Solve(Solve::Dense)),
        ("forward", Self::Solve(Solve::Forward)),
        ("blocked64", Self::Solve(Solve::Blocked(64))),
        ("blocked32", Self::Solve(Solve::Blocked(32))),
        ("blocked16", Self::Solve(Solve::Blocked(16))),
        ("neumann", Self::Solve(Solve::Neumann)),
        ("squaring", Self::Solve(Solve::Squaring)),
        ("level", Self::Solve(Solve::Level)),
        ("chains", Self::Solve(Solve::Chains)),
    ];

    /// The variable that [`Self::from_env`] reads.
    pub const ENV: &'static str = "CANOPY_TREE_GDN_VARIANT";

    /// The variant that `CANOPY_TREE_GDN_VARIANT` names, or the CPU's default.
    ///
    /// # Errors
    /// [`Error::Value`] listing the good names.
    pub fn from_env() -> Result<Self> {
        std::env::var(Self::ENV).map_or(Ok(Self::default()), |name| name.parse())
    }

    /// Checks that this is one of [`Self::ALL`].
    pub(super) fn check(self, op: &'static str) -> Result<()> {
        if Self::ALL.iter().any(|&(_, known)| known == self) {
            return Ok(());
        }
        let expected = "diagonal tiles of 64, 32 or 16 nodes".into();
        Err(Error::Value { op, arg: "variant", expected, got: self.to_string() })
    }
}

impl FromStr for Variant {
    type Err = Error;

    fn from_str(name: &str) -> Result<Self> {
        if let Some((_, variant)) = Self::ALL.iter().find(|(known, _)| *known == name) {
            return Ok(*variant);
        }
        let expected = format!("one of {}", Self::ALL.map(|(known, _)| known).join(", "));
        Err(Error::Value { op: "tree_gdn", arg: "variant", expected, got: format!("{name:?}") })
    }
}

impl fmt::Display for Variant {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        match self {
            Self::Walk => f.write_str("walk"),
            Self::Solve(solve) => solve.fmt(f),
        }
    }
}

impl fmt::Display for Solve {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        match self {
            Self::Dense => f.write_str("dense"),
            Self::Forward => f.write_str("forward"),
            Self::Blocked(tile) => write!(f, "blocked{tile}"),
            Self::Neumann => f.write_str("neumann"),
            Self::Squaring => f.write_str("squaring"),
            Self::Level => f.write_str("level"),
            Self::Chains => f.write_str("chains"),
        }
    }
}

impl FromStr for Solve {
    type Err = Error;

    fn from_str(name: &str) -> Result<Self> {
        match name.parse() {
            Ok(Variant::Solve(solve)) => Ok(solve),
            _ => {
                let names: Vec<&str> = Variant::ALL.iter().map(|(known, _)| *known).skip(1).collect();
                let expected = format!("one of {}", names.join(", "));
                Err(Error::Value { op: "tree_gdn", arg: "solve", expected, got: format!("{name:?}") })
            }
        }
    }
}
