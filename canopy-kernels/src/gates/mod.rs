//! Room 3: log gates and write strengths from the a and b projections.
//!
//! ```text
//! g = -exp(A_log) * softplus(a + dt_bias),   softplus(x) = ln(1 + exp(x)),   beta = 1 / (1 + exp(-b))
//! ```
//!
//! | name | shape | dtype | direction | meaning |
//! |---|---|---|---|---|
//! | `ab` | `[N, 2, Hv]` | f32 | in | plane 0 = a, plane 1 = b |
//! | `a_log` | `[Hv]` | f32 | in | A_log, the natural log of a head's rate |
//! | `dt_bias` | `[Hv]` | f32 | in | added to a |
//! | `out` | `[N, 2, Hv]` | f32 | out | plane 0 = g (<= 0, natural log), plane 1 = beta (0 to 1) |
//!
//! Invariants:
//! 1. Each value is float64's, rounded once, and depends on its own inputs only.
//!    (`tests::gates_are_float64_rounded_once`)
//! 2. A rate beyond f32 times a softplus below it is their product, not NaN.
//!    (`tests::a_huge_rate_times_a_vanishing_softplus_is_no_nan`)
//! 3. Far inputs give the limits: no overflow, subnormals kept. (`tests::far_inputs_keep_their_limits`)
//! 4. A NaN or an infinity stays in its element. (`tests::a_nonfinite_input_stays_in_its_element`)
//! 5. A wrong argument is an error that names it. (`tests::refusals_name_the_argument`)
//!
//! On CUDA `launch` has a kernel of its own; `tree_conv`'s launch takes the same step along (`gates.cuh`), which is one launch less a layer.
//!
//! Limits: any number of rows and at least one head.

pub mod cpu;
#[cfg(feature = "cuda")]
pub mod launch;
pub mod oracle;
#[cfg(test)]
mod tests;
