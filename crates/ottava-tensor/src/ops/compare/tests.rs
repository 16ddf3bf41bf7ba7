use super::{SUMS, compare};
use crate::testing::{Tolerance, normals, parity};
use crate::{DType, Device, Result, Tensor};

fn sums(x: &Tensor, reference: &Tensor) -> Result<Tensor> {
    let mut sums = Tensor::zeros(x.device(), &[2, SUMS], DType::F64)?;
    compare(x, reference, &mut sums, 1)?;
    Ok(sums)
}

#[test]
fn sums_are_those_of_the_definition() {
    for dtype in [DType::F32, DType::F64, DType::BF16] {
        let tensor = |values: &[f64]| {
            let x = Tensor::from_slice(&Device::Cpu, &[values.len()], values).unwrap();
            crate::ops::cast(&x, dtype).unwrap()
        };
        let (x, r) = (tensor(&[1.0, 2.0, -3.0]), tensor(&[1.0, 3.0, 1.0]));
        assert_eq!(sums(&x, &r).unwrap().to_vec::<f64>().unwrap(), [0.0, 0.0, 0.0, 0.0, 14.0, 11.0, 4.0, 17.0]);
    }
}

#[test]
fn sums_agree_across_devices() {
    for dtype in [DType::F32, DType::BF16] {
        for shape in [[1, 1], [7, 13], [64, 1000], [513, 1031]] {
            let inputs = [normals("x", &shape, dtype), normals("r", &shape, dtype)];
            // F64 sums in another order.
            parity(&inputs, Tolerance::Steps(DType::F64, 4096.0), |x| Ok(vec![sums(&x[0], &x[1])?]));
            // A slice that is not aligned.
            parity(&inputs, Tolerance::Steps(DType::F64, 4096.0), |x| {
                let [x, r] = [&x[0], &x[1]].map(|x| x.reshape(&[x.len()]).and_then(|x| x.rows(x.len() / 2, x.len())));
                Ok(vec![sums(&x?, &r?)?])
            });
        }
    }
}

#[test]
fn wrong_sizes_are_errors() {
    let (x, r) = (normals("x", &[4, 8], DType::BF16), normals("r", &[4, 9], DType::BF16));
    assert!(sums(&x, &r).unwrap_err().to_string().contains("[4, 8] and its reference of shape [4, 9]"));
    let mut sums = Tensor::zeros(x.device(), &[1, SUMS], DType::F64).unwrap();
    assert!(compare(&x, &x, &mut sums, 1).unwrap_err().to_string().contains("row 1 is beyond"));
}
