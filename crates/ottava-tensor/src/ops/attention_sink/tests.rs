use super::*;
use crate::ops::{AttentionInput, AttentionSpec, attention, attention_backward};
use crate::testing::{Tolerance, normals, parity, values};
use crate::{DType, Device};

/// The tolerance of averages and logarithms of sums of a few keys in F64. They differ by some units of 2⁻⁵³ of values near 1.
const ROUNDING: f64 = 1e-12;

/// Returns the output and `lse` of attention with sinks.
fn attend(qkv: &Tensor, sinks: &Tensor, spec: &AttentionSpec, batch: usize) -> Result<(Tensor, Tensor)> {
    let (mut o, mut lse) = attention(AttentionInput::fused(qkv, spec, batch, None), spec)?;
    attention_sink(&mut o, &mut lse, sinks)?;
    Ok((o, lse))
}

/// The numbers of sequences, tokens, heads and key heads, the head size, and the window.
const CASES: [(usize, usize, usize, usize, usize, Option<usize>); 4] =
    [(1, 1, 1, 1, 8, None), (2, 5, 4, 2, 16, Some(3)), (3, 67, 3, 1, 7, None), (1, 300, 8, 1, 64, Some(128))];

#[test]
fn attention_sink_agrees_across_devices() {
    for (batch, seq_len, heads, kv_heads, head_dim, window) in CASES {
        let spec = AttentionSpec { window, ..AttentionSpec::causal(heads, kv_heads, head_dim) };
        let tokens = batch * seq_len;
        for dtype in [DType::F32, DType::F16, DType::BF16] {
            let inputs = [
                normals("o", &[tokens, spec.output_width()], dtype),
                normals("lse", &[batch, heads, seq_len], DType::F32),
                normals("sinks", &[heads], dtype),
                normals("do", &[tokens, spec.output_width()], dtype),
                normals("dsinks", &[heads], DType::F32),
                normals("lse", &[tokens, heads], DType::F32),
            ];
            // Exponentials differ in the last bits, which can move a rounding by one step. Sums run in another order.
            let tolerance =
                if dtype == DType::F32 { Tolerance::Steps(dtype, 64.0) } else { Tolerance::Steps(dtype, 1.0) };
            parity(&inputs, tolerance, |x| {
                let mut results = Vec::new();
                for lse in [&x[1], &x[5]] {
                    let (mut o, mut lse, mut dsinks) = (x[0].duplicate()?, lse.duplicate()?, x[4].duplicate()?);
                    attention_sink(&mut o, &mut lse, &x[2])?;
                    attention_sink_backward(&x[3], &o, &lse, &x[2], &mut dsinks)?;
                    results.extend([o, lse, dsinks]);
                }
                Ok(results)
            });
        }
    }
}

/// Tests sinks after each kernel of attention, including kernels that store `lse` in another shape. The backward of attention reads the `o` and `lse`
/// with sinks.
#[test]
fn attention_with_sinks_agrees_across_devices() {
    for (batch, seq_len, heads, kv_heads, head_dim, window) in CASES {
        let spec = AttentionSpec { window, ..AttentionSpec::causal(heads, kv_heads, head_dim) };
        let tokens = batch * seq_len;
        // The first sequence has two documents, each other sequence one. There is room for one more document.
        let mut at = vec![0, seq_len.div_ceil(3) as i32];
        at.extend((1..=batch).chain([batch]).map(|sequence| (sequence * seq_len) as i32));
        let at = Tensor::from_slice(&Device::Cpu, &[at.len()], &at).unwrap();
        for dtype in [DType::F32, DType::BF16] {
            let inputs = [
                normals("qkv", &[tokens, spec.qkv_width()], dtype),
                normals("sinks", &[heads], dtype),
                normals("do", &[tokens, spec.output_width()], dtype),
                at.clone(),
            ];
            // As in attention, probabilities are rounded to BF16, and sums run in another order.
            let tolerance = Tolerance::Steps(dtype, if dtype == DType::F32 { 64.0 } else { 8.0 });
            for documents in [false, true] {
                parity(&inputs, tolerance, |x| {
                    let input = AttentionInput::fused(&x[0], &spec, batch, documents.then_some(&x[3]));
                    let (mut o, mut lse) = attention(input, &spec)?;
                    attention_sink(&mut o, &mut lse, &x[1])?;
                    let input = AttentionInput::fused(&x[0], &spec, batch, documents.then_some(&x[3]));
                    let dqkv = attention_backward(&x[2], input, &o, &lse, &spec)?.fused();
                    let mut dsinks = Tensor::zeros(o.device(), &[heads], DType::F32)?;
                    attention_sink_backward(&x[2], &o, &lse, &x[1], &mut dsinks)?;
                    Ok(vec![o, dqkv, dsinks])
                });
            }
        }
    }
}

