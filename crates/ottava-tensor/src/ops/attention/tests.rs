use super::*;
use crate::DType;
use crate::testing::{Tolerance, assert_close, gpu, normals, parity, values};

fn layout(batch: usize, seq_len: usize, heads: usize, kv_heads: usize, head_dim: usize) -> AttentionLayout {
    AttentionLayout { batch, seq_len, heads, kv_heads, head_dim, deterministic: false }
}

#[test]
fn attention_agrees_across_devices() {
    for l in [
        layout(1, 1, 1, 1, 8),
        layout(2, 5, 4, 2, 16),
        layout(1, 100, 2, 1, 64),
        layout(3, 64, 4, 4, 32),
        layout(1, 200, 2, 2, 128),
        layout(1, 37, 3, 1, 6),
    ] {
        for (dtype, deterministic) in [(DType::F32, false), (DType::BF16, false), (DType::BF16, true)] {
            let (l, tokens) = (AttentionLayout { deterministic, ..l }, l.batch * l.seq_len);
            let inputs =
                [normals("qkv", &[tokens, l.qkv_width()], dtype), normals("do", &[tokens, l.output_width()], dtype)];
            // Probabilities are rounded to BF16 before they multiply values inside cuDNN; in F32 sums run in another order.
            let tolerance = if dtype == DType::F32 {
                Tolerance::Steps(DType::F32, 64.0)
            } else {
                Tolerance::Steps(DType::BF16, 6.0)
            };
            parity(&inputs, tolerance, |x| {
                let (o, lse) = attention(&x[0], None, l)?;
                let dqkv = attention_backward(&x[1], &x[0], &o, &lse, None, l)?;
                Ok(vec![o, lse, dqkv])
            });
        }
    }
}

/// Sequences whose sums span many blocks of threads.
#[test]
fn deterministic_gradients_are_bit_identical() {
    let Some(gpu) = gpu() else { return };
    for (seq_len, heads, kv_heads, head_dim) in [(2048, 4, 4, 128), (1111, 6, 2, 64)] {
        let l = AttentionLayout { deterministic: true, ..layout(2, seq_len, heads, kv_heads, head_dim) };
        let on_gpu = |name, width| normals(name, &[2 * seq_len, width], DType::BF16).to_device(&gpu).unwrap();
        let (qkv, d_o) = (on_gpu("qkv", l.qkv_width()), on_gpu("do", l.output_width()));
        let (o, lse) = attention(&qkv, None, l).unwrap();
        let gradient = |l| attention_backward(&d_o, &qkv, &o, &lse, None, l).unwrap();
        let first = gradient(l).read_bytes().unwrap();
        for run in 1..8 {
            assert!(first == gradient(l).read_bytes().unwrap(), "run {run} differs from the first, {l:?}");
        }
        // The same gradient, summed in another order.
        let atomic = gradient(AttentionLayout { deterministic: false, ..l });
        assert_close(&format!("{l:?}"), &gradient(l), &atomic, Tolerance::Steps(DType::BF16, 6.0));
    }
}

/// Materialised probabilities in F64.
#[test]
fn attention_is_a_causal_softmax_average_of_values() {
    let l = layout(2, 5, 4, 2, 3);
    let qkv = normals("qkv", &[10, l.qkv_width()], DType::F64);
    let (o, lse) = attention(&qkv, None, l).unwrap();
    let (x, o, lse) = (values(&qkv), values(&o), values(&lse));
    let at = |t: usize, head: usize| &x[t * l.qkv_width() + head * 3..][..3];
    for (b, i, h) in (0..2).flat_map(|b| (0..5).flat_map(move |i| (0..4).map(move |h| (b, i, h)))) {
        let weights: Vec<f64> = (0..=i)
            .map(|j| {
                at(b * 5 + i, h).iter().zip(at(b * 5 + j, 4 + h / 2)).map(|(q, k)| q * k).sum::<f64>() / 3f64.sqrt()
            })
            .map(f64::exp)
            .collect();
        let sum: f64 = weights.iter().sum();
        assert!((lse[(b * 4 + h) * 5 + i] - sum.ln()).abs() < 1e-12);
        for d in 0..3 {
            let expected: f64 = weights.iter().enumerate().map(|(j, w)| w / sum * at(b * 5 + j, 6 + h / 2)[d]).sum();
            assert!((o[(b * 5 + i) * 12 + h * 3 + d] - expected).abs() < 1e-12);
        }
    }
}

