use super::{add_unscaled_columns, column_scales, scale_columns, unscale_columns};
use crate::testing::{Tolerance, assert_close, normals, parity, values};
use crate::{DType, Device, Tensor};

/// Returns normal values whose columns differ in magnitude by powers of ten.
fn uneven(name: &str, [rows, columns]: [usize; 2], dtype: DType) -> Tensor {
    let mut x = normals(name, &[rows, columns], DType::F32).to_vec::<f32>().unwrap();
    x.iter_mut().enumerate().for_each(|(i, x)| *x *= 10f32.powi((i % columns) as i32 % 7 - 3));
    crate::ops::cast(&Tensor::from_slice(&Device::Cpu, &[rows, columns], &x).unwrap(), dtype).unwrap()
}

#[test]
fn column_scales_agree_across_devices() {
    for (r, c) in [(1, 1), (3, 7), (300, 257), (140, 520), (1025, 16)] {
        for dtype in [DType::F32, DType::F16, DType::BF16] {
            let (x, sum) = (uneven("x", [r, c], dtype), normals("sum", &[r, c], dtype));
            let inputs = [x, sum, normals("product", &[r, c], DType::F32)];
            // Each value is rounded once, and a maximum does not depend on the order.
            parity(&inputs, Tolerance::Exact, |x| {
                let scales = column_scales(&x[0])?;
                let (scaled, unscaled) = (scale_columns(&x[0], &scales)?, unscale_columns(&x[0], &scales)?);
                let mut sum = x[1].duplicate()?;
                add_unscaled_columns(&mut sum, &x[2], &scales)?;
                Ok(vec![scales, scaled, unscaled, sum])
            });
        }
    }
}

#[test]
fn column_scales_map_the_amax_between_one_half_and_one() {
    let edges = [
        (1.0, 1.0),
        (1.5, 0.5),
        (0.75, 1.0),
        (0.5, 2.0),
        (448.0, 2f32.powi(-9)),
        (f32::MIN_POSITIVE, 2f32.powi(126)),
        // Scales are limited so that their inverses are normal.
        (1e-44, 2f32.powi(126)),
        (f32::MAX, 2f32.powi(-126)),
        (0.0, 1.0),
        (f32::INFINITY, 1.0),
        (f32::NAN, 1.0),
    ];
    let (amaxes, expected): (Vec<f32>, Vec<f32>) = edges.into_iter().unzip();
    // Smaller values and signs do not change the scales.
    let rows: Vec<f32> = amaxes.iter().map(|amax| amax / 4.0).chain(amaxes.iter().map(|amax| -amax)).collect();
    let x = Tensor::from_slice(&Device::Cpu, &[2, edges.len()], &rows).unwrap();
    parity(std::slice::from_ref(&x), Tolerance::Exact, |x| Ok(vec![column_scales(&x[0])?]));
    assert_eq!(column_scales(&x).unwrap().to_vec::<f32>().unwrap(), expected);

    let x = uneven("x", [5, 33], DType::BF16);
    let scaled = values(&scale_columns(&x, &column_scales(&x).unwrap()).unwrap());
    for c in 0..33 {
        let amax = (0..5).map(|r| scaled[33 * r + c].abs()).fold(0.0, f64::max);
        assert!(amax > 0.5 && amax <= 1.0, "column {c} has amax {amax}");
    }
}

#[test]
fn scaling_and_unscaling_columns_restores_the_bits() {
    let x = uneven("x", [5, 33], DType::BF16);
    let scales = column_scales(&x).unwrap();
    let back = unscale_columns(&scale_columns(&x, &scales).unwrap(), &scales).unwrap();
    assert_close("there and back", &back, &x, Tolerance::Exact);
    let mut sum = x.duplicate().unwrap();
    let product = crate::ops::cast(&scale_columns(&x, &scales).unwrap(), DType::F32).unwrap();
    add_unscaled_columns(&mut sum, &product, &scales).unwrap();
    assert_eq!(values(&sum), values(&x).iter().map(|x| 2.0 * x).collect::<Vec<_>>());
}

#[test]
fn scales_of_another_width_are_an_error() {
    let (x, scales) = (normals("x", &[2, 3], DType::BF16), normals("scales", &[2], DType::F32));
    let error = scale_columns(&x, &scales).unwrap_err().to_string();
    assert!(error.contains("scale_columns: scales"), "{error}");
}
