//! Tests of each field of a spec and of an input: against the definition with materialised probabilities, by finite differences, by merging the
//! results of parts of the keys, and by comparing the general kernels with the CPU.

use super::*;
use crate::Device;

/// The tolerance of averages and logarithms of sums of a few keys in F64. They differ by some units of 2⁻⁵³ of values near 1; up to 7e-16 was seen.
const ROUNDING: f64 = 1e-12;

/// The sizes of a call with separate tensors for queries, keys and values.
#[derive(Clone, Copy, Debug)]
struct Case {
    spec: AttentionSpec,
    batch: usize,
    queries: usize,
    keys: usize,
    first_query: usize,
    documents: &'static [i32],
}

impl Case {
    fn new(batch: usize, queries: usize, keys: usize, first_query: usize) -> Case {
        // All sizes differ where possible, so that an exchange of two sizes is detected.
        let spec = AttentionSpec { value_dim: 5, scale: 0.7, ..AttentionSpec::causal(4, 2, 3) };
        Case { spec, batch, queries, keys, first_query, documents: &[] }
    }

    fn with(self, change: impl FnOnce(&mut AttentionSpec)) -> Case {
        let mut spec = self.spec;
        change(&mut spec);
        Case { spec, ..self }
    }

    /// Returns random queries, keys, values and a gradient of the output.
    fn inputs(&self, dtype: DType) -> [Tensor; 4] {
        let (queries, keys) = (self.batch * self.queries, self.batch * self.keys);
        let spec = self.spec;
        [
            normals("q", &[queries, spec.query_width()], dtype),
            normals("k", &[keys, spec.key_width()], dtype),
            normals("v", &[keys, spec.value_width()], dtype),
            normals("do", &[queries, spec.output_width()], dtype),
        ]
    }

    fn cu_seqlens(&self, device: &Device) -> Option<Tensor> {
        (!self.documents.is_empty())
            .then(|| Tensor::from_slice(device, &[self.documents.len()], self.documents).unwrap())
    }

    fn input<'a>(&self, x: &'a [Tensor], cu_seqlens: Option<&'a Tensor>) -> AttentionInput<'a> {
        let [q, k, v] = [0, 1, 2].map(|i| HeadView::whole(&x[i]));
        AttentionInput { q, k, v, batch: self.batch, first_query: self.first_query, cu_seqlens }
    }

    fn forward(&self, x: &[Tensor]) -> Result<(Tensor, Tensor)> {
        let cu_seqlens = self.cu_seqlens(x[0].device());
        attention(self.input(x, cu_seqlens.as_ref()), &self.spec)
    }

    fn backward(&self, x: &[Tensor], o: &Tensor, lse: &Tensor) -> Result<Vec<Tensor>> {
        let cu_seqlens = self.cu_seqlens(x[0].device());
        Ok(attention_backward(&x[3], self.input(x, cu_seqlens.as_ref()), o, lse, &self.spec)?.tensors())
    }

    /// Returns whether query `i` sees key `j` of sequence `b`.
    fn sees(&self, b: usize, i: usize, j: usize) -> bool {
        let position = self.first_query + i;
        let document =
            |key: usize| self.documents.iter().filter(|&&start| start as usize <= b * self.keys + key).count();
        (!self.spec.causal || j <= position)
            && self.spec.window.is_none_or(|window| j + window > position && j < position + window)
            && (self.documents.is_empty() || document(j) == document(position))
    }
}

fn cases() -> Vec<Case> {
    let documents = Case { documents: &[0, 3, 4, 7, 12, 14, 14], ..Case::new(2, 7, 7, 0) };
    vec![
        Case::new(2, 6, 6, 0),
        Case::new(2, 6, 6, 0).with(|spec| spec.window = Some(3)),
        Case::new(2, 6, 6, 0).with(|spec| spec.window = Some(100)),
        Case::new(2, 6, 6, 0).with(|spec| spec.soft_cap = Some(0.8)),
        Case::new(2, 5, 7, 0).with(|spec| spec.causal = false),
        Case::new(2, 4, 7, 3),
        Case::new(1, 4, 7, 2).with(|spec| (spec.window, spec.soft_cap) = (Some(2), Some(1.5))),
        // The last two queries see no key, because all keys are before their windows.
        Case::new(2, 4, 3, 3).with(|spec| spec.window = Some(3)),
        documents,
        documents.with(|spec| spec.causal = false),
        Case::new(2, 6, 6, 0).with(|spec| (spec.causal, spec.window) = (false, Some(2))),
        Case::new(1, 4, 9, 3).with(|spec| (spec.causal, spec.window) = (false, Some(3))),
        documents.with(|spec| (spec.causal, spec.window) = (false, Some(2))),
        documents.with(|spec| spec.window = Some(2)),
        Case { queries: 3, first_query: 2, ..documents }.with(|spec| spec.soft_cap = Some(0.5)),
    ]
}

