//! Weights from a seed, the same on every device: for measuring a model's speed without its checkpoint.

use half::bf16;

/// Parts `[out_p, inputs]` row-major, uniform in `[-scale, scale)`: value `(row, k)` comes from splitmix64 of
/// `seed + (row 2^32 + k)` golden steps, rows counted over the parts, each padded to 16.
pub fn weights(inputs: usize, outputs: &[usize], seed: u64, scale: f32) -> Vec<Vec<bf16>> {
    let mut first_row = 0;
    let part = |&out: &usize| {
        let rows = first_row..first_row + out;
        first_row += out.next_multiple_of(16);
        rows.flat_map(|row| (0..inputs).map(move |k| value(seed, row as u64, k as u64, scale))).collect()
    };
    outputs.iter().map(part).collect()
}

fn value(seed: u64, row: u64, k: u64, scale: f32) -> bf16 {
    let mut x = seed.wrapping_add((row << 32 | k).wrapping_mul(0x9e37_79b9_7f4a_7c15));
    x = (x ^ (x >> 30)).wrapping_mul(0xbf58_476d_1ce4_e5b9);
    x = (x ^ (x >> 27)).wrapping_mul(0x94d0_49bb_1331_11eb);
    x ^= x >> 31;
    let unit = (x >> 40) as f32 / (1 << 23) as f32 - 1.0;
    bf16::from_f32(unit * scale)
}