/// Compares with the definition: a softmax over the scores and the sink, in which the probability of the sink is dropped.
#[test]
fn the_probability_of_the_sink_is_dropped() {
    let (spec, tokens) = (AttentionSpec { window: Some(2), ..AttentionSpec::causal(2, 1, 3) }, 4);
    let (qkv, sinks) = (normals("qkv", &[tokens, spec.qkv_width()], DType::F64), normals("sinks", &[2], DType::F64));
    let (o, lse) = attend(&qkv, &sinks, &spec, 1).unwrap();
    let (o, lse, x, sinks) = (values(&o), values(&lse), values(&qkv), values(&sinks));
    for t in 0..tokens {
        for h in 0..2 {
            let at = |token: usize, column: usize| &x[token * 12 + column..][..3];
            let keys = (t + 1).saturating_sub(2)..t + 1;
            let scores: Vec<f64> = keys
                .clone()
                .map(|key| at(t, 3 * h).iter().zip(at(key, 6)).map(|(q, k)| q * k).sum::<f64>() / 3f64.sqrt())
                .collect();
            let sum = scores.iter().map(|score| score.exp()).sum::<f64>() + sinks[h].exp();
            assert!((lse[h * tokens + t] - sum.ln()).abs() < ROUNDING);
            for d in 0..3 {
                let expected: f64 = keys.clone().zip(&scores).map(|(key, s)| s.exp() / sum * at(key, 9)[d]).sum();
                assert!((o[t * 6 + 3 * h + d] - expected).abs() < ROUNDING, "token {t}, head {h}");
            }
        }
    }
}

/// Compares the gradients by queries, keys, values and sinks with central differences.
#[test]
fn gradients_with_sinks_are_those_of_differences() {
    const STEP: f64 = 1e-5;
    let (spec, batch, tokens) = (AttentionSpec { window: Some(3), ..AttentionSpec::causal(4, 2, 3) }, 2, 10);
    let inputs = [normals("qkv", &[tokens, spec.qkv_width()], DType::F64), normals("sinks", &[4], DType::F64)];
    let d_o = normals("do", &[tokens, spec.output_width()], DType::F64);
    let (o, lse) = attend(&inputs[0], &inputs[1], &spec, batch).unwrap();
    let input = AttentionInput::fused(&inputs[0], &spec, batch, None);
    let dqkv = attention_backward(&d_o, input, &o, &lse, &spec).unwrap().fused();
    let mut dsinks = Tensor::zeros(&Device::Cpu, &[4], DType::F64).unwrap();
    attention_sink_backward(&d_o, &o, &lse, &inputs[1], &mut dsinks).unwrap();
    for (which, gradient) in [dqkv, dsinks].iter().enumerate() {
        for (i, gradient) in values(gradient).into_iter().enumerate() {
            let loss = |step: f64| {
                let mut moved = values(&inputs[which]);
                moved[i] += step;
                let moved = Tensor::from_slice(&Device::Cpu, inputs[which].shape(), &moved).unwrap();
                let [qkv, sinks] = if which == 0 { [&moved, &inputs[1]] } else { [&inputs[0], &moved] };
                let o = values(&attend(qkv, sinks, &spec, batch).unwrap().0);
                o.iter().zip(values(&d_o)).map(|(o, d)| o * d).sum::<f64>()
            };
            let slope = (loss(STEP) - loss(-STEP)) / (2.0 * STEP);
            // The differences have two errors: 2e-11 (`STEP² / 6`) times the third derivative, and 1e-11 from rounding the loss by 2⁻⁵³ (divided by
            // `STEP`). Up to 1.6e-10 was seen.
            assert!((gradient - slope).abs() < 1e-8, "input {which}, element {i}: {gradient}, {slope}");
        }
    }
}

#[test]
fn a_query_without_keys_gives_all_to_the_sink() {
    let (mut o, sinks) = (Tensor::zeros(&Device::Cpu, &[1, 2], DType::F32).unwrap(), normals("s", &[1], DType::F32));
    let mut lse = Tensor::from_slice(&Device::Cpu, &[1, 1, 1], &[f32::NEG_INFINITY]).unwrap();
    attention_sink(&mut o, &mut lse, &sinks).unwrap();
    assert_eq!((values(&o), values(&lse)), (vec![0.0, 0.0], values(&sinks)));
}

#[test]
fn other_shapes_of_lse_are_errors() {
    let (mut o, sinks) = (normals("o", &[6, 4], DType::F32), normals("s", &[2], DType::F32));
    let mut lse = normals("lse", &[2, 6], DType::F32);
    let error = attention_sink(&mut o, &mut lse, &sinks).unwrap_err().to_string();
    assert!(error.contains("[B, 2, S] or [B·S, 2] of 6 tokens"), "{error}");
}