/// Compares attention with materialised probabilities in F64.
#[test]
fn every_spec_is_a_softmax_average_of_the_visible_values() {
    for case in cases() {
        let Case { spec, batch, queries, keys, .. } = case;
        let x = case.inputs(DType::F64);
        let (o, lse) = case.forward(&x).unwrap();
        let (o, lse) = (values(&o), values(&lse));
        let [q, k, v] = [0, 1, 2].map(|i| values(&x[i]));
        for (b, i, h) in (0..batch).flat_map(|b| (0..queries).flat_map(move |i| (0..4).map(move |h| (b, i, h)))) {
            let query = &q[((b * queries + i) * 4 + h) * 3..][..3];
            let weight = |j: usize| {
                let key = &k[((b * keys + j) * 2 + h / 2) * 3..][..3];
                let score = spec.scale * query.iter().zip(key).map(|(q, k)| q * k).sum::<f64>();
                spec.soft_cap.map_or(score, |cap| cap * (score / cap).tanh()).exp()
            };
            let weights: Vec<f64> = (0..keys).map(|j| if case.sees(b, i, j) { weight(j) } else { 0.0 }).collect();
            let sum: f64 = weights.iter().sum();
            let found = lse[(b * 4 + h) * queries + i];
            assert!(
                found == sum.ln() || (found - sum.ln()).abs() < ROUNDING,
                "{case:?}: lse {found} against {}",
                sum.ln()
            );
            for d in 0..5 {
                let value = |j: usize| v[((b * keys + j) * 2 + h / 2) * 5 + d];
                let average: f64 = (0..keys).map(|j| weights[j] * value(j)).sum::<f64>() / sum.max(f64::MIN_POSITIVE);
                let found = o[((b * queries + i) * 4 + h) * 5 + d];
                assert!((found - average).abs() < ROUNDING, "{case:?}: {found} against {average}");
            }
        }
    }
}

#[test]
fn the_backward_of_every_spec_is_the_gradient() {
    for case in cases() {
        let x = case.inputs(DType::F64);
        let loss = |x: &[Tensor]| {
            let o = case.forward(x).unwrap().0;
            values(&o).iter().zip(values(&x[3])).map(|(a, b)| a * b).sum::<f64>()
        };
        let (o, lse) = case.forward(&x).unwrap();
        for (which, gradient) in case.backward(&x, &o, &lse).unwrap().iter().enumerate() {
            let (gradient, at) = (values(gradient), values(&x[which]));
            for i in 0..at.len() {
                let moved = |by: f64| {
                    let (mut x, mut at) = (x.clone(), at.clone());
                    at[i] += by;
                    x[which] = Tensor::from_slice(&Device::Cpu, x[which].shape(), &at).unwrap();
                    loss(&x)
                };
                let numeric = (moved(1e-5) - moved(-1e-5)) / 2e-5;
                let found = gradient[i];
                // The differences have two errors: 2e-11 times the third derivative, and 6e-12 from rounding the loss by 2⁻⁵³ (divided by 2e-5).
                // Up to 8e-10 was seen.
                assert!((found - numeric).abs() < 1e-7, "{case:?}, input {which}, {i}: {found} against {numeric}");
            }
        }
    }
}

