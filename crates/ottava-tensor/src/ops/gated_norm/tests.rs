use super::*;
use crate::testing::{assert_gradient, dot, normals, values};
use crate::{DType, Device};

const EPS: f64 = 1e-6;

fn inputs(tokens: usize, heads: usize, dim: usize) -> [Tensor; 3] {
    let matrix = |name| normals(name, &[tokens, heads * dim], DType::F64);
    [matrix("x"), matrix("z"), normals("weight", &[dim], DType::F64)]
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
}
