//! int8 weights: what a bf16 weight becomes, on every device.
//!
//! A group is [`GROUP`] inputs of one output (fewer at the end of a row). Its scale is the largest magnitude over 127, rounded up to bf16; a value
//! is `w / scale` rounded to a whole number (halves to even), from -127 to 127. The weight that a product then sees is [`dequantised`]: value
//! times scale, rounded to bf16. So the product over int8 weights is the bf16 product over other weights, with its order of sums and its bits.
//! A group with something that is not finite, or past 1e38, becomes NaN.

use half::bf16;

/// Inputs of one output that share a scale.
pub const GROUP: usize = 128;

/// Largest magnitude of a group that has a scale.
const LARGEST: f32 = 1e38;

/// The scale of a group.
pub fn scale(group: &[bf16]) -> bf16 {
    let largest = group.iter().map(|w| w.to_bits() & 0x7fff).max().unwrap_or(0);
    let largest = bf16::from_bits(largest).to_f32();
    match largest <= LARGEST {
        true => bf16::from_bits((((largest / 127.0).to_bits() + 0xffff) >> 16) as u16),
        false => bf16::NAN,
    }
}

/// The value of a weight under a group's scale; 0 where the scale is no number.
pub fn value(weight: bf16, scale: bf16) -> i8 {
    match scale.to_f32() > 0.0 {
        true => (weight.to_f32() / scale.to_f32()).round_ties_even().clamp(-127.0, 127.0) as i8,
        false => 0,
    }
}

/// What a value stands for.
pub fn dequantised(value: i8, scale: bf16) -> bf16 {
    bf16::from_f32(f32::from(value) * scale.to_f32())
}

/// Replaces the weights of a row-major matrix `[out, inputs]` by what their int8 values stand for.
pub fn round_trip(inputs: usize, weights: &mut [bf16]) {
    for group in weights.chunks_mut(inputs.max(1)).flat_map(|row| row.chunks_mut(GROUP)) {
        let scale = scale(group);
        for weight in group {
            *weight = dequantised(value(*weight, scale), scale);
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    fn group(values: &[f32]) -> Vec<bf16> {
        values.iter().map(|&w| bf16::from_f32(w)).collect()
    }

    #[test]
    fn a_value_is_half_a_step_off_at_most() {
        for largest in [1e-30f32, 1e-3, 0.7, 1.0, 127.0, 1e30] {
            let weights = group(&(-64..=64).map(|i| i as f32 / 64.0 * largest).collect::<Vec<_>>());
            let scale = scale(&weights);
            // rounding up to bf16 widens a step by less than 2^-7
            let share = scale.to_f32() * 127.0 / bf16::from_f32(largest).to_f32();
            assert!((0.99999..1.008).contains(&share), "{largest}: {share}");
            for &weight in &weights {
                let value = value(weight, scale);
                let off = (f32::from(value) * scale.to_f32() - weight.to_f32()).abs();
                assert!(off <= scale.to_f32() * 0.5001, "{weight} as {value}");
                let off = (dequantised(value, scale).to_f32() - weight.to_f32()).abs();
                assert!(
                    off <= scale.to_f32() * 0.5001 + weight.to_f32().abs() / 256.0,
                    "{weight} as {value}"
                );
            }
        }
    }

    #[test]
    fn whole_numbers_up_to_127_come_back() {
        let weights = group(&(-127..=127).map(|i| i as f32 / 4.0).collect::<Vec<_>>());
        let mut back = weights.clone();
        round_trip(weights.len(), &mut back);
        assert_eq!(weights, back);
    }

    #[test]
    fn groups_and_rows_do_not_share_scales() {
        let mut weights = group(&[1.0; 130]);
        weights[129] = bf16::from_f32(100.0);
        let mut one_row = weights.clone();
        round_trip(130, &mut one_row);
        assert_eq!(one_row[0].to_f32(), 1.0);
        assert!((one_row[128].to_f32() - 1.0).abs() < 0.3);
        let mut rows = weights.clone();
        round_trip(65, &mut rows);
        assert_eq!(rows[..65], group(&[1.0; 65]));
        assert_ne!(rows[65], weights[65]);
    }

    #[test]
    fn zeros_stay_and_what_has_no_scale_is_nan() {
        let mut zeros = group(&[0.0; 5]);
        round_trip(5, &mut zeros);
        assert_eq!(zeros, group(&[0.0; 5]));
        for bad in [f32::NAN, f32::INFINITY, f32::NEG_INFINITY, 3e38] {
            let mut weights = group(&[1.0; 300]);
            weights[150] = bf16::from_f32(bad);
            round_trip(300, &mut weights);
            for (at, weight) in weights.iter().enumerate() {
                assert_eq!(weight.is_nan(), (128..256).contains(&at), "{bad} at {at}");
            }
        }
    }
}