/// Attention over two parts of the keys, merged by `lse`, equals attention over all keys. The gradient from the merged output and `lse` equals the
/// gradient over all keys.
#[test]
fn results_over_parts_of_the_keys_merge_into_the_whole() {
    // The first query sees no key of the second part.
    for case in [Case::new(1, 4, 7, 3), Case::new(1, 4, 7, 3).with(|spec| spec.soft_cap = Some(0.9))] {
        let x = case.inputs(DType::F64);
        let (o, lse) = case.forward(&x).unwrap();
        // The first query has position -1 relative to the second part of the keys, so the call for the second part leaves this query out.
        let rows = |i: usize, from, to| x[i].rows(from, to).unwrap();
        let first = [rows(0, 0, 4), rows(1, 0, 4), rows(2, 0, 4), rows(3, 0, 4)];
        let second = [rows(0, 1, 4), rows(1, 4, 7), rows(2, 4, 7), rows(3, 1, 4)];
        let (a, b) = (Case { keys: 4, ..case }, Case { queries: 3, keys: 3, first_query: 0, ..case });
        let (of_a, of_b) = (a.forward(&first).unwrap(), b.forward(&second).unwrap());
        let [lse_a, lse_b, lse_all] = [&of_a.1, &of_b.1, &lse].map(values);
        let [o_a, o_b, o_all] = [&of_a.0, &of_b.0, &o].map(values);
        for (h, i) in (0..4usize).flat_map(|h| (0..4usize).map(move |i| (h, i))) {
            let other = i.checked_sub(1).map_or(f64::NEG_INFINITY, |i| lse_b[h * 3 + i]);
            let merged = (lse_a[h * 4 + i].exp() + other.exp()).ln();
            assert!((merged - lse_all[h * 4 + i]).abs() < ROUNDING);
            for d in 0..5 {
                let from_b = i.checked_sub(1).map_or(0.0, |i| o_b[(i * 4 + h) * 5 + d]);
                let mixed =
                    (lse_a[h * 4 + i] - merged).exp() * o_a[(i * 4 + h) * 5 + d] + (other - merged).exp() * from_b;
                assert!((mixed - o_all[(i * 4 + h) * 5 + d]).abs() < ROUNDING);
            }
        }
        let whole = case.backward(&x, &o, &lse).unwrap();
        let lse_of_b: Vec<f64> = (0..4).flat_map(|h| lse_all[h * 4 + 1..][..3].to_vec()).collect();
        let lse_of_b = Tensor::from_slice(&Device::Cpu, &[1, 4, 3], &lse_of_b).unwrap();
        let part_a = a.backward(&first, &o, &lse).unwrap();
        let part_b = b.backward(&second, &o.rows(1, 4).unwrap(), &lse_of_b).unwrap();
        let close = |found: &[f64], expected: &[f64]| {
            assert_eq!(found.len(), expected.len());
            assert!(
                found.iter().zip(expected).all(|(a, b)| (a - b).abs() < ROUNDING),
                "{found:?} against {expected:?}"
            );
        };
        for kv in 1..3 {
            close(&[values(&part_a[kv]), values(&part_b[kv])].concat(), &values(&whole[kv]));
        }
        let width = case.spec.query_width();
        let mut dq = values(&part_a[0]);
        dq[width..].iter_mut().zip(values(&part_b[0])).for_each(|(sum, x)| *sum += x);
        close(&dq, &values(&whole[0]));
    }
}

/// Tests all specs on a GPU, with separate tensors and sizes that exceed one thread block.
#[test]
fn every_spec_agrees_across_devices() {
    let large = |case: Case, causal| {
        let scale = 0.1;
        case.with(|spec| *spec = AttentionSpec { value_dim: 96, scale, causal, ..AttentionSpec::causal(6, 3, 160) })
    };
    let documents = Case { documents: &[0, 300, 301, 600], ..Case::new(2, 300, 300, 0) };
    let more = [
        large(Case::new(2, 300, 300, 0), true).with(|spec| (spec.window, spec.soft_cap) = (Some(70), Some(3.0))),
        large(Case::new(1, 40, 310, 270), true),
        large(documents, false).with(|spec| spec.window = Some(33)),
        // The attention of encoders, over padded rows and with windows to both sides.
        Case { documents: &[0, 130, 257, 257], ..Case::new(1, 257, 257, 0) }
            .with(|spec| *spec = AttentionSpec { causal: false, ..AttentionSpec::causal(2, 2, 64) }),
        Case::new(2, 257, 257, 0)
            .with(|spec| *spec = AttentionSpec { causal: false, window: Some(65), ..AttentionSpec::causal(2, 2, 64) }),
        // The attention of a Gemma model and of a Mistral model.
        Case::new(1, 257, 257, 0)
            .with(|spec| *spec = AttentionSpec { soft_cap: Some(50.0), ..AttentionSpec::causal(2, 1, 256) }),
        Case::new(1, 257, 257, 0)
            .with(|spec| *spec = AttentionSpec { window: Some(64), ..AttentionSpec::causal(2, 1, 128) }),
    ];
    for case in cases().into_iter().chain(more) {
        for dtype in [DType::F32, DType::BF16] {
            // Sums run in another order, including the sums whose difference is the gradient by a score. In BF16, gradients are rounded once.
            let tolerance = Tolerance::Steps(dtype, if dtype == DType::F32 { 256.0 } else { 6.0 });
            parity(&case.inputs(dtype), tolerance, |x| {
                let (o, lse) = case.forward(x)?;
                let gradients = case.backward(x, &o, &lse)?;
                // Queries that see no key have no finite `lse` to compare.
                let lse = if values(&lse).iter().all(|lse| lse.is_finite()) { vec![lse] } else { vec![] };
                Ok([vec![o], lse, gradients].concat())
            });
        }
    }
}

