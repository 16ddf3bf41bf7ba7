use super::{global_norm, limit_norm, root_of_sum, sum_of_squares};
use crate::ops::{Gradient, scaled};
use crate::testing::{Tolerance, normals, parity, parity_of_values, values};
use crate::{DType, Device, Tensor};

fn norm(tensors: &[Tensor]) -> Tensor {
    global_norm(&tensors.iter().map(Gradient::Plain).collect::<Vec<_>>()).unwrap()
}

#[test]
fn global_norm_agrees_across_devices() {
    let inputs = [1, 300, 50_000].map(|n| normals("g", &[n], DType::F32));
    // F64 sums in another order almost always round to the same F32.
    parity(&inputs, Tolerance::Steps(DType::F32, 1.0), |x| Ok(vec![norm(x)]));
}

#[test]
fn many_tensors_take_several_launches() {
    let dtype = |i| if i % 3 == 0 { DType::BF16 } else { DType::F32 };
    let inputs: Vec<_> = (0..330).map(|i| normals("g", &[i * i % 97 + i / 300 * 70_000], dtype(i))).collect();
    parity(&inputs, Tolerance::Steps(DType::F32, 1.0), |x| Ok(vec![norm(x)]));
}

#[test]
fn squares_beyond_binary32_count() {
    for size in [1e25f32, 1e-30] {
        let x: Vec<f32> = (0..5000).map(|i| size * (1.0 + (i % 7) as f32)).collect();
        let x = Tensor::from_slice(&Device::Cpu, &[x.len()], &x).unwrap();
        parity(&[x], Tolerance::Steps(DType::F32, 1.0), |x| Ok(vec![norm(x)]));
    }
}

#[test]
fn sums_of_slices_give_the_norm_of_the_whole() {
    let inputs = [3000, 300_000].map(|n| normals("g", &[n], DType::F32));
    parity(&inputs, Tolerance::Steps(DType::F32, 1.0), |x| {
        let (ours, theirs) = (x[1].rows(0, 100_096)?, x[1].rows(100_096, 300_000)?);
        let mut sums = Tensor::zeros(x[0].device(), &[2], DType::F64)?;
        sums.copy_from(0, &sum_of_squares(&[Gradient::Plain(&x[0]), Gradient::Plain(&ours)])?)?;
        sums.copy_from(1, &sum_of_squares(&[Gradient::Plain(&theirs)])?)?;
        let got = root_of_sum(&sums)?;
        assert_eq!(values(&got), values(&norm(x)));
        Ok(vec![got])
    });
}

#[test]
fn tensors_count_as_one_vector() {
    let tensor = |v: &[f32]| Tensor::from_slice(&Device::Cpu, &[v.len()], v).unwrap();
    assert_eq!(values(&norm(&[tensor(&[2.0, 3.0]), tensor(&[6.0])])), [7.0]);
    assert!(values(&norm(&[tensor(&[2.0, f32::NAN])]))[0].is_nan());
}

/// Scaled gradients are mixed with plain gradients. The inverse scale of a non-finite gradient is NaN.
#[test]
fn scaled_gradients_count_with_their_scale() {
    let inputs = [1, 7, 300, 50_001].map(|n| normals("g", &[n], DType::F32));
    parity_of_values(&inputs, Tolerance::Steps(DType::F32, 1.0), |x| {
        let stored: Vec<_> = x.iter().map(|x| scaled(x, DType::E4M3)).collect::<Result<_, _>>()?;
        let back: Vec<_> = stored.iter().map(|x| crate::ops::unscaled(x, DType::F32)).collect::<Result<_, _>>()?;
        let mixed: Vec<_> = stored.iter().map(Gradient::Scaled).chain([Gradient::Plain(&x[1])]).collect();
        let got = global_norm(&mixed)?;
        let expected = norm(&back.into_iter().chain([x[1].clone()]).collect::<Vec<_>>());
        // Both norms are sums of squares in F64, rounded to F32 once, so they differ by at most one step of 1.2e-7.
        assert!((values(&got)[0] / values(&expected)[0] - 1.0).abs() < 1e-6);
        Ok(vec![got])
    });
    let bad = Tensor::from_slice(&Device::Cpu, &[2], &[1.0, f32::INFINITY]).unwrap();
    let bad = scaled(&bad, DType::E4M3).unwrap();
    assert!(values(&global_norm(&[Gradient::Scaled(&bad)]).unwrap())[0].is_nan());
}

#[test]
fn norms_above_a_limit_are_infinite() {
    let scalar = |x: f32| Tensor::from_slice(&Device::Cpu, &[1], &[x]).unwrap();
    let infinity = f32::INFINITY;
    for (norm, limit, expected) in
        [(2.0, 3.0, 2.0), (3.0, 3.0, 3.0), (3.5, 3.0, infinity), (3.5, infinity, 3.5), (f32::NAN, 3.0, infinity)]
    {
        assert_eq!(values(&limit_norm(&scalar(norm), &scalar(limit)).unwrap()), [f64::from(expected)]);
        parity(&[scalar(norm), scalar(limit)], Tolerance::Exact, |x| Ok(vec![limit_norm(&x[0], &x[1])?]));
    }
}
