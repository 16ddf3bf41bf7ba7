use super::*;
use crate::testing::{assert_gradient, dot, normals, values};
use crate::{DType, Device};

const ORDERS: [GateOrder; 2] = [GateOrder::AfterNorm, GateOrder::BeforeNorm];

fn of(size: usize, order: GateOrder) -> GatedNorm {
    GatedNorm { size, order, eps: 1e-6 }
}

fn inputs(tokens: usize, width: usize, weights: usize) -> [Tensor; 3] {
    let matrix = |name| normals(name, &[tokens, width], DType::F64);
    [matrix("x"), matrix("z"), normals("weight", &[weights], DType::F64)]
}

#[test]
fn groups_are_normalised_before_or_after_the_gate() {
    for (order, weights) in [(ORDERS[0], 5), (ORDERS[0], 15), (ORDERS[1], 5), (ORDERS[1], 15)] {
        let [x, z, weight] = inputs(4, 15, weights);
        let how = of(5, order);
        let y = values(&gated_norm(&x, &z, &weight, how).unwrap());
        let [x, z, weight] = [&x, &z, &weight].map(values);
        let gate = |i: usize| z[i] / (1.0 + (-z[i]).exp());
        let before = |i: usize| if order == GateOrder::BeforeNorm { gate(i) } else { 1.0 };
        let after = |i: usize| if order == GateOrder::AfterNorm { gate(i) } else { 1.0 };
        for (i, y) in y.iter().enumerate() {
            let group: Vec<f64> = (i / 5 * 5..i / 5 * 5 + 5).map(|i| x[i] * before(i)).collect();
            let rstd = 1.0 / (dot(&group, &group) / 5.0 + how.eps).sqrt();
            let expected = group[i % 5] * rstd * weight[i % weights] * after(i);
            assert!((y - expected).abs() < 1e-14, "{order:?}, {weights} weights, element {i}");
        }
    }
}

#[test]
fn backward_is_the_gradient() {
    for (order, weights) in [(ORDERS[0], 3), (ORDERS[1], 3), (ORDERS[1], 6)] {
        // More rows than a partial sum has.
        let ([x, z, weight], how) = (inputs(70, 6, weights), of(3, order));
        let dy = normals("dy", x.shape(), DType::F64);
        let loss = |x: &Tensor, z: &Tensor, weight: &Tensor| {
            dot(&values(&gated_norm(x, z, weight, how).unwrap()), &values(&dy))
        };
        let mut dweight = Tensor::zeros(&Device::Cpu, &[weights], DType::F64).unwrap();
        let [dx, dz] = gated_norm_backward(&dy, &x, &z, &weight, how, &mut dweight).unwrap();
        assert_gradient("x", &x, &dx, |x| loss(x, &z, &weight));
        assert_gradient("z", &z, &dz, |z| loss(&x, z, &weight));
        assert_gradient("weight", &weight, &dweight, |weight| loss(&x, &z, weight));
    }
}

#[test]
fn misfits_are_errors() {
    let [x, z, weight] = inputs(4, 15, 4);
    let error = |size| gated_norm(&x, &z, &weight, of(size, ORDERS[0])).map(drop).unwrap_err().to_string();
    assert!(error(4).contains("rows of 15 elements do not divide into groups of 4"));
    assert!(error(5).contains("4 weights; rows of 15 elements in groups of 5 have 5 or 15"));
}
