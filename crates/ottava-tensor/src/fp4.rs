//! The 4-bit floating-point format E2M1: bias 1, values ±{0, 0.5, 1, 1.5, 2, 3, 4, 6}, without infinity and NaN.
//! Source: OCP MX specification v1.0, section 5.3.3.

/// The largest value.
pub const MAX_E2M1: f32 = 6.0;

/// The magnitude above which a value saturates: rounding it to 6 loses more than half of the last step. The scale of a block in NVFP4 is rounded to
/// E4M3, so the largest value of a block can become up to 6.4 and loses less.
pub(crate) const SATURATED_E2M1: f32 = 7.0;

/// The largest value of E4M3, the format of the scales of blocks in NVFP4.
const MAX_E4M3: f32 = 448.0;

/// The values of the codes 0 to 7. The codes 8 to 15 have the same values with a minus sign.
pub const E2M1_VALUES: [f32; 8] = [0.0, 0.5, 1.0, 1.5, 2.0, 3.0, 4.0, 6.0];

/// Returns the scale of a tensor in NVFP4 with this amax, before the scales of blocks: its largest value becomes the product of the largest values of
/// E2M1 and E4M3. An amax of 0 or infinity gives 1, and a quotient that overflows F32 gives the largest F32.
pub fn nvfp4_scale(amax: f32) -> f32 {
    let scale = (MAX_E4M3 * MAX_E2M1 / amax).min(f32::MAX);
    if amax == 0.0 || scale == 0.0 { 1.0 } else { scale }
}

/// Returns the E2M1 value that is nearest to `x`, ties to the even code. Values beyond 6 become 6. NaN stays NaN, so that a run notices it.
pub fn nearest(x: f32) -> f32 {
    on_grid(x, f32::round_ties_even)
}

/// Returns one of the two E2M1 values around `x`: the larger magnitude with the probability of its share of the distance. `random` is one of 2³²
/// equally likely numbers. Values beyond 6 become 6, and NaN stays NaN.
pub fn stochastic(x: f32, random: u32) -> f32 {
    // A share of the distance has at most 24 bits.
    let threshold = (random >> 8) as f32 * (1.0 / 16_777_216.0);
    on_grid(x, |steps| steps.floor() + if threshold < steps - steps.floor() { 1.0 } else { 0.0 })
}

/// Rounds the magnitude of `x`, in steps of the grid around it.
#[inline(always)]
fn on_grid(x: f32, round: impl Fn(f32) -> f32) -> f32 {
    if x.is_nan() {
        return x;
    }
    let magnitude = x.abs().min(MAX_E2M1);
    let step = match magnitude {
        m if m < 2.0 => 0.5,
        m if m < 4.0 => 1.0,
        _ => 2.0,
    };
    let rounded = round(magnitude / step) * step;
    // Zero has no sign, as in Transformer Engine's reference for an input of -0; a negative value that becomes zero keeps its sign.
    if x < 0.0 { -rounded } else { rounded }
}

/// Returns the code of an E2M1 `value`, from 0 to 15. NaN has no code and becomes 7, as in the hardware's conversion.
pub fn code(value: f32) -> u8 {
    let magnitude = E2M1_VALUES.iter().rposition(|known| value.abs() >= *known).unwrap_or(7) as u8;
    magnitude | if value.is_sign_negative() { 8 } else { 0 }
}

/// Returns the value of a code from 0 to 15.
pub fn value(code: u8) -> f32 {
    let magnitude = E2M1_VALUES[usize::from(code & 7)];
    if code & 8 == 0 { magnitude } else { -magnitude }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn codes_decode_and_encode_back() {
        for c in 0..16 {
            assert_eq!(code(value(c)), c);
            assert_eq!(nearest(value(c)), value(c));
            assert_eq!(stochastic(value(c), u32::MAX).to_bits(), nearest(value(c)).to_bits());
        }
    }

    #[test]
    fn nearest_rounds_ties_to_the_even_code() {
        let ties = [(0.25f32, 0.0), (0.75, 1.0), (1.25, 1.0), (1.75, 2.0), (2.5, 2.0), (3.5, 4.0), (5.0, 4.0)];
        for (x, y) in ties {
            let (below, above) = (f32::from_bits(x.to_bits() - 1), f32::from_bits(x.to_bits() + 1));
            let lower = E2M1_VALUES.into_iter().rfind(|value| *value < x).unwrap();
            let upper = E2M1_VALUES.into_iter().find(|value| *value > x).unwrap();
            assert_eq!([nearest(below), nearest(x), nearest(above)], [lower, y, upper], "{x}");
            assert_eq!(nearest(-x), -y);
        }
        assert_eq!([nearest(1e9), nearest(f32::NEG_INFINITY), nearest(-0.1)], [6.0, -6.0, -0.0]);
        assert_eq!(nearest(-0.0).to_bits(), 0);
        assert!(nearest(f32::NAN).is_nan() && stochastic(f32::NAN, 5).is_nan());
    }

    /// The share of numbers that round up is the share of the distance, and every number gives a neighbour.
    #[test]
    fn stochastic_rounding_is_unbiased() {
        for x in [0.1f32, 0.4, 0.9, 1.8, -2.3, 3.01, 5.5, -0.001] {
            let n = 4096u32;
            let mean = (0..n).map(|i| f64::from(stochastic(x, i << 20))).sum::<f64>() / f64::from(n);
            assert!((mean - f64::from(x)).abs() < 2.0 / f64::from(n), "{x}: {mean}");
            let [low, high] = [stochastic(x, u32::MAX), stochastic(x, 0)];
            assert!(low.abs() <= x.abs() && x.abs() <= high.abs(), "{x} between {low} and {high}");
        }
    }
}
