use super::sum_parts;
use crate::ops::add;
use crate::testing::{Tolerance, normals, parity, values};
use crate::{DType, Device, Tensor};

#[test]
fn sums_agree_across_devices() {
    for (parts, rows, columns) in [(1, 3, 8), (2, 5, 7), (2, 64, 256), (4, 33, 40), (8, 9, 1)] {
        for dtype in [DType::F32, DType::F16, DType::BF16] {
            let others = normals("parts", &[parts - 1, rows, columns], dtype);
            let inputs = [normals("own", &[rows, columns], dtype), others, normals("x", &[rows, columns], dtype)];
            for place in 0..parts {
                let sums = [false, true].map(|adds| (place, adds));
                parity(&inputs, Tolerance::Exact, |x| {
                    sums.iter().map(|&(place, adds)| sum_parts(&x[0], place, &x[1], adds.then_some(&x[2]))).collect()
                });
            }
        }
    }
}

/// Rounding after each of the two additions would give another result.
#[test]
fn a_sum_is_rounded_once() {
    let of = |shape: &[usize], values: &[f32]| {
        let exact = Tensor::from_slice(&Device::Cpu, shape, values).unwrap();
        crate::ops::cast(&exact, DType::BF16).unwrap()
    };
    // 256 + 1 is halfway between two BF16 numbers.
    let (first, second, addend) = (of(&[1, 1], &[256.0]), of(&[1, 1], &[1.0]), of(&[1, 1], &[0.0625]));
    assert_eq!(values(&sum_parts(&first, 0, &second, Some(&addend)).unwrap()), [258.0]);
    assert_eq!(values(&add(&add(&first, &second).unwrap(), &addend).unwrap()), [256.0]);
}

/// In F32, sums of 2^25, 1 and -2^25 depend on the order: only the sum that adds 1 last keeps it.
#[test]
fn parts_are_added_in_their_order() {
    let of = |shape: &[usize], values: &[f32]| Tensor::from_slice(&Device::Cpu, shape, values).unwrap();
    let (own, others) = (of(&[1, 1], &[1.0]), of(&[2, 1, 1], &[33_554_432.0, -33_554_432.0]));
    let sums = [0, 1, 2].map(|place| values(&sum_parts(&own, place, &others, None).unwrap())[0]);
    assert_eq!(sums, [0.0, 0.0, 1.0]);
}

#[test]
fn misfits_are_errors() {
    let zeros = |shape: &[usize]| Tensor::zeros(&Device::Cpu, shape, DType::F32).unwrap();
    let error =
        |place, others: &[usize]| sum_parts(&zeros(&[2, 2]), place, &zeros(others), None).unwrap_err().to_string();
    assert!(error(0, &[3]).contains("3 elements beside part 0, of 4 elements"));
    assert!(error(2, &[1, 2, 2]).contains("beside part 2"));
}
