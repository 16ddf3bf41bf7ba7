use super::*;
use crate::testing::{Tolerance, assert_gradient, dot, dry_gpu, normals, parity, values};
use crate::{DType, Device};

const ORDERS: [GateOrder; 2] = [GateOrder::AfterNorm, GateOrder::BeforeNorm];

fn of(size: usize, order: GateOrder) -> GatedNorm {
    GatedNorm { size, order, eps: 1e-6 }
}

fn inputs(tokens: usize, width: usize, weights: usize) -> [Tensor; 3] {
    let matrix = |name| normals(name, &[tokens, width], DType::F64);
    [matrix("x"), matrix("z"), normals("weight", &[weights], DType::F64)]
}

/// Returns the results of both passes for `[x, z, weight, dy]`.
fn both_passes(t: &[Tensor], how: GatedNorm) -> Result<Vec<Tensor>> {
    let mut dweight = Tensor::zeros(t[0].device(), t[2].shape(), DType::F32)?;
    let y = gated_norm(&t[0], &t[1], &t[2], how)?;
    let [dx, dz] = gated_norm_backward(&t[3], &t[0], &t[1], &t[2], how, &mut dweight)?;
    Ok(vec![y, dx, dz, dweight])
}

/// Returns the tolerance for results in `dtype`. Sums in another order move a rounding by one step. The gradient of the weight sums many heads. In wide
/// groups, an H200 differs by 76 steps of F32.
fn tolerance(dtype: DType) -> Tolerance {
    Tolerance::Steps(dtype, if dtype == DType::F32 { 128.0 } else { 1.0 })
}

#[test]
fn gated_norm_agrees_across_devices() {
    // Heads that fill a group of threads, and heads that do not; numbers of heads that do not fill the last group.
    let sizes = [(1, 1, 8), (7, 3, 16), (33, 2, 64), (130, 5, 128), (5, 2, 256), (9, 3, 6), (3, 2, 80), (2, 1, 1)];
    for (rows, heads, dim) in sizes {
        for dtype in [DType::F32, DType::F16, DType::BF16] {
            let matrix = |name| normals(name, &[rows, heads * dim], dtype);
            let inputs = [matrix("x"), matrix("z"), normals("weight", &[dim], dtype), matrix("dy")];
            for order in ORDERS {
                parity(&inputs, tolerance(dtype), |t| both_passes(t, of(dim, order)));
            }
        }
    }
}

/// Groups of a row with their own weights, whose elements fill no piece, no block, or several pieces of a thread.
#[test]
fn wide_groups_agree_across_devices() {
    for (rows, groups, size) in [(3, 2, 6), (70, 2, 96), (5, 3, 257), (9, 1, 3072), (2, 2, 4099)] {
        for (dtype, order) in [(DType::F32, ORDERS[0]), (DType::F32, ORDERS[1]), (DType::BF16, ORDERS[1])] {
            let matrix = |name| normals(name, &[rows, groups * size], dtype);
            let inputs = [matrix("x"), matrix("z"), normals("weight", &[groups * size], dtype), matrix("dy")];
            parity(&inputs, tolerance(dtype), |t| both_passes(t, of(size, order)));
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
            both_passes(&[x?, z?, weight, dy?], of(dim, ORDERS[0]))
        });
    }
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
    let gpu = dry_gpu();
    let [x, weight] = [[2, 57345].as_slice(), &[57345]].map(|shape| Tensor::zeros(&gpu, shape, DType::BF16).unwrap());
    let error = gated_norm(&x, &x, &weight, of(57345, ORDERS[0])).map(drop).unwrap_err().to_string();
    assert!(error.contains("groups of 57345 elements, 57344 are the most on a GPU"), "{error}");
}
