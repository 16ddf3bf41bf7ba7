use super::{magnitude_factors, magnitude_gradient, row_norms, row_squares};
use crate::testing::{Tolerance, normals, parity, values};
use crate::{DType, Device, Tensor};

#[test]
fn magnitude_agrees_across_devices() {
    for (r, c) in [(1, 1), (3, 7), (5, 257), (300, 40), (129, 1024)] {
        for dtype in [DType::F32, DType::BF16] {
            let (w, change) = (normals("w", &[r, c], dtype), normals("change", &[r, c], dtype));
            let rows = [w, change, normals("magnitude", &[r], DType::F32)];
            // Squares of a row are added in another order on the GPU.
            parity(&rows, Tolerance::Steps(DType::F32, 16.0), |x| {
                Ok(vec![row_norms(&x[0])?, magnitude_factors(&row_squares(&x[0], Some(&x[1]))?, &x[2])?])
            });
            let (dy, x) = (normals("dy", &[r, c], dtype), normals("x", &[r, c], dtype));
            // No magnitude is near 0, because sums of terms of both signs would be divided by it.
            let magnitude: Vec<f32> = (0..c).map(|i| 0.5 + (i % 5) as f32).collect();
            let magnitude = Tensor::from_slice(&Device::Cpu, &[c], &magnitude).unwrap();
            let columns = [dy, x, magnitude, normals("sum", &[c], DType::F32)];
            // Rows are added in chunks on the GPU, and products of both signs cancel.
            parity(&columns, Tolerance::Steps(DType::F32, 64.0), |x| {
                let mut sum = x[3].duplicate()?;
                magnitude_gradient(&x[0], &x[1], &x[2], &mut sum)?;
                Ok(vec![sum])
            });
        }
    }
}

#[test]
fn norms_of_zero_give_the_factor_zero_and_magnitudes_of_zero_no_gradient() {
    let rows = |values: &[f64]| Tensor::from_slice(&Device::Cpu, &[values.len() / 2, 2], values).unwrap();
    let vector = |values: &[f64]| Tensor::from_slice(&Device::Cpu, &[values.len()], values).unwrap();
    let (w, change) = (rows(&[3.0, 0.0, 1.0, -1.0]), rows(&[0.0, 4.0, -1.0, 1.0]));
    assert_eq!(values(&row_norms(&w).unwrap()), [3.0, 2f64.sqrt()]);
    let squares = row_squares(&w, Some(&change)).unwrap();
    assert_eq!(values(&squares), [25.0, 0.0]);
    assert_eq!(values(&magnitude_factors(&squares, &vector(&[10.0, 2.0])).unwrap()), [2.0, 0.0]);
    let mut gradient = vector(&[1.0, 1.0]);
    magnitude_gradient(&w, &rows(&[1.0, 5.0, 2.0, 7.0]), &vector(&[2.0, 0.0]), &mut gradient).unwrap();
    assert_eq!(values(&gradient), [1.0 + (3.0 * 1.0 + 1.0 * 2.0) / 2.0, 1.0]);
}
