use super::global_norm;
use crate::testing::{Tolerance, normals, parity, values};
use crate::{DType, Device, Tensor};

#[test]
fn global_norm_agrees_across_devices() {
    let inputs = [1, 300, 50_000].map(|n| normals("g", &[n], DType::F32));
    // Binary64 sums in another order round to the same binary32 but for rare ties.
    parity(&inputs, Tolerance::Steps(DType::F32, 1.0), |x| Ok(vec![global_norm(&x.iter().collect::<Vec<_>>())?]));
}

#[test]
fn more_tensors_than_one_launch_takes() {
    let dtype = |i| if i % 3 == 0 { DType::BF16 } else { DType::F32 };
    let inputs: Vec<_> = (0..330).map(|i| normals("g", &[i * i % 97 + i / 300 * 70_000], dtype(i))).collect();
    parity(&inputs, Tolerance::Steps(DType::F32, 1.0), |x| Ok(vec![global_norm(&x.iter().collect::<Vec<_>>())?]));
}

#[test]
fn squares_beyond_binary32_count() {
    for size in [1e25f32, 1e-30] {
        let x: Vec<f32> = (0..5000).map(|i| size * (1.0 + (i % 7) as f32)).collect();
        let x = Tensor::from_slice(&Device::Cpu, &[x.len()], &x).unwrap();
        parity(&[x], Tolerance::Steps(DType::F32, 1.0), |x| Ok(vec![global_norm(&[&x[0]])?]));
    }
}

#[test]
fn tensors_count_as_one_vector() {
    let tensor = |v: &[f32]| Tensor::from_slice(&Device::Cpu, &[v.len()], v).unwrap();
    let norm = global_norm(&[&tensor(&[2.0, 3.0]), &tensor(&[6.0])]).unwrap();
    assert_eq!(values(&norm), [7.0]);
    let norm = global_norm(&[&tensor(&[2.0, f32::NAN])]).unwrap();
    assert!(values(&norm)[0].is_nan());
}
