use super::*;
use crate::testing::{Tolerance, assert_gradient, dot, normals, parity, values};
use crate::{DType, Device};

fn alphas(positive: f64, negative: f64, dtype: DType) -> [Tensor; 2] {
    [positive, negative].map(|alpha| {
        let alpha = Tensor::from_slice(&Device::Cpu, &[1], &[alpha]).unwrap();
        if dtype == DType::F64 { alpha } else { crate::ops::cast(&alpha, dtype).unwrap() }
    })
}

fn of<'a>([positive, negative]: &'a [Tensor; 2]) -> XieluAlphas<'a> {
    XieluAlphas { positive, negative }
}

#[test]
fn values_follow_the_formula() {
    let inputs = [-3.0, -1e-3, -1e-7, 0.0, 1e-3, 2.0];
    let x = Tensor::from_slice(&Device::Cpu, &[6], &inputs).unwrap();
    let y = values(&xielu(&x, of(&alphas(0.3, -0.8, DType::F64))).unwrap());
    let softplus = |a: f64| a.exp().ln_1p();
    let (p, n) = (softplus(0.3), 0.5 + softplus(-0.8));
    for (x, y) in inputs.into_iter().zip(y) {
        let curved = if x > 0.0 { p * x * x } else { n * (x.min(-1e-6).exp_m1() - x) };
        assert!((y - curved - 0.5 * x).abs() < 1e-15, "{x}: {y}");
    }
}

#[test]
fn backward_is_the_gradient() {
    let [x, dy] = ["x", "dy"].map(|name| normals(name, &[7, 5], DType::F64));
    let own = alphas(0.3, -0.8, DType::F64);
    let loss = |x: &Tensor, own: &[Tensor; 2]| dot(&values(&xielu(x, of(own)).unwrap()), &values(&dy));
    let mut sums = [1.0, 2.0].map(|before| Tensor::from_slice(&Device::Cpu, &[1], &[before]).unwrap());
    let [dp, dn] = &mut sums;
    let dx = xielu_backward(&dy, &x, of(&own), [dp, dn]).unwrap();
    assert_gradient("x", &x, &dx, |x| loss(x, &own));
    let [p, n] = &own;
    let added = |sum: &Tensor, before: f64| Tensor::from_slice(&Device::Cpu, &[1], &[values(sum)[0] - before]).unwrap();
    assert_gradient("alpha_p", p, &added(&sums[0], 1.0), |p| loss(&x, &[p.clone(), n.clone()]));
    assert_gradient("alpha_n", n, &added(&sums[1], 2.0), |n| loss(&x, &[p.clone(), n.clone()]));
}

#[test]
fn xielu_agrees_across_devices() {
    for (dtype, shape) in [(DType::F32, [3, 7]), (DType::BF16, [129, 257])] {
        let [p, n] = alphas(0.3, -0.8, dtype);
        let inputs = [normals("x", &shape, dtype), normals("dy", &shape, dtype), p, n];
        // Exponentials differ by some roundings of F32, and a GPU adds the sums of the alphas in another order.
        parity(&inputs, Tolerance::Steps(DType::F32, 512.0), |t| {
            let alphas = XieluAlphas { positive: &t[2], negative: &t[3] };
            let zeros = || Tensor::zeros(t[0].device(), &[1], DType::F32);
            let (mut dp, mut dn) = (zeros()?, zeros()?);
            xielu_backward(&t[1], &t[0], alphas, [&mut dp, &mut dn])?;
            Ok(vec![dp, dn])
        });
        // A value near a rounding boundary of the type may be rounded to either side.
        parity(&inputs, Tolerance::Steps(dtype, 2.0), |t| {
            let alphas = XieluAlphas { positive: &t[2], negative: &t[3] };
            let zeros = || Tensor::zeros(t[0].device(), &[1], DType::F32);
            let dx = xielu_backward(&t[1], &t[0], alphas, [&mut zeros()?, &mut zeros()?])?;
            Ok(vec![xielu(&t[0], alphas)?, dx])
        });
    }
}

#[test]
fn misfits_are_errors() {
    let x = normals("x", &[2, 3], DType::F32);
    let wide = normals("alpha", &[2], DType::F32);
    assert!(xielu(&x, XieluAlphas { positive: &wide, negative: &wide }).is_err());
}
