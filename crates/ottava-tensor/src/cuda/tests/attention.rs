//! Tests that compare attention by cuDNN with an F64 reference.

use super::*;

/// The bound of the scores of capped shapes.
const SOFT_CAP: f64 = 0.9;

/// The inputs of attention on the host.
struct Attended {
    shape: AttentionShape,
    q: Vec<f64>,
    k: Vec<f64>,
    v: Vec<f64>,
    d_o: Vec<f64>,
}

/// The results of attention. Each result is `[B, T, heads, D]`, and the log-sum-exp is `[B, H, T]`.
#[derive(Default)]
struct Results {
    o: Vec<f64>,
    lse: Vec<f64>,
    dq: Vec<f64>,
    dk: Vec<f64>,
    dv: Vec<f64>,
}

impl Attended {
    fn scale(&self) -> f64 {
        1.0 / (self.shape.head_dim as f64).sqrt()
    }

    /// Returns the score for a product of a query and a key, and the derivative of the score with respect to the product.
    fn score(&self, product: f64) -> (f64, f64) {
        let score = self.scale() * product;
        if !self.shape.capped {
            return (score, self.scale());
        }
        let bounded = (score / SOFT_CAP).tanh();
        (SOFT_CAP * bounded, self.scale() * (1.0 - bounded * bounded))
    }

    /// Computes the F64 reference: the softmax over the keys that a query sees, and its gradient.
    fn reference(&self) -> Results {
        let AttentionShape { batch, heads, kv_heads, seq, head_dim: d, .. } = self.shape;
        let mut results = Results {
            o: vec![0.0; self.q.len()],
            lse: vec![0.0; batch * heads * seq],
            dq: vec![0.0; self.q.len()],
            dk: vec![0.0; self.k.len()],
            dv: vec![0.0; self.v.len()],
        };
        let dot = |a: &[f64], b: &[f64]| a.iter().zip(b).map(|(a, b)| a * b).sum::<f64>();
        let add =
            |to: &mut [f64], factor: f64, from: &[f64]| to.iter_mut().zip(from).for_each(|(t, f)| *t += factor * f);
        for b in 0..batch {
            for h in 0..heads {
                let at = |t: usize, heads: usize, h: usize| {
                    ((b * seq + t) * heads + h) * d..((b * seq + t) * heads + h + 1) * d
                };
                let kv = |t| at(t, kv_heads, h * kv_heads / heads);
                for t in 0..seq {
                    let (q, d_o) = (&self.q[at(t, heads, h)], &self.d_o[at(t, heads, h)]);
                    let first = if self.shape.window > 0 { (t + 1).saturating_sub(self.shape.window) } else { 0 };
                    let scores: Vec<_> = (first..=t).map(|s| self.score(dot(q, &self.k[kv(s)]))).collect();
                    let largest = scores.iter().map(|score| score.0).fold(f64::NEG_INFINITY, f64::max);
                    let sum: f64 = scores.iter().map(|score| (score.0 - largest).exp()).sum();
                    let lse = largest + sum.ln();
                    results.lse[(b * heads + h) * seq + t] = lse;
                    let p: Vec<f64> = scores.iter().map(|score| (score.0 - lse).exp()).collect();
                    let dp: Vec<f64> = (first..=t).map(|s| dot(d_o, &self.v[kv(s)])).collect();
                    let row_sum = dot(&p, &dp);
                    for (s, ((&p, dp), (_, slope))) in (first..).zip(p.iter().zip(dp).zip(scores)) {
                        let ds = p * (dp - row_sum) * slope;
                        add(&mut results.o[at(t, heads, h)], p, &self.v[kv(s)]);
                        add(&mut results.dv[kv(s)], p, d_o);
                        add(&mut results.dq[at(t, heads, h)], ds, &self.k[kv(s)]);
                        add(&mut results.dk[kv(s)], ds, q);
                    }
                }
            }
        }
        results
    }
}

