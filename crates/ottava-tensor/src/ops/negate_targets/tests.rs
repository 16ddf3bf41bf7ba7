use super::{IGNORE_INDEX, negate_targets};
use crate::testing::{Tolerance, normals, parity, values};
use crate::{DType, Device, Tensor};

fn targets(tokens: usize, device: &Device) -> Tensor {
    let ids: Vec<i32> = (0..tokens).map(|t| if t % 3 == 0 { IGNORE_INDEX } else { t as i32 % 2 }).collect();
    Tensor::from_slice(device, &[tokens], &ids).unwrap()
}

#[test]
fn negated_targets_agree_across_devices() {
    for tokens in [1, 255, 4097] {
        for out in [DType::F32, DType::BF16, DType::F16] {
            for len in [1, tokens] {
                parity(&[normals("x", &[len], DType::F32)], Tolerance::Exact, |x| {
                    Ok(vec![negate_targets(&x[0], &targets(tokens, x[0].device()), out)?])
                });
            }
        }
    }
}

#[test]
fn tokens_without_a_target_are_zero() {
    let x = Tensor::from_slice(&Device::Cpu, &[4], &[1.0, 2.0, 3.0, 4.0]).unwrap();
    let targets = targets(4, &Device::Cpu);
    assert_eq!(values(&negate_targets(&x, &targets, DType::F64).unwrap()), [0.0, -2.0, -3.0, 0.0]);
    let one = x.rows(1, 2).unwrap();
    assert_eq!(values(&negate_targets(&one, &targets, DType::F64).unwrap()), [0.0, -2.0, -2.0, 0.0]);
    assert!(negate_targets(&x.rows(0, 3).unwrap(), &targets, DType::F64).is_err());
}
