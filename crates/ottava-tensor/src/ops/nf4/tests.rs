use super::{dequantize_nf4, quantize_nf4};
use crate::testing::{Tolerance, normals, parity, values};
use crate::{DType, Device, Nf4Tensor, Tensor};

fn of_parts(x: &Nf4Tensor) -> Vec<Tensor> {
    vec![x.codes.clone(), x.scales.clone(), x.groups.clone()]
}

#[test]
fn four_bit_weights_agree_across_devices() {
    for (rows, columns) in [(1, 1), (3, 7), (64, 64), (5, 130), (260, 72)] {
        let mut x = normals("x", &[rows, columns], DType::F32).to_vec::<f32>().unwrap();
        // A block of zeros, and blocks of other magnitudes.
        x.iter_mut().enumerate().for_each(|(i, x)| *x *= [0.0, 1e-3, 1.0, 40.0][i / 64 % 4]);
        let x = Tensor::from_slice(&Device::Cpu, &[rows, columns], &x).unwrap();
        // Values are multiplied in F32 in one order, and a maximum does not depend on the order.
        parity(&[x], Tolerance::Exact, |x| {
            let packed = quantize_nf4(&x[0])?;
            let two = [packed.clone(), packed.clone()];
            let values = [DType::F32, DType::F16, DType::BF16].map(|dtype| dequantize_nf4(&two, dtype));
            of_parts(&packed).into_iter().map(Ok).chain(values).collect()
        });
    }
}

#[test]
fn values_are_near_and_stacked() {
    let (a, b) = (normals("a", &[48, 96], DType::F32), normals("b", &[16, 96], DType::F32));
    let packed = [quantize_nf4(&a).unwrap(), quantize_nf4(&b).unwrap()];
    let stacked = values(&dequantize_nf4(&packed, DType::F32).unwrap());
    let expected: Vec<f64> = values(&a).into_iter().chain(values(&b)).collect();
    // The largest distance between neighbouring values is 0.304, so an element is off by at most 0.152 of its block's amax, plus the error of the amax.
    for (block, (got, expected)) in stacked.chunks(64).zip(expected.chunks(64)).enumerate() {
        let amax = expected.iter().fold(0.0, |amax: f64, x| amax.max(x.abs()));
        let error = got.iter().zip(expected).fold(0.0, |error: f64, (a, b)| error.max((a - b).abs()));
        assert!(error < 0.18 * amax, "block {block}: {error} of {amax}");
    }
    let first = values(&dequantize_nf4(&packed[..1], DType::F32).unwrap());
    assert_eq!(first, stacked[..48 * 96], "each matrix has its own scales");
    assert!(dequantize_nf4(&[], DType::F32).unwrap_err().to_string().contains("dequantize_nf4"));
    let other = quantize_nf4(&normals("c", &[2, 95], DType::F32)).unwrap();
    let error = dequantize_nf4(&[packed[0].clone(), other], DType::F32).unwrap_err().to_string();
    assert!(error.contains("[48, 96]") && error.contains("[2, 95]"), "{error}");
}

#[test]
fn values_that_are_not_finite_are_errors() {
    for wrong in [f32::NAN, f32::INFINITY, f32::NEG_INFINITY] {
        for at in [0, 3, 63, 70] {
            let mut x = vec![1f32; 128];
            x[at] = wrong;
            let x = Tensor::from_slice(&Device::Cpu, &[2, 64], &x).unwrap();
            assert!(quantize_nf4(&x).unwrap_err().to_string().contains("not finite"), "{wrong} at {at}");
        }
    }
}

#[test]
fn zeros_stay_zeros() {
    let zeros = Tensor::zeros(&Device::Cpu, &[4, 64], DType::F32).unwrap();
    let packed = quantize_nf4(&zeros).unwrap();
    assert!(values(&dequantize_nf4(&[packed], DType::F32).unwrap()).iter().all(|x| *x == 0.0));
}
