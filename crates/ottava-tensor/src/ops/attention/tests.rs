mod backends;
mod specs;

use super::*;
use crate::ops::{attention, attention_backward};
use crate::testing::{Tolerance, assert_close, gpu, normals, parity, values};
use crate::{DType, Device};

/// A fused projection of several sequences.
#[derive(Clone, Copy, Debug)]
struct Fused {
    batch: usize,
    seq_len: usize,
    spec: AttentionSpec,
}

impl Fused {
    fn new(batch: usize, seq_len: usize, heads: usize, kv_heads: usize, head_dim: usize) -> Fused {
        Fused { batch, seq_len, spec: AttentionSpec::causal(heads, kv_heads, head_dim) }
    }

    fn to_both_sides(self) -> Fused {
        Fused { spec: AttentionSpec { causal: false, ..self.spec }, ..self }
    }

    fn with_deterministic(self, deterministic: bool) -> Fused {
        Fused { spec: AttentionSpec { deterministic, ..self.spec }, ..self }
    }

    /// Returns random `qkv` and `do`.
    fn inputs(&self, dtype: DType) -> [Tensor; 2] {
        let tokens = self.batch * self.seq_len;
        let (qkv, output) = (self.spec.qkv_width(), self.spec.output_width());
        [normals("qkv", &[tokens, qkv], dtype), normals("do", &[tokens, output], dtype)]
    }

    fn forward(&self, qkv: &Tensor, cu_seqlens: Option<&Tensor>) -> Result<(Tensor, Tensor)> {
        attention(AttentionInput::fused(qkv, &self.spec, self.batch, cu_seqlens), &self.spec)
    }

    fn backward(
        &self,
        d_o: &Tensor,
        qkv: &Tensor,
        (o, lse): (&Tensor, &Tensor),
        cu_seqlens: Option<&Tensor>,
    ) -> Result<Tensor> {
        let input = AttentionInput::fused(qkv, &self.spec, self.batch, cu_seqlens);
        Ok(attention_backward(d_o, input, o, lse, &self.spec)?.fused())
    }
}

#[test]
fn attention_agrees_across_devices() {
    for l in [
        Fused::new(1, 1, 1, 1, 8),
        Fused::new(2, 5, 4, 2, 16),
        Fused::new(1, 100, 2, 1, 64),
        Fused::new(3, 64, 4, 4, 32),
        Fused::new(1, 200, 2, 2, 128),
        Fused::new(1, 37, 3, 1, 6),
        // These scores need more shared memory than kernels have by default.
        Fused::new(1, 7000, 1, 1, 8),
        Fused::new(1, 200, 2, 2, 128).to_both_sides(),
        Fused::new(3, 77, 4, 2, 64).to_both_sides(),
    ] {
        for (dtype, deterministic) in
            [(DType::F32, false), (DType::BF16, false), (DType::BF16, true), (DType::F16, false), (DType::F16, true)]
        {
            let l = l.with_deterministic(deterministic);
            // In cuDNN, probabilities are rounded to 16 bits before they multiply values. In F32, sums run in another order.
            // Both errors grow with the number of terms.
            let steps = match (dtype, l.seq_len > 1000) {
                (DType::F32, false) => 64.0,
                (DType::F32, true) => 256.0,
                (_, false) => 6.0,
                (_, true) => 12.0,
            };
            let tolerance = Tolerance::Steps(dtype, steps);
            parity(&l.inputs(dtype), tolerance, |x| {
                let (o, lse) = l.forward(&x[0], None)?;
                let dqkv = l.backward(&x[1], &x[0], (&o, &lse), None)?;
                Ok(vec![o, lse, dqkv])
            });
        }
    }
}

/// Forward in the order of sums of paged attention, whose results backward of the other backends reads.
#[test]
fn ordered_attention_agrees_across_devices() {
    let ordered = |device: &Device, work: &dyn Fn() -> Result<Vec<Tensor>>| match device {
        Device::Cuda(gpu) => gpu.with_batch_invariance(work),
        _ => work(),
    };
    for (seq_len, heads, kv_heads, head_dim, window, soft_cap) in [
        (5, 4, 2, 16, None, None),
        (300, 8, 2, 128, None, None),
        (700, 3, 3, 64, None, None),
        (300, 4, 1, 96, Some(70), Some(2.0)),
    ] {
        for documents in [false, true] {
            for (dtype, deterministic) in [(DType::BF16, false), (DType::BF16, true)] {
                let mut l = Fused::new(2, seq_len, heads, kv_heads, head_dim).with_deterministic(deterministic);
                (l.spec.window, l.spec.soft_cap) = (window, soft_cap);
                let length = seq_len as i32;
                let ends = [0, 2, length, 2 * length - 1, 2 * length, 2 * length];
                // cuDNN first rounds the gradients of keys and values for each query head, and then adds the gradients of a key head.
                parity(&l.inputs(dtype), Tolerance::Steps(dtype, 12.0), |x| {
                    let ends = Tensor::from_slice(x[0].device(), &[ends.len()], &ends)?;
                    let at = documents.then_some(&ends);
                    let mut found = ordered(x[0].device(), &|| l.forward(&x[0], at).map(|(o, lse)| vec![o, lse]))?;
                    found.push(l.backward(&x[1], &x[0], (&found[0], &found[1]), at)?);
                    if documents {
                        // The shape of `lse` with documents depends on the backend.
                        found.remove(1);
                    }
                    Ok(found)
                });
            }
        }
    }
}

