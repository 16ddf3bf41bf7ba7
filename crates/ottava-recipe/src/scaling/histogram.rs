//! Histograms of the values that casts read.

use ottava_common::error::{Error, Result};
use ottava_tensor::fp8::E4M3;
use ottava_tensor::{DType, Tensor};

/// The number of absolute values of BF16. In ascending order, they are the bits without the sign.
const VALUES: usize = 1 << 15;

/// The count of each absolute value of BF16. There is one bin per value, so results are exact.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct Histogram(Vec<u64>);

impl Default for Histogram {
    fn default() -> Histogram {
        Histogram(vec![0; VALUES])
    }
}

impl Histogram {
    /// Counts the values of a BF16 tensor.
    pub fn add(&mut self, x: &Tensor) -> Result<()> {
        x.expect_dtype("histogram: x", &[DType::BF16])?;
        for bits in x.read_bytes()?.chunks_exact(2) {
            self.0[usize::from(u16::from_le_bytes([bits[0], bits[1]]) & 0x7FFF)] += 1;
        }
        Ok(())
    }

    /// Returns the absolute values that occurred, in ascending order, with their counts.
    fn values(&self) -> impl DoubleEndedIterator<Item = (f32, u64)> {
        let value = |bits: usize| f32::from_bits((bits as u32) << 16);
        self.0.iter().enumerate().filter(|(_, count)| **count > 0).map(move |(bits, count)| (value(bits), *count))
    }

    /// Returns the largest absolute value, or 0 if no value was counted.
    ///
    /// Errors with [`Error::NonFinite`] if it is infinite or NaN.
    pub fn amax(&self) -> Result<f32> {
        match self.values().next_back() {
            Some((amax, _)) if !amax.is_finite() => Err(Error::NonFinite("a value is not finite".into())),
            amax => Ok(amax.map_or(0.0, |(amax, _)| amax)),
        }
    }

    /// Returns the smallest absolute value that at least `share` of all values do not exceed, or 0 if no value was counted.
    pub fn percentile(&self, share: f64) -> f32 {
        let all: u64 = self.0.iter().sum();
        let mut left = (all as f64 * share).ceil() as u64;
        let found = self.values().find(|(_, count)| {
            left = left.saturating_sub(*count);
            left == 0
        });
        found.map_or(0.0, |(value, _)| value)
    }

    /// Returns the sum of squared errors of a cast to E4M3 with the scale `448 / largest`. Larger values saturate.
    pub fn squared_error(&self, largest: f32) -> f64 {
        let scale = 448.0 / largest;
        let error = |value: f32| f64::from(E4M3::from_f32(value * scale).to_f32() / scale - value);
        self.values().map(|(value, count)| count as f64 * error(value).powi(2)).sum()
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use ottava_tensor::Device;

    fn count(values: &[f32]) -> Histogram {
        let bytes: Vec<u8> = values.iter().flat_map(|v| half::bf16::from_f32(*v).to_le_bytes()).collect();
        let mut histogram = Histogram::default();
        let x = Tensor::from_bytes(&Device::Cpu, &[values.len()], DType::BF16, &bytes).unwrap();
        histogram.add(&x).unwrap();
        histogram
    }

    #[test]
    fn amax_and_percentile_are_those_of_the_sorted_values() {
        let values: Vec<f32> = (0..1000).map(|i| if i % 2 == 0 { 1.0 + (i / 10) as f32 } else { -0.5 }).collect();
        let histogram = count(&values);
        let mut sorted: Vec<f32> = values.iter().map(|v| v.abs()).collect();
        sorted.sort_by(f32::total_cmp);
        assert_eq!(histogram.amax().unwrap(), 100.0);
        for share in [0.001f64, 0.5, 0.501, 0.9, 0.995, 0.999, 1.0] {
            let index = (1000.0 * share).ceil() as usize - 1;
            assert_eq!(histogram.percentile(share), sorted[index], "{share}");
        }
        assert_eq!(
            (count(&[]).amax().unwrap(), count(&[]).percentile(0.5), count(&[0.0, -0.0]).amax().unwrap()),
            (0.0, 0.0, 0.0)
        );
        assert!(count(&[1.0, f32::INFINITY]).amax().is_err() && count(&[1.0, f32::NAN]).amax().is_err());
    }

    #[test]
    fn squared_errors_are_those_of_casts() {
        let values = [0.1, -3.0, 7.75, 100.0, 1e-4];
        for largest in [100.0f32, 50.0, 448.0] {
            let scale = 448.0 / largest;
            let error = |v: &f32| {
                let v = half::bf16::from_f32(*v).to_f32();
                f64::from(E4M3::from_f32(v * scale).to_f32() / scale - v).powi(2)
            };
            let expected: f64 = values.iter().map(error).sum();
            // The five squares are summed in F64 in another order, which changes the sum by a few units of 2⁻⁵³.
            assert!((count(&values).squared_error(largest) / expected - 1.0).abs() < 1e-12, "{largest}");
        }
        // Values above the largest are clamped to it.
        assert!((count(&[100.0]).squared_error(50.0) - 2500.0).abs() < 1e-2);
    }
}
