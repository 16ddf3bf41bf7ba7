//! The values of both formats, as bitsandbytes has them.

use std::sync::LazyLock;

/// The values of the 16 codes: quantiles of a normal distribution, with 0, -1 and 1.
pub(super) const VALUES: [f32; 16] = [
    -1.0,
    -0.696_192_8,
    -0.525_073_05,
    -0.394_917_5,
    -0.284_441_38,
    -0.184_773_43,
    -0.091_050_036,
    0.0,
    0.079_580_3,
    0.160_930_2,
    0.246_112_3,
    0.337_915_24,
    0.440_709_83,
    0.562_617,
    0.722_956_84,
    1.0,
];

/// The values of the 256 codes of scales, in ascending order: a sign, an exponent to the base of ten with a variable number of bits, and a fraction
/// with the other bits (Dettmers 2015, arXiv:1511.04561, "dynamic tree" quantization).
pub(super) static SCALES: LazyLock<[f32; 256]> = LazyLock::new(|| {
    let mut values = vec![0.0, 1.0];
    for bits in 0..7 {
        let (count, power) = (1 << bits, 10f64.powi(bits - 6) as f32);
        // `count + 1` numbers from 0.1 to 1, computed from the nearer end as PyTorch's `linspace` does: with fused operations.
        let step = (1.0 - 0.1f32) / count as f32;
        let edge = |at: i32| match at < (count + 1) / 2 {
            true => step.mul_add(at as f32, 0.1),
            false => (-step).mul_add((count - at) as f32, 1.0),
        };
        let means = (0..count).map(|at| power * ((edge(at) + edge(at + 1)) / 2.0));
        values.extend(means.flat_map(|mean| [mean, -mean]));
    }
    values.sort_by(f32::total_cmp);
    values.try_into().expect("there are 256 values")
});
