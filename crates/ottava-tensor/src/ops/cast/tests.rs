use super::cast;
use crate::testing::{Tolerance, normals, parity, values};
use crate::{DType, Device, Tensor};

const TYPES: [DType; 3] = [DType::F32, DType::F16, DType::BF16];

#[test]
fn cast_agrees_across_devices() {
    for from in TYPES {
        for to in TYPES {
            for n in [1, 255, 1021] {
                parity(&[normals("cast", &[n], from)], Tolerance::Exact, |x| Ok(vec![cast(&x[0], to)?]));
            }
        }
    }
}

#[test]
fn every_bf16_and_f16_survives_the_way_through_f32() {
    let bits: Vec<u16> = (0..=u16::MAX).collect();
    for dtype in [DType::BF16, DType::F16] {
        let x = Tensor::from_bytes(&Device::Cpu, &[bits.len()], dtype, bytemuck::cast_slice(&bits)).unwrap();
        let back = cast(&cast(&x, DType::F32).unwrap(), dtype).unwrap();
        for (i, (a, b)) in values(&x).into_iter().zip(values(&back)).enumerate() {
            assert!(a.to_bits() == b.to_bits() || (a.is_nan() && b.is_nan()), "{dtype} {i:#06x}: {a} came back as {b}");
        }
    }
}

#[test]
fn rounding_is_to_nearest_even() {
    // Below, at and above the midpoint of 1 and the next BF16, 1 + 2^-7; and the midpoint after an odd code.
    let x = [1.0 + 0.4 / 128.0, 1.0 + 0.5 / 128.0, 1.0 + 0.6 / 128.0, 1.0 + 1.5 / 128.0];
    let y = cast(&Tensor::from_slice(&Device::Cpu, &[4], &x).unwrap(), DType::BF16).unwrap();
    assert_eq!(values(&y), [1.0, 1.0, 1.0 + 1.0 / 128.0, 1.0 + 2.0 / 128.0]);
}