/// Runs both passes on the device. If `fused`, `q`, `k` and `v` are in one buffer, otherwise each is in a separate buffer.
fn attend(device: &Arc<CudaDevice>, shape: AttentionShape, fused: bool) -> Result<(Attended, Results)> {
    let AttentionShape { batch, heads, kv_heads, seq, head_dim, q_stride, k_stride, v_stride, o_stride, .. } = shape;
    let tokens = batch * seq;
    let (wide, narrow) = (heads * head_dim, kv_heads * head_dim);
    let widths = [wide, narrow, narrow];
    // Each place is the buffer and the first column of q, k or v.
    let (strides, places) = match fused {
        true => (vec![q_stride], [(0, 0), (0, wide), (0, wide + narrow)]),
        false => (vec![q_stride, k_stride, v_stride], [(0, 0), (1, 0), (2, 0)]),
    };
    let mut random = Random(seq as u64);
    let inputs: Vec<Vec<u8>> = strides.iter().map(|stride| random.elements(BF16, tokens * stride)).collect();
    let d_o_bytes = random.elements(BF16, tokens * o_stride);
    let uploads: Vec<DeviceBuffer> = inputs.iter().map(|bytes| upload(device, bytes)).collect();
    let d_o = upload(device, &d_o_bytes);
    // The buffers are filled with NaN to detect elements that are not written.
    let unset = |bytes: usize| upload(device, &vec![0xff; bytes]);
    let gradients: Vec<DeviceBuffer> = strides.iter().map(|stride| unset(tokens * stride * 2)).collect();
    let (o, lse) = (unset(tokens * o_stride * 2), unset(shape.lse_len() * 4));
    let parts = |buffers: &[DeviceBuffer]| places.map(|(which, column)| buffers[which].ptr() + 2 * column as u64);
    let ([q, k, v], [dq, dk, dv]) = (parts(&uploads), parts(&gradients));
    let forward = AttentionForward { q, k, v, o: o.ptr(), lse: lse.ptr(), documents: Default::default() };
    let backward = AttentionBackward { forward, d_o: d_o.ptr(), dq, dk, dv };
    let factors = ScoreFactors { scale: 1.0 / (head_dim as f32).sqrt(), soft_cap: SOFT_CAP as f32 };
    // SAFETY: the buffers were made for this shape.
    unsafe {
        device.attention_forward(&shape, factors, &forward)?;
        device.attention_backward(&shape, factors, &backward)?;
    }

    let columns = |bytes: &[u8], stride: usize, from: usize, width: usize| -> Vec<f64> {
        let all = values(BF16, bytes);
        all.chunks_exact(stride).flat_map(|token| &token[from..from + width]).copied().collect()
    };
    let take = |buffers: &[Vec<u8>]| {
        let part = |i: usize| columns(&buffers[places[i].0], strides[places[i].0], places[i].1, widths[i]);
        [part(0), part(1), part(2)]
    };
    let gradients: Vec<Vec<u8>> = gradients.iter().map(download).collect();
    if !fused {
        for (gradient, (stride, width)) in gradients.iter().zip(strides.iter().zip(widths)) {
            let beside = columns(gradient, *stride, width, stride - width);
            assert!(beside.iter().all(|value| value.is_nan()), "padding between rows is unchanged");
        }
    }
    let ([q, k, v], [dq, dk, dv]) = (take(&inputs), take(&gradients));
    let attended = Attended { shape, q, k, v, d_o: columns(&d_o_bytes, o_stride, 0, wide) };
    let o = columns(&download(&o), o_stride, 0, wide);
    Ok((attended, Results { o, lse: values(F32, &download(&lse)), dq, dk, dv }))
}

/// Returns the root-mean-square error relative to the root mean square of the expected values, and the largest error in units of the
/// tolerance. The tolerance is a tenth of this root mean square plus four BF16 roundings of the value.
fn compare(got: &[f64], expected: &[f64]) -> (f64, f64) {
    assert_eq!(got.len(), expected.len());
    let rms = |values: &mut dyn Iterator<Item = f64>| (values.map(|v| v * v).sum::<f64>() / got.len() as f64).sqrt();
    let size = rms(&mut expected.iter().copied());
    let pairs = || got.iter().zip(expected);
    let relative = pairs().map(|(got, expected)| (got - expected).abs() / (0.1 * size + expected.abs() / 64.0));
    // `max` would ignore NaN.
    let largest = relative.map(|error| if error.is_nan() { f64::INFINITY } else { error }).fold(0.0, f64::max);
    (rms(&mut pairs().map(|(got, expected)| got - expected)) / size, largest)
}

#[test]
fn attention_matches_the_f64_reference() {
    let Some(device) = test_device() else { return };
    let mut cases = Vec::new();
    for (heads, kv_heads, head_dim) in [(4, 4, 128), (4, 2, 128), (6, 2, 64), (2, 1, 8), (3, 3, 96), (8, 1, 32)] {
        for tokens in [[2, 16], [3, 64], [2, 100], [2, 128], [1, 512], [2, 1], [1, 777]] {
            cases.push((AttentionShape::fused(tokens, heads, kv_heads, head_dim), true));
        }
    }
    // The heads have the largest size and sizes that are not a power of two, with windows and soft caps.
    for (heads, kv_heads, head_dim) in [(4, 2, 256), (2, 1, 144), (2, 2, 208), (4, 4, 128), (4, 2, 64)] {
        for (window, capped) in [(0, false), (50, false), (0, true), (50, true)] {
            for (tokens, deterministic) in [([2, 100], false), ([1, 777], true), ([2, 512], false)] {
                let fused = AttentionShape::fused(tokens, heads, kv_heads, head_dim);
                cases.push((AttentionShape { window, capped, deterministic, ..fused }, true));
            }
        }
    }
    let fused = AttentionShape::fused([2, 200], 4, 2, 64);
    cases.push((AttentionShape { q_stride: 264, k_stride: 136, v_stride: 144, o_stride: 272, ..fused }, false));
    for (shape, fused) in cases {
        let (attended, got) = match attend(&device, shape, fused) {
            Ok(outcome) => outcome,
            Err(error @ Error::Library { .. }) => return eprintln!("skipped: {error}"),
            Err(error) => panic!("{shape:?}: {error}"),
        };
        let expected = attended.reference();
        let mut summary = String::new();
        for (name, got, expected) in [
            ("lse", &got.lse, &expected.lse),
            ("o", &got.o, &expected.o),
            ("dq", &got.dq, &expected.dq),
            ("dk", &got.dk, &expected.dk),
            ("dv", &got.dv, &expected.dv),
        ] {
            if expected.iter().all(|value| value.abs() < 1e-12) {
                // With one token, the softmax is constant and its gradients are zero.
                assert!(got.iter().all(|value| value.abs() < 1e-2), "{shape:?}: {name} {got:?}");
                continue;
            }
            let (rms, largest) = compare(got, expected);
            summary += &format!(" {name} {rms:.4} {largest:.2}");
            // P, dS and the results are rounded to BF16. Each rounding adds a relative error of 0.002.
            assert!(
                rms < 0.005 && largest < 1.0,
                "{shape:?}: {name} is off by {rms} rms, {largest} tolerances at most"
            );
        }
        let AttentionShape { batch, heads, kv_heads, seq, head_dim, window, capped, .. } = shape;
        eprintln!("attention {batch}x{seq} {heads}/{kv_heads}x{head_dim} window {window} capped {capped}:{summary}");
    }
}
