use super::*;
use crate::DType;
use crate::ops::{NormWeights, Output, norm_to};
use crate::testing::{Tolerance, normals, parity, values};

const EPS: f64 = 1e-6;
const KINDS: [NormKind; 3] = [NormKind::Rms, NormKind::RmsPlusOne, NormKind::Layer];

fn inputs(rows: usize, layout: HeadNormLayout, dtype: DType) -> [Tensor; 4] {
    let (shape, [of_q, of_k]) = ([rows, layout.all() * layout.head_dim], layout.weights());
    [
        normals("x", &shape, dtype),
        normals("dy", &shape, dtype),
        normals("q", &[of_q], dtype),
        normals("k", &[of_k], dtype),
    ]
}

#[test]
fn head_norm_agrees_across_devices() {
    // Heads that fill a group of threads, and heads that do not; numbers of rows that do not fill the last group.
    let sizes =
        [(1, 1, 1, 8), (7, 3, 1, 16), (33, 4, 2, 64), (130, 16, 8, 128), (5, 2, 1, 256), (9, 3, 3, 6), (3, 2, 1, 80)];
    for ((rows, heads, kv_heads, head_dim), kind) in sizes.into_iter().flat_map(|sizes| KINDS.map(|kind| (sizes, kind)))
    {
        let layout = HeadNormLayout { heads, kv_heads, head_dim, kind };
        for dtype in [DType::F32, DType::F16, DType::BF16] {
            // Sums in another order move a rounding by one step. The gradient of a weight sums many rows.
            let steps = if dtype == DType::F32 { 64.0 } else { 1.0 };
            parity(&inputs(rows, layout, dtype), Tolerance::Steps(dtype, steps), |t| {
                let weights = HeadNormWeights { q: &t[2], k: &t[3] };
                let zeros = |len| Tensor::zeros(t[0].device(), &[len], DType::F32);
                let [of_q, of_k] = layout.weights();
                let (mut dq, mut dk) = (zeros(of_q)?, zeros(of_k)?);
                let y = head_norm(&t[0], weights, layout, EPS)?;
                let dx = head_norm_backward(&t[1], &t[0], weights, layout, EPS, &mut dq, &mut dk)?;
                Ok(vec![y, dx, dq, dk])
            });
        }
    }
}

/// Views may begin at any element.
#[test]
fn unaligned_heads_agree_across_devices() {
    let layout = HeadNormLayout { heads: 1, kv_heads: 1, head_dim: 256, kind: NormKind::Rms };
    let inputs = ["x", "dy", "q", "k"].map(|name| normals(name, &[1 + 3 * 256], DType::BF16));
    // As in `head_norm_agrees_across_devices`.
    parity(&inputs, Tolerance::Steps(DType::BF16, 1.0), |t| {
        let [x, dy] = [0, 1].map(|i| t[i].rows(1, 1 + 3 * 256).and_then(|x| x.reshape(&[1, 3 * 256])));
        let (x, dy, q, k) = (x?, dy?, t[2].rows(1, 257)?, t[3].rows(1, 257)?);
        let weights = HeadNormWeights { q: &q, k: &k };
        let zeros = || Tensor::zeros(x.device(), &[256], DType::F32);
        let (mut dq, mut dk) = (zeros()?, zeros()?);
        let dx = head_norm_backward(&dy, &x, weights, layout, EPS, &mut dq, &mut dk)?;
        Ok(vec![head_norm(&x, weights, layout, EPS)?, dx, dq, dk])
    });
}

/// Each query and key head is normalised like a row of RMSNorm. Value heads do not change.
#[test]
fn head_norm_is_rmsnorm_of_each_head() {
    for kind in [NormKind::Rms, NormKind::RmsPlusOne] {
        let layout = HeadNormLayout { heads: 3, kv_heads: 2, head_dim: 10, kind };
        let [x, _, q, k] = inputs(4, layout, DType::F64);
        let y = values(&head_norm(&x, HeadNormWeights { q: &q, k: &k }, layout, EPS).unwrap());
        let rows = x.reshape(&[4 * layout.all(), 10]).unwrap();
        let [of_q, of_k] = [&q, &k].map(|weight| {
            let weights = NormWeights { kind, weight, bias: None };
            values(&norm_to(&rows, weights, EPS, Output::Plain).unwrap().0.plain().unwrap())
        });
        let x = values(&x);
        for (head, y) in y.chunks(10).enumerate() {
            let expected = match head % layout.all() {
                0..3 => &of_q,
                3..5 => &of_k,
                _ => &x,
            };
            assert_eq!(y, &expected[head * 10..][..10], "head {head}, {kind:?}");
        }
    }
}

/// Each query and key head is normalised like a row of LayerNorm, with a separate weight. Value heads do not change.
#[test]
fn head_norm_may_be_a_layernorm_of_each_head() {
    let layout = HeadNormLayout { heads: 3, kv_heads: 2, head_dim: 10, kind: NormKind::Layer };
    let [x, _, q, k] = inputs(4, layout, DType::F64);
    let y = values(&head_norm(&x, HeadNormWeights { q: &q, k: &k }, layout, EPS).unwrap());
    let rows = x.reshape(&[4 * layout.all(), 10]).unwrap();
    let weights: Vec<f64> = values(&q).into_iter().chain(values(&k)).collect();
    for (head, y) in y.chunks(10).enumerate() {
        let row = rows.rows(head, head + 1).unwrap();
        let expected = match weights.chunks(10).nth(head % layout.all()) {
            Some(weight) => {
                let weight = Tensor::from_slice(x.device(), &[10], weight).unwrap();
                let how = NormWeights { kind: NormKind::Layer, weight: &weight, bias: None };
                norm_to(&row, how, EPS, Output::Plain).unwrap().0.plain().unwrap()
            }
            None => row,
        };
        assert_eq!(y, values(&expected), "head {head}");
    }
}

#[test]
fn misfits_are_errors() {
    let layout = HeadNormLayout { heads: 3, kv_heads: 2, head_dim: 10, kind: NormKind::Rms };
    let [x, _, q, k] = inputs(4, layout, DType::F32);
    let wrong = HeadNormLayout { heads: 4, ..layout };
    assert!(head_norm(&x, HeadNormWeights { q: &q, k: &k }, wrong, EPS).is_err());
    assert!(head_norm(&x, HeadNormWeights { q: &x, k: &k }, layout, EPS).is_err());
}