#[test]
fn attention_backward_is_the_gradient() {
    let l = layout(2, 4, 4, 2, 3);
    let (qkv, d_o) =
        (normals("qkv", &[8, l.qkv_width()], DType::F64), normals("do", &[8, l.output_width()], DType::F64));
    let loss = |qkv: &Tensor| {
        let o = attention(qkv, None, l).unwrap().0;
        values(&o).iter().zip(values(&d_o)).map(|(a, b)| a * b).sum::<f64>()
    };
    let (o, lse) = attention(&qkv, None, l).unwrap();
    let gradient = values(&attention_backward(&d_o, &qkv, &o, &lse, None, l).unwrap());
    let x = values(&qkv);
    for i in 0..x.len() {
        let moved = |by: f64| {
            let mut x = x.clone();
            x[i] += by;
            loss(&Tensor::from_slice(&Device::Cpu, qkv.shape(), &x).unwrap())
        };
        let numeric = (moved(1e-5) - moved(-1e-5)) / 2e-5;
        assert!((gradient[i] - numeric).abs() < 1e-7, "element {i}: {} against {numeric}", gradient[i]);
    }
}

/// On a GPU, documents of several lengths, up to a whole row, beside the plain kernels in F32; with heads that share keys or not.
#[test]
fn packed_documents_agree_across_devices() {
    for (heads, kv_heads, head_dim) in [(4, 4, 128), (4, 2, 64), (6, 1, 128)] {
        let (seq_len, lengths) = (300, [300, 1, 128, 70, 101, 2, 298]);
        let l = layout(3, seq_len, heads, kv_heads, head_dim);
        let mut at = vec![0];
        at.extend(lengths.iter().scan(0, |end, length| {
            *end += length;
            Some(*end)
        }));
        // Room for more documents than there are.
        at.resize(12, 900);
        let inputs =
            [normals("qkv", &[900, l.qkv_width()], DType::BF16), normals("do", &[900, l.output_width()], DType::BF16)];
        // cuDNN rounds the gradients of keys and values of each query head before it adds those that share a key head.
        parity(&inputs, Tolerance::Steps(DType::BF16, 12.0), |x| {
            let cu_seqlens = Tensor::from_slice(x[0].device(), &[at.len()], &at)?;
            let (o, lse) = attention(&x[0], Some(&cu_seqlens), l)?;
            let dqkv = attention_backward(&x[1], &x[0], &o, &lse, Some(&cu_seqlens), l)?;
            Ok(vec![o, dqkv])
        });
    }
}

/// Documents of one row see what they would see as sequences of their own, forward and backward, and nothing else.
#[test]
fn packed_documents_equal_separate_sequences() {
    // Two rows of 10 tokens; the capacity is larger than the number of documents.
    let lengths = [3, 1, 6, 10];
    let at: Vec<i32> = [0, 3, 4, 10, 20, 20, 20].to_vec();
    let packed = layout(2, 10, 4, 2, 8);
    for dtype in [DType::F32, DType::BF16] {
        let inputs =
            [normals("qkv", &[20, packed.qkv_width()], dtype), normals("do", &[20, packed.output_width()], dtype)];
        // Of the GPU, one kernel computes both forms in F32; in BF16 whole sequences go through cuDNN.
        parity(&inputs, Tolerance::Steps(dtype, if dtype == DType::F32 { 64.0 } else { 6.0 }), |x| {
            let device = x[0].device();
            let cu_seqlens = Tensor::from_slice(device, &[at.len()], &at)?;
            let (o, lse) = attention(&x[0], Some(&cu_seqlens), packed)?;
            let dqkv = attention_backward(&x[1], &x[0], &o, &lse, Some(&cu_seqlens), packed)?;
            let mut start = 0;
            for length in lengths {
                let rows = |x: &Tensor| x.rows(start, start + length);
                let (qkv, d_o, l) = (rows(&x[0])?, rows(&x[1])?, layout(1, length, 4, 2, 8));
                let (alone, lse) = attention(&qkv, None, l)?;
                let gradient = attention_backward(&d_o, &qkv, &alone, &lse, None, l)?;
                let tolerance = match device {
                    Device::Cuda(_) => Tolerance::Steps(dtype, 6.0),
                    _ => Tolerance::Exact,
                };
                assert_close(&format!("output of {length} tokens"), &alone, &rows(&o)?, tolerance);
                assert_close(&format!("gradient of {length} tokens"), &gradient, &rows(&dqkv)?, tolerance);
                start += length;
            }
            // The layout of `lse` with documents is that of the device.
            Ok(if dtype == DType::F32 { vec![o, lse, dqkv] } else { vec![o, dqkv] })
        });
    }
}
