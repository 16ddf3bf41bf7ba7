use super::*;
use crate::Device;
use crate::ops::{cast, transpose};
use crate::testing::{Tolerance, assert_close, normals, parity, values};

/// Returns `a · bᵀ` of matrices with `columns` columns.
fn product(a: &[f64], b: &[f64], columns: usize) -> Vec<f64> {
    let row = |a: &[f64]| -> Vec<f64> {
        b.chunks(columns).map(|b| a.iter().zip(b).map(|(a, b)| a * b).sum::<f64>()).collect()
    };
    a.chunks(columns).flat_map(row).collect()
}

fn transposed(x: &[f64], columns: usize) -> Vec<f64> {
    (0..columns).flat_map(|c| x.iter().skip(c).step_by(columns)).copied().collect()
}

/// Computes the published iteration in F64, for a matrix with at most as many rows as columns.
fn published(x: &[f64], columns: usize) -> Vec<f64> {
    let norm = x.iter().map(|x| x * x).sum::<f64>().sqrt();
    let mut x: Vec<f64> = x.iter().map(|x| x / norm.max(1e-7)).collect();
    for _ in 0..5 {
        let gram = product(&x, &x, columns);
        let square = product(&gram, &gram, x.len() / columns);
        let update: Vec<f64> = gram.iter().zip(square).map(|(g, s)| -4.775 * g + 2.0315 * s).collect();
        let step = product(&update, &transposed(&x, columns), x.len() / columns);
        x = x.iter().zip(step).map(|(x, step)| 3.4445 * x + step).collect();
    }
    x
}

fn relative_error(a: &[f64], b: &[f64]) -> f64 {
    let apart: f64 = a.iter().zip(b).map(|(a, b)| (a - b) * (a - b)).sum();
    (apart / b.iter().map(|b| b * b).sum::<f64>()).sqrt()
}

#[test]
fn newton_schulz_is_the_published_iteration() {
    for (rows, columns) in [(1, 1), (1, 9), (5, 7), (16, 16), (40, 96)] {
        let x = normals("x", &[rows, columns], DType::BF16);
        let expected = published(&values(&x), columns);
        // Matrices are rounded to BF16 five times, and the terms of the polynomials partly cancel.
        let error = relative_error(&values(&newton_schulz(&x, 1.0).unwrap()), &expected);
        assert!(error < 0.02, "[{rows}, {columns}]: {error}");
        let tall = transposed(&values(&newton_schulz(&transpose(&x).unwrap(), 1.0).unwrap()), rows);
        assert!(relative_error(&tall, &expected) < 0.02, "[{columns}, {rows}]");
    }
}

/// The rows of a wide matrix become nearly orthogonal, and their lengths are around 1.
#[test]
fn the_result_is_nearly_orthogonal() {
    let (rows, columns) = (24, 200);
    let y = values(&newton_schulz(&normals("x", &[rows, columns], DType::BF16), 1.0).unwrap());
    let gram = product(&y, &y, columns);
    for (i, value) in gram.iter().enumerate() {
        let expected = if i % (rows + 1) == 0 { 0.45..1.5 } else { -0.35..0.35 };
        assert!(expected.contains(value), "{value} at {} {}", i / rows, i % rows);
    }
}

#[test]
fn the_size_of_the_matrix_does_not_matter_and_the_factor_does() {
    let x = normals("x", &[12, 20], DType::F32);
    let sized = |size: f32| {
        let x: Vec<f32> = x.to_vec::<f32>().unwrap().iter().map(|x| x * size).collect();
        cast(&Tensor::from_slice(&Device::Cpu, &[12, 20], &x).unwrap(), DType::BF16).unwrap()
    };
    let one = newton_schulz(&sized(1.0), 1.0).unwrap();
    // Powers of two do not change any rounding.
    assert_close("size", &newton_schulz(&sized(2f32.powi(-12)), 1.0).unwrap(), &one, Tolerance::Exact);
    let four: Vec<f64> = values(&one).iter().map(|x| 4.0 * x).collect();
    assert_eq!(values(&newton_schulz(&sized(1.0), 4.0).unwrap()), four);
}

#[test]
fn zeros_stay_zeros() {
    let x = Tensor::zeros(&Device::Cpu, &[3, 5], DType::BF16).unwrap();
    assert!(values(&newton_schulz(&x, 0.2).unwrap()).iter().all(|x| *x == 0.0));
}

#[test]
fn normalize_and_polynomial_agree_across_devices() {
    for n in [1, 7, 64, 129] {
        let inputs = [normals("x", &[n, n], DType::BF16), normals("square", &[n, n], DType::F32)];
        parity(&inputs, Tolerance::Exact, |x| Ok(vec![polynomial(x[0].duplicate()?, &x[1], 0.3)?]));
        // The norm may round differently, because its sum has another order.
        parity(&inputs[..1], Tolerance::Steps(DType::BF16, 1.0), |x| Ok(vec![normalize(&x[0])?]));
    }
}

#[test]
fn newton_schulz_agrees_across_devices() {
    for (rows, columns) in [(1, 1), (5, 7), (64, 64), (48, 136), (257, 65)] {
        // Products are summed in another order. For small singular values, five steps amplify a rounding by up to 3.4445^5.
        parity(&[normals("x", &[rows, columns], DType::BF16)], Tolerance::Steps(DType::BF16, 32.0), |x| {
            Ok(vec![newton_schulz(&x[0], 0.2)?])
        });
    }
}