/// Separate tensors and views of one tensor give the same bits.
#[test]
fn views_of_one_tensor_equal_separate_tensors() {
    let l = Fused::new(2, 33, 4, 2, 16);
    for dtype in [DType::F32, DType::BF16] {
        parity(&l.inputs(dtype), Tolerance::Steps(dtype, if dtype == DType::F32 { 64.0 } else { 6.0 }), |x| {
            let columns = |from: usize, to: usize| -> Result<Tensor> {
                let width = x[0].shape()[1] * dtype.size();
                let bytes = x[0].read_bytes()?;
                let rows = bytes.chunks_exact(width).flat_map(|row| &row[from * dtype.size()..to * dtype.size()]);
                Tensor::from_bytes(x[0].device(), &[66, to - from], dtype, &rows.copied().collect::<Vec<u8>>())
            };
            let apart = [columns(0, 64)?, columns(64, 96)?, columns(96, 128)?];
            let [q, k, v] = apart.each_ref().map(HeadView::whole);
            let input = AttentionInput { q, k, v, batch: 2, first_query: 0, cu_seqlens: None };
            let (o, lse) = attention(input, &l.spec)?;
            let gradients = attention_backward(&x[1], input, &o, &lse, &l.spec)?.tensors();
            let (fused_o, fused_lse) = l.forward(&x[0], None)?;
            let fused = l.backward(&x[1], &x[0], (&o, &lse), None)?;
            assert_close("o", &fused_o, &o, Tolerance::Exact);
            assert_close("lse", &fused_lse, &lse, Tolerance::Exact);
            if !x[0].is_on_gpu() {
                let joined: Vec<f64> = (0..66)
                    .flat_map(|t| gradients.iter().flat_map(move |g| values(&g.rows(t, t + 1).unwrap())))
                    .collect();
                assert_eq!(joined, values(&fused), "gradients in columns of one tensor or in three");
            }
            Ok([vec![o, lse], gradients].concat())
        });
    }
}

#[test]
fn inputs_that_do_not_fit_are_errors() {
    let case = Case::new(2, 4, 7, 3);
    let x = case.inputs(DType::F32);
    let error = |case: Case, x: &[Tensor]| case.forward(x).unwrap_err().to_string();
    let is = |error: String, part: &str| assert!(error.contains(part), "{error}");
    is(error(case.with(|spec| spec.kv_heads = 3), &x), "cannot share 3 key heads evenly");
    is(error(case.with(|spec| spec.window = Some(0)), &x), "with a window of 0");
    is(error(case.with(|spec| spec.soft_cap = Some(-1.0)), &x), "soft cap of scores is -1");
    is(error(case.with(|spec| spec.scale = f64::NAN), &x), "not finite");
    is(error(case.with(|spec| spec.value_dim = 6), &x), "v is in columns 0..12 of rows of 10 elements");
    is(error(Case { batch: 3, ..case }, &x), "8 tokens are not 3 sequences of one length");
    is(error(Case { documents: &[0, 14], first_query: 4, ..case }, &x), "each query is at the position of a key");
    for (at, document) in [
        (&[0, 3, 14][..], "document 1, tokens 3..14,"),
        (&[0, 7, 15], "document 1, tokens 7..15,"),
        (&[0, 5, 4, 14], "document 1, tokens 5..4,"),
        (&[-1, 7, 14], "document 0, tokens -1..7,"),
    ] {
        let sentence = format!("attention: cu_seqlens: {document} does not lie within one of 2 sequences of 7 tokens");
        is(error(Case { documents: at, ..case }, &x), &sentence);
    }
    let [q, k, v] = [0, 1, 2].map(|i| HeadView::whole(&x[i]));
    let (o, lse) = case.forward(&x).unwrap();
    // Half of the columns of a wider tensor have no view, and therefore no gradient.
    let wide = normals("wide", &[14, 2 * case.spec.value_width()], DType::F32);
    let input = AttentionInput { q, k, v: HeadView::whole(&wide), batch: 2, first_query: 3, cu_seqlens: None };
    attention(input, &case.spec).unwrap();
    is(attention_backward(&x[3], input, &o, &lse, &case.spec).unwrap_err().to_string(), "do not divide rows of 20");
    let input = AttentionInput { v, ..input };
    is(attention_backward(&x[0], input, &o, &lse, &case.spec).unwrap_err().to_string(), "attention_backward: do");
}
