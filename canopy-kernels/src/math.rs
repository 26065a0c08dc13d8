//! Elementwise functions that vectorise: branch-free bodies whose every operation is the same in a vector lane, in
//! a loop's tail and in a scalar call, so an element's bits depend on that element alone.

/// Multiply-add of a body compiled with (`FMA`) or without a fused instruction.
#[inline(always)]
pub(crate) fn mul_add<const FMA: bool>(a: f32, b: f32, c: f32) -> f32 {
    if FMA { a.mul_add(b, c) } else { a * b + c }
}

/// True when the portable build's target always has a fused multiply-add.
pub(crate) const PORTABLE_FMA: bool = cfg!(any(target_arch = "aarch64", target_feature = "fma"));

/// Defines `fn name(args)` that runs `body::<true>` compiled for AVX2 and FMA where the CPU has both, and
/// `body::<PORTABLE_FMA>` elsewhere. `body` must be `#[inline(always)]` and generic over `const FMA: bool`.
macro_rules! vectorised {
    ($(#[$meta:meta])* $vis:vis fn $name:ident($($arg:ident: $ty:ty),* $(,)?) $(-> $ret:ty)? = $body:ident) => {
        $(#[$meta])*
        $vis fn $name($($arg: $ty),*) $(-> $ret)? {
            #[cfg(target_arch = "x86_64")]
            {
                #[target_feature(enable = "avx2,fma")]
                fn wide($($arg: $ty),*) $(-> $ret)? {
                    $body::<true>($($arg),*)
                }
                if std::arch::is_x86_feature_detected!("avx2") && std::arch::is_x86_feature_detected!("fma") {
                    // SAFETY: the CPU has the two features that `wide` was compiled for.
                    return unsafe { wide($($arg),*) };
                }
            }
            $body::<{ $crate::math::PORTABLE_FMA }>($($arg),*)
        }
    };
}
pub(crate) use vectorised;

/// `e^x` within 1 ulp over all of f32, subnormal results included; NaN stays NaN.
#[inline(always)]
pub(crate) fn exp<const FMA: bool>(x: f32) -> f32 {
    // Adding 1.5 * 2^23 rounds to the nearest integer and leaves it in the low bits.
    const ROUND: f32 = 12_582_912.0;
    // ln 2 in two parts; the high one has 9 trailing zero bits, so n * LN2_HIGH is exact.
    const LN2_HIGH: f32 = 0.693_359_4;
    const LN2_LOW: f32 = -2.121_944_4e-4;
    // Beyond these the result is infinite or zero; the comparisons let NaN through.
    let x = if x > 89.0 { 89.0 } else { x };
    let x = if x < -104.0 { -104.0 } else { x };
    let shifted = mul_add::<FMA>(x, std::f32::consts::LOG2_E, ROUND);
    let n = shifted - ROUND;
    let r = mul_add::<FMA>(n, -LN2_LOW, mul_add::<FMA>(n, -LN2_HIGH, x));
    // Taylor series to r^7: the remainder is below 8e-9 for |r| <= ln 2 / 2.
    let mut p = 1.0 / 5040.0;
    for c in [1.0 / 720.0, 1.0 / 120.0, 1.0 / 24.0, 1.0 / 6.0, 0.5] {
        p = mul_add::<FMA>(p, r, c);
    }
    let p = mul_add::<FMA>(p * r, r, r) + 1.0;
    // 2^n in two factors, each in range, so that subnormal results round once.
    let n = shifted.to_bits().wrapping_sub(ROUND.to_bits()) as i32;
    let half = n >> 1;
    let power = |e: i32| f32::from_bits((e.wrapping_add(127) as u32) << 23);
    p * power(half) * power(n.wrapping_sub(half))
}

/// `1 / (1 + e^-x)` within 2.1 ulp, without overflow on either side.
#[inline(always)]
pub(crate) fn sigmoid<const FMA: bool>(x: f32) -> f32 {
    let e = exp::<FMA>(-x.abs());
    let numerator = if x < 0.0 { e } else { 1.0 };
    numerator / (1.0 + e)
}

/// `x * sigmoid(x)` within 3.1 ulp; NaN at minus infinity, as the formula gives.
#[inline(always)]
pub(crate) fn silu<const FMA: bool>(x: f32) -> f32 {
    x * sigmoid::<FMA>(x)
}

#[cfg(test)]
mod tests {
    //! Every function is held against float64 over a grid of all exponents, and a vector call against a scalar one.
    use super::*;

    fn grid() -> impl Iterator<Item = f32> {
        (0..u32::MAX).step_by(9_973).map(f32::from_bits)
    }

    /// Distance in units of the last place of `want` rounded to f32 (subnormal spacing below the normal range).
    fn ulps(got: f32, want: f64) -> f64 {
        let rounded = want as f32;
        if got.is_nan() || rounded.is_nan() || rounded.is_infinite() {
            let same = got.is_nan() && rounded.is_nan() || got == rounded;
            return if same { 0.0 } else { f64::INFINITY };
        }
        let exponent = (rounded.abs().to_bits() >> 23).max(1) as i32 - 150;
        (got as f64 - want).abs() / 2f64.powi(exponent)
    }

    fn worst(f: impl Fn(f32) -> f32, truth: impl Fn(f64) -> f64) -> f64 {
        grid().map(|x| ulps(f(x), truth(x as f64))).fold(0.0, f64::max)
    }

    vectorised!(fn exp_all(x: &mut [f32]) = exp_body);
    #[inline(always)]
    fn exp_body<const FMA: bool>(x: &mut [f32]) {
        x.iter_mut().for_each(|x| *x = exp::<FMA>(*x));
    }

    #[test]
    fn exp_is_within_one_ulp() {
        assert!(worst(exp::<true>, f64::exp) <= 1.0);
        assert!(worst(exp::<false>, f64::exp) <= 1.1);
    }

    #[test]
    fn sigmoid_and_silu_are_within_their_bounds() {
        let sigmoid64 = |x: f64| 1.0 / (1.0 + (-x).exp());
        let (a, b) = (worst(sigmoid::<true>, sigmoid64), worst(sigmoid::<false>, sigmoid64));
        assert!(a.max(b) <= 2.1, "{a} {b}");
        // A subnormal sigmoid has few bits, so silu is judged where sigmoid is normal.
        let normal = |f: fn(f32) -> f32| move |x: f32| if x.abs() > 80.0 { 0.0 } else { f(x) };
        let silu64 = |x: f64| if x.abs() > 80.0 { 0.0 } else { x * sigmoid64(x) };
        let (a, b) = (worst(normal(silu::<true>), silu64), worst(normal(silu::<false>), silu64));
        assert!(a.max(b) <= 3.1, "{a} {b}");
        assert_eq!(silu::<true>(-200.0), 0.0);
        assert_eq!(silu::<true>(f32::INFINITY), f32::INFINITY);
        assert!(silu::<true>(f32::NEG_INFINITY).is_nan());
    }

    #[test]
    fn exp_handles_the_edges() {
        for (x, want) in [(f32::INFINITY, f32::INFINITY), (f32::NEG_INFINITY, 0.0), (0.0, 1.0), (-0.0, 1.0)] {
            assert_eq!(exp::<true>(x), want);
        }
        assert!(exp::<true>(f32::NAN).is_nan());
        assert_eq!(exp::<true>(-103.0), (-103f64).exp() as f32);
    }

    #[test]
    fn bits_do_not_depend_on_the_lane() {
        let values: Vec<f32> = grid().step_by(7).collect();
        let mut all = values.clone();
        exp_all(&mut all);
        for (&x, &y) in values.iter().zip(&all) {
            let mut one = [x];
            exp_all(&mut one);
            assert!(one[0].to_bits() == y.to_bits() || (one[0].is_nan() && y.is_nan()), "exp({x})");
        }
    }
}