/// The sums of these sequences span many blocks of threads.
#[test]
fn deterministic_gradients_are_bit_identical() {
    let Some(gpu) = gpu() else { return };
    for (seq_len, heads, kv_heads, head_dim) in [(2048, 4, 4, 128), (1111, 6, 2, 64)] {
        let l = Fused::new(2, seq_len, heads, kv_heads, head_dim).with_deterministic(true);
        let [qkv, d_o] = l.inputs(DType::BF16).map(|x| x.to_device(&gpu).unwrap());
        let (o, lse) = l.forward(&qkv, None).unwrap();
        let gradient = |l: Fused| l.backward(&d_o, &qkv, (&o, &lse), None).unwrap();
        let first = gradient(l).read_bytes().unwrap();
        for run in 1..8 {
            assert!(first == gradient(l).read_bytes().unwrap(), "run {run} differs from the first, {l:?}");
        }
        // Atomic additions give the same gradient, summed in another order.
        let atomic = gradient(l.with_deterministic(false));
        assert_close(&format!("{l:?}"), &gradient(l), &atomic, Tolerance::Steps(DType::BF16, 6.0));
    }
}

/// Compares documents of several lengths, up to a whole row, with and without shared keys.
#[test]
fn packed_documents_agree_across_devices() {
    for (causal, heads, kv_heads, head_dim, window, soft_cap) in [
        (true, 4, 4, 128, None, None),
        (true, 4, 2, 64, None, None),
        (true, 6, 1, 128, None, None),
        (true, 4, 2, 128, Some(40), None),
        (true, 4, 4, 64, None, Some(2.0)),
        (true, 4, 2, 128, Some(70), Some(2.0)),
        (false, 4, 4, 64, None, None),
        (false, 4, 2, 128, None, None),
        // The plain kernels compute these cases.
        (false, 4, 4, 64, Some(65), None),
        (true, 4, 2, 256, Some(70), Some(2.0)),
    ] {
        let (seq_len, lengths) = (300, [300, 1, 128, 70, 101, 2, 298]);
        let mut l = Fused::new(3, seq_len, heads, kv_heads, head_dim);
        (l.spec.causal, l.spec.window, l.spec.soft_cap) = (causal, window, soft_cap);
        let mut at = vec![0];
        at.extend(lengths.iter().scan(0, |end, length| {
            *end += length;
            Some(*end)
        }));
        // The tensor has room for more documents than there are.
        at.resize(12, 900);
        // cuDNN first rounds the gradients of keys and values for each query head, and then adds the gradients of a key head.
        parity(&l.inputs(DType::BF16), Tolerance::Steps(DType::BF16, 12.0), |x| {
            let cu_seqlens = Tensor::from_slice(x[0].device(), &[at.len()], &at)?;
            let (o, lse) = l.forward(&x[0], Some(&cu_seqlens))?;
            let dqkv = l.backward(&x[1], &x[0], (&o, &lse), Some(&cu_seqlens))?;
            Ok(vec![o, dqkv])
        });
    }
}

/// Documents in one row give the same results as separate sequences, in forward and backward.
#[test]
fn packed_documents_equal_separate_sequences() {
    // Two rows of 10 tokens; the capacity is larger than the number of documents.
    let lengths = [3, 1, 6, 10];
    let at: Vec<i32> = [0, 3, 4, 10, 20, 20, 20].to_vec();
    let packed = Fused::new(2, 10, 4, 2, 8);
    for dtype in [DType::F32, DType::BF16] {
        // In F32 on the GPU, one kernel computes both forms. In BF16, cuDNN computes whole sequences.
        parity(&packed.inputs(dtype), Tolerance::Steps(dtype, if dtype == DType::F32 { 64.0 } else { 6.0 }), |x| {
            let device = x[0].device();
            let cu_seqlens = Tensor::from_slice(device, &[at.len()], &at)?;
            let (o, lse) = packed.forward(&x[0], Some(&cu_seqlens))?;
            let dqkv = packed.backward(&x[1], &x[0], (&o, &lse), Some(&cu_seqlens))?;
            let mut start = 0;
            for length in lengths {
                let rows = |x: &Tensor| x.rows(start, start + length);
                let (qkv, d_o, l) = (rows(&x[0])?, rows(&x[1])?, Fused::new(1, length, 4, 2, 8));
                let (alone, lse) = l.forward(&qkv, None)?;
                let gradient = l.backward(&d_o, &qkv, (&alone, &lse), None)?;
                let tolerance = match device {
                    Device::Cuda(_) => Tolerance::Steps(dtype, 6.0),
                    _ => Tolerance::Exact,
                };
                assert_close(&format!("output of {length} tokens"), &alone, &rows(&o)?, tolerance);
                assert_close(&format!("gradient of {length} tokens"), &gradient, &rows(&dqkv)?, tolerance);
                start += length;
            }
            // The shape of `lse` with documents depends on the backend.
            Ok(if dtype == DType::F32 { vec![o, lse, dqkv] } else { vec![o, dqkv] })
        });
    }
}
