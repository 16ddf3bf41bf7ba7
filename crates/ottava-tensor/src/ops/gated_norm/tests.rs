use super::*;
use crate::testing::{Tolerance, assert_gradient, dot, dry_gpu, normals, parity, values};
use crate::{DType, Device};

const EPS: f64 = 1e-6;

fn inputs(tokens: usize, heads: usize, dim: usize) -> [Tensor; 3] {
    let matrix = |name| normals(name, &[tokens, heads * dim], DType::F64);
    [matrix("x"), matrix("z"), normals("weight", &[dim], DType::F64)]
}

/// Returns the results of both passes for `[x, z, weight, dy]`.
fn both_passes(t: &[Tensor]) -> Result<Vec<Tensor>> {
    let mut dweight = Tensor::zeros(t[0].device(), t[2].shape(), DType::F32)?;
    let y = gated_norm(&t[0], &t[1], &t[2], EPS)?;
    let [dx, dz] = gated_norm_backward(&t[3], &t[0], &t[1], &t[2], EPS, &mut dweight)?;
    Ok(vec![y, dx, dz, dweight])
}

/// Returns the tolerance for results in `dtype`. Sums in another order move a rounding by one step. The gradient of the weight sums many heads.
fn tolerance(dtype: DType) -> Tolerance {
    Tolerance::Steps(dtype, if dtype == DType::F32 { 64.0 } else { 1.0 })
}

#[test]
fn gated_norm_agrees_across_devices() {
    // Heads that fill a group of threads, and heads that do not; numbers of heads that do not fill the last group.
    let sizes = [(1, 1, 8), (7, 3, 16), (33, 2, 64), (130, 5, 128), (5, 2, 256), (9, 3, 6), (3, 2, 80), (2, 1, 1)];
    for (rows, heads, dim) in sizes {
        for dtype in [DType::F32, DType::F16, DType::BF16] {
            let matrix = |name| normals(name, &[rows, heads * dim], dtype);
            let inputs = [matrix("x"), matrix("z"), normals("weight", &[dim], dtype), matrix("dy")];
            parity(&inputs, tolerance(dtype), both_passes);
        }
    }
}

/// Views may begin at any element.
#[test]
fn unaligned_heads_agree_across_devices() {
    for dim in [64, 256] {
        let inputs = ["x", "z", "weight", "dy"].map(|name| normals(name, &[1 + 3 * dim], DType::BF16));
        parity(&inputs, tolerance(DType::BF16), |t| {
            let weight = t[2].rows(1, 1 + dim)?;
            let [x, z, dy] = [0, 1, 3].map(|i| t[i].rows(1, 1 + 3 * dim).and_then(|x| x.reshape(&[3, dim])));
            both_passes(&[x?, z?, weight, dy?])
        });
    }
}

#[test]
fn heads_are_normalised_before_the_gate() {
    let [x, z, weight] = inputs(4, 3, 5);
    let y = values(&gated_norm(&x, &z, &weight, EPS).unwrap());
    let [x, z, weight] = [&x, &z, &weight].map(values);
    for (head, y) in y.chunks(5).enumerate() {
        let (x, z) = (&x[head * 5..][..5], &z[head * 5..][..5]);
        let rstd = 1.0 / (dot(x, x) / 5.0 + EPS).sqrt();
        for i in 0..5 {
            let expected = x[i] * rstd * weight[i] * z[i] / (1.0 + (-z[i]).exp());
            assert!((y[i] - expected).abs() < 1e-14, "head {head}, element {i}");
        }
    }
}

#[test]
fn backward_is_the_gradient() {
    // More rows than a partial sum has.
    let [x, z, weight] = inputs(70, 2, 3);
    let dy = normals("dy", x.shape(), DType::F64);
    let loss =
        |x: &Tensor, z: &Tensor, weight: &Tensor| dot(&values(&gated_norm(x, z, weight, EPS).unwrap()), &values(&dy));
    let mut dweight = Tensor::zeros(&Device::Cpu, &[3], DType::F64).unwrap();
    let [dx, dz] = gated_norm_backward(&dy, &x, &z, &weight, EPS, &mut dweight).unwrap();
    assert_gradient("x", &x, &dx, |x| loss(x, &z, &weight));
    assert_gradient("z", &z, &dz, |z| loss(&x, z, &weight));
    assert_gradient("weight", &weight, &dweight, |weight| loss(&x, &z, weight));
}

#[test]
fn misfits_are_errors() {
    let [x, z, _] = inputs(4, 3, 5);
    let wrong = normals("weight", &[4], DType::F64);
    let error = gated_norm(&x, &z, &wrong, EPS).unwrap_err().to_string();
    assert!(error.contains("rows of 15 elements do not divide into heads of 4"), "{error}");
    let gpu = dry_gpu();
    let [x, weight] = [[2, 257].as_slice(), &[257]].map(|shape| Tensor::zeros(&gpu, shape, DType::BF16).unwrap());
    let error = gated_norm(&x, &x, &weight, EPS).unwrap_err().to_string();
    assert!(error.contains("heads of 257 elements, 256 are the most on a GPU"), "{error}");
}
