//! Statistics of single tensors, for debugging.

use ottava_common::error::Result;
use ottava_tensor::ops::cast;
use ottava_tensor::{DType, Device, Tensor};
use serde::{Deserialize, Serialize};
use std::collections::BTreeMap;

/// Statistics of a tensor.
#[derive(Clone, Debug, PartialEq, Serialize, Deserialize)]
pub struct TensorStatistics {
    /// The shape of the tensor.
    pub shape: Vec<usize>,
    /// The mean of the finite elements.
    pub mean: f64,
    /// The standard deviation of the finite elements.
    pub std: f64,
    /// The sum of the absolute values of the finite elements.
    pub l1: f64,
    /// The root of the sum of the squares of the finite elements.
    pub l2: f64,
    /// The largest absolute value.
    pub amax: f64,
    /// The powers of two between the largest and the smallest absolute value that is not zero.
    pub dynamic_range: f64,
    /// The number of zeros.
    pub zeros: u64,
    /// The number of elements that are infinite or NaN.
    pub non_finite: u64,
    /// The number of elements by the exponent of their absolute value: `⌊log₂ |x|⌋`.
    pub exponents: BTreeMap<i32, u64>,
    /// The mean squared error of the cast; `None` if the tensor is not cast.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub cast_mse: Option<f64>,
}

impl TensorStatistics {
    /// Computes the statistics of `x`. `cast_error` is the relative error of its cast.
    pub fn of(x: &Tensor, cast_error: Option<f64>) -> Result<TensorStatistics> {
        let values = cast(&x.to_device(&Device::Cpu)?, DType::F32)?.to_vec::<f32>()?;
        let (mut sum, mut squares, mut l1, mut finite) = (0.0f64, 0.0f64, 0.0f64, 0u64);
        let (mut amax, mut least, mut zeros, mut non_finite) = (0.0f64, f64::INFINITY, 0, 0);
        let mut exponents = BTreeMap::new();
        for value in values {
            if !value.is_finite() {
                non_finite += 1;
                continue;
            }
            let value = f64::from(value);
            finite += 1;
            (sum, squares, l1) = (sum + value, squares + value * value, l1 + value.abs());
            if value == 0.0 {
                zeros += 1;
                continue;
            }
            (amax, least) = (amax.max(value.abs()), least.min(value.abs()));
            *exponents.entry(value.abs().log2().floor() as i32).or_default() += 1;
        }
        let count = finite.max(1) as f64;
        let mean = sum / count;
        Ok(TensorStatistics {
            shape: x.shape().to_vec(),
            mean,
            std: (squares / count - mean * mean).max(0.0).sqrt(),
            l1,
            l2: squares.sqrt(),
            amax,
            dynamic_range: if amax > 0.0 { (amax / least).log2() } else { 0.0 },
            zeros,
            non_finite,
            exponents,
            cast_mse: cast_error.map(|error| error * error * squares / count),
        })
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn statistics_are_those_of_the_definition() {
        let x = Tensor::from_slice(&Device::Cpu, &[2, 3], &[0.0f32, -4.0, 1.0, 0.25, 3.0, f32::INFINITY]).unwrap();
        let all = TensorStatistics::of(&x, Some(0.1)).unwrap();
        assert_eq!((&all.shape[..], all.zeros, all.non_finite, all.amax), (&[2, 3][..], 1, 1, 4.0));
        assert_eq!((all.mean, all.l1, all.dynamic_range), (0.05, 8.25, 4.0));
        // Squares of roots in F64 differ by some units of 2⁻⁵³ of 26. The product in the last assert has values below 1.
        assert!(
            (all.l2 * all.l2 - 26.0625).abs() < 1e-9 && (all.std * all.std - (26.0625 / 5.0 - 0.0025)).abs() < 1e-9
        );
        assert_eq!(all.exponents.into_iter().collect::<Vec<_>>(), [(-2, 1), (0, 1), (1, 1), (2, 1)]);
        assert!((all.cast_mse.unwrap() - 0.01 * 26.0625 / 5.0).abs() < 1e-12);
        let zeros = Tensor::zeros(&Device::Cpu, &[4], DType::BF16).unwrap();
        let all = TensorStatistics::of(&zeros, None).unwrap();
        assert_eq!((all.amax, all.std, all.dynamic_range, all.cast_mse), (0.0, 0.0, 0.0, None));
    }
}
