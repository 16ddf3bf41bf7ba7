use super::{cast, cast_into};
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
fn cast_into_agrees_across_devices() {
    for (from, to) in [(DType::BF16, DType::F32), (DType::F32, DType::BF16), (DType::F32, DType::F32)] {
        for (n, first, room) in [(1, 0, 1), (255, 3, 300), (1024, 8, 1032), (0, 5, 5)] {
            let inputs = [normals("cast into", &[n], from), normals("before", &[room], to)];
            parity(&inputs, Tolerance::Exact, |x| {
                let mut y = x[1].duplicate()?;
                cast_into(&x[0], &mut y, first)?;
                assert_eq!(values(&y)[..first], values(&x[1])[..first]);
                assert_eq!(values(&y)[first..first + n], values(&cast(&x[0], to)?));
                assert_eq!(values(&y)[first + n..], values(&x[1])[first + n..]);
                Ok(vec![y])
            });
        }
    }
    let (x, mut y) = (normals("x", &[3], DType::F32), normals("y", &[2, 3], DType::F32));
    assert!(cast_into(&x, &mut y, 4).unwrap_err().to_string().contains("do not fit into [2, 3] from 4 on"));
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
    // Values below, at and above the midpoint of 1 and the next BF16 value, 1 + 2^-7, and the midpoint after an odd code.
    let x = [1.0 + 0.4 / 128.0, 1.0 + 0.5 / 128.0, 1.0 + 0.6 / 128.0, 1.0 + 1.5 / 128.0];
    let y = cast(&Tensor::from_slice(&Device::Cpu, &[4], &x).unwrap(), DType::BF16).unwrap();
    assert_eq!(values(&y), [1.0, 1.0, 1.0 + 1.0 / 128.0, 1.0 + 2.0 / 128.0]);
}
