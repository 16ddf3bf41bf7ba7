use super::sum_parts;
use crate::ops::add;
use crate::testing::{Tolerance, normals, parity, values};
use crate::{DType, Device, Tensor};

#[test]
fn sums_agree_across_devices() {
    for (parts, rows, columns) in [(1, 3, 8), (2, 5, 7), (2, 64, 256), (4, 33, 40), (8, 9, 1)] {
        for dtype in [DType::F32, DType::F16, DType::BF16] {
            let inputs = [normals("parts", &[parts, rows, columns], dtype), normals("x", &[rows, columns], dtype)];
            parity(&inputs, Tolerance::Exact, |x| Ok(vec![sum_parts(&x[0], None)?, sum_parts(&x[0], Some(&x[1]))?]));
        }
    }
}

/// Two rounded additions would differ.
#[test]
fn a_sum_is_rounded_once() {
    let of = |shape: &[usize], values: &[f32]| {
        let exact = Tensor::from_slice(&Device::Cpu, shape, values).unwrap();
        crate::ops::cast(&exact, DType::BF16).unwrap()
    };
    // 256 + 1 is halfway between two BF16 numbers.
    let (parts, addend) = (of(&[2, 1, 1], &[256.0, 1.0]), of(&[1, 1], &[0.0625]));
    assert_eq!(values(&sum_parts(&parts, Some(&addend)).unwrap()), [258.0]);
    let part = |i| parts.rows(i, i + 1).unwrap().reshape(&[1, 1]).unwrap();
    assert_eq!(values(&add(&add(&part(0), &part(1)).unwrap(), &addend).unwrap()), [256.0]);
}

#[test]
fn no_parts_are_an_error() {
    let none = Tensor::zeros(&Device::Cpu, &[0, 2, 2], DType::F32).unwrap();
    assert!(sum_parts(&none, None).unwrap_err().to_string().contains("no parts"));
}
