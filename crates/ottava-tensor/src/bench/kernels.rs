//! Memory-bound ops, relative to a copy of the same bytes.

use super::{copy_bandwidth, time, updates};
use crate::ops::Activation::SwiGlu;
use crate::ops::*;
use crate::{DType, Device, Granularity, Result, Tensor};

/// Vocabulary of embedding and cross-entropy, and tokens per chunk of logits.
const VOCABULARY: usize = 32_000;
const LONG_VOCABULARY: usize = 151_936;
const CHUNK: usize = 2048;

/// One op at one size.
#[derive(Clone, Debug)]
pub struct KernelRow {
    /// Op and what it writes.
    pub name: &'static str,
    /// Bytes that must be read and written once.
    pub bytes: usize,
    /// Measured.
    pub milliseconds: f64,
    /// Milliseconds of a copy of the same bytes.
    pub floor_milliseconds: f64,
}

/// Times every memory-bound op on random data: BF16 activations of `tokens` T rows, `channels` C and `hidden` F wide.
pub fn kernels(device: &Device, tokens: usize, channels: usize, hidden: usize) -> Result<Vec<KernelRow>> {
    let bandwidth = copy_bandwidth(device)?;
    let iterations = if matches!(device, Device::Cpu) { 1 } else { 20 };
    let (t, c, f) = (tokens, channels, hidden);
    let mut seed = 0;
    let mut random = |shape: &[usize], dtype| {
        seed += 1;
        cast(&normal(device, shape, 1.0, seed)?, dtype)
    };
    let mut rows = Vec::new();
    let mut row = |name, bytes, op: &mut dyn FnMut() -> Result<()>| -> Result<()> {
        let milliseconds = time(device, iterations, op)?;
        rows.push(KernelRow { name, bytes, milliseconds, floor_milliseconds: bytes as f64 / bandwidth * 1e3 });
        Ok(())
    };
    let bf16 = |elements: usize| 2 * elements;
    let (tc, tf) = (t * c, t * f);

    let (a, b) = (random(&[t, c], DType::BF16)?, random(&[t, c], DType::BF16)?);
    let (weight, qkv_bias) = (random(&[c], DType::BF16)?, random(&[3 * c], DType::BF16)?);
    let scale = Tensor::from_slice(device, &[1], &[64f32])?;
    let mut seen = CastStatistics::new(device, 1)?;
    row("add", bf16(3 * tc), &mut || add(&a, &b).map(drop))?;
    row("amax", bf16(tc), &mut || amax(&a).map(drop))?;
    row("quantize, codes", bf16(tc) + tc, &mut || {
        quantize(&a, DType::E4M3, &scale, CodeCopies::Rows, &mut seen, 0).map(drop)
    })?;
    row("quantize, codes and transpose", bf16(tc) + 2 * tc, &mut || {
        quantize(&a, DType::E4M3, &scale, CodeCopies::Both, &mut seen, 0).map(drop)
    })?;
    for (name, granularity) in [
        ("quantize_blocks, rows and columns", Granularity::PerRow),
        ("quantize_blocks, 1x128 in both copies", Granularity::Blocks1x128),
        ("quantize_blocks, 128x128 in both copies", Granularity::Blocks128x128),
        ("quantize_blocks, 1x128, transposed 128x128", Granularity::MixedBlocks),
    ] {
        let (how, both) = (CurrentScaling::default(), CodeCopies::Both);
        row(name, bf16(tc) + 2 * tc, &mut || {
            quantize_blocks(&a, DType::E4M3, granularity, how, both, &mut seen, 0).map(drop)
        })?;
    }
    row("transpose, BF16", bf16(2 * tc), &mut || transpose(&a).map(drop))?;
    let codes = quantize(&a, DType::E4M3, &scale, CodeCopies::Rows, &mut seen, 0)?.codes.expect("rows were asked for");
    row("transpose, FP8", 2 * tc, &mut || transpose(&codes).map(drop))?;
    row("rmsnorm", bf16(2 * tc), &mut || rmsnorm(&a, &weight, 1e-5).map(drop))?;
    let (_, rstd) = rmsnorm(&a, &weight, 1e-5)?;
    let mut dweight = Tensor::zeros(device, &[c], DType::F32)?;
    row("rmsnorm_backward", bf16(3 * tc), &mut || {
        norm_backward(&b, &a, &weight, &rstd, &mut dweight, NormBackward::default()).map(drop)
    })?;

    let other = random(&[t, c], DType::BF16)?;
    let mut amax = Tensor::zeros(device, &[1], DType::F32)?;
    row("rmsnorm_backward, + dresidual, amax", bf16(4 * tc), &mut || {
        let options = NormBackward { dresidual: Some(&other), amax: Some(&mut amax), ..NormBackward::default() };
        norm_backward(&b, &a, &weight, &rstd, &mut dweight, options).map(drop)
    })?;
    let saved = SavedActivation::Compressed(compress(&a)?);
    let compressed = |elements: usize| elements + elements / 16;
    row("rmsnorm_backward of float8, + dresidual, amax", bf16(3 * tc) + compressed(tc), &mut || {
        let options = NormBackward { dresidual: Some(&other), amax: Some(&mut amax), ..NormBackward::default() };
        norm_backward(&b, &saved, &weight, &rstd, &mut dweight, options).map(drop)
    })?;
    row("rmsnorm, amax", bf16(tc), &mut || rmsnorm_to(&a, &weight, 1e-5, Output::Amax { amax: &mut amax }).map(drop))?;
    row("rmsnorm, FP8 by rows", bf16(tc) + 2 * tc, &mut || {
        rmsnorm_to(&a, &weight, 1e-5, own(Granularity::PerRow, &mut seen)).map(drop)
    })?;
    row("rmsnorm, FP8 by 1x128", bf16(tc) + 2 * tc, &mut || {
        rmsnorm_to(&a, &weight, 1e-5, own(Granularity::Blocks1x128, &mut seen)).map(drop)
    })?;
    row("rmsnorm, FP8", bf16(tc) + 2 * tc, &mut || rmsnorm_to(&a, &weight, 1e-5, both(&scale, &mut seen)).map(drop))?;
    let layer = NormWeights { kind: NormKind::Layer, weight: &weight, bias: Some(&weight) };
    row("layernorm, amax", bf16(tc), &mut || norm_to(&a, layer, 1e-5, Output::Amax { amax: &mut amax }).map(drop))?;
    row("layernorm, FP8 by 1x128", bf16(tc) + 2 * tc, &mut || {
        norm_to(&a, layer, 1e-5, own(Granularity::Blocks1x128, &mut seen)).map(drop)
    })?;
    row("layernorm, FP8", bf16(tc) + 2 * tc, &mut || norm_to(&a, layer, 1e-5, both(&scale, &mut seen)).map(drop))?;
    let (_, statistics) = norm_to(&a, layer, 1e-5, Output::Plain)?;
    let mut dbias = Tensor::zeros(device, &[c], DType::F32)?;
    row("layernorm_backward, + dresidual, amax", bf16(4 * tc), &mut || {
        let options = NormBackward { dbias: Some(&mut dbias), dresidual: Some(&other), amax: Some(&mut amax) };
        norm_backward(&b, &a, &weight, &statistics, &mut dweight, options).map(drop)
    })?;

    let mut qkv = random(&[t, 3 * c], DType::BF16)?;
    let (head_dim, seq_len) = (128.min(c), t.min(4096));
    let frequencies: Vec<f64> = (0..head_dim / 2).map(|i| 10_000f64.powf(-2.0 * i as f64 / head_dim as f64)).collect();
    let table = rope_table(device, &frequencies, seq_len, DType::F32)?;
    let layout = RopeLayout { heads: 2 * c / head_dim, head_dim, pairs: RopePairs::Halves };
    let positions: Vec<i32> = (0..t).map(|row| (row % seq_len) as i32).collect();
    let positions = &Tensor::from_slice(device, &[t], &positions)?;
    let angles = Angles { table: &table, positions };
    row("rope", bf16(4 * tc), &mut || rope(&mut qkv, angles, layout, Rotation::Forward))?;
    row("rope_backward, FP8", bf16(3 * tc) + 6 * tc, &mut || {
        rope_to(&qkv, angles, layout, Rotation::Backward, both(&scale, &mut seen)).map(drop)
    })?;
    for (name, granularity) in [
        ("rope_backward, FP8 by rows", Granularity::PerRow),
        ("rope_backward, FP8 by 1x128", Granularity::Blocks1x128),
        ("rope_backward, FP8 by 1x128, transposed 128x128", Granularity::MixedBlocks),
    ] {
        row(name, bf16(3 * tc) + 6 * tc, &mut || {
            rope_to(&qkv, angles, layout, Rotation::Backward, own(granularity, &mut seen)).map(drop)
        })?;
    }
    row("rope_backward, amax", bf16(3 * tc), &mut || {
        rope_to(&qkv, angles, layout, Rotation::Backward, Output::Amax { amax: &mut amax }).map(drop)
    })?;
    let heads = c / head_dim;
    let layout = HeadNormLayout { heads, kv_heads: heads, head_dim, kind: NormKind::Rms };
    let (weight, dqkv) = (random(&[head_dim], DType::BF16)?, random(&[t, 3 * c], DType::BF16)?);
    let weights = HeadNormWeights { q: &weight, k: &weight };
    let zeros = || Tensor::zeros(device, &[head_dim], DType::F32);
    let (mut dq, mut dk) = (zeros()?, zeros()?);
    row("head_norm", bf16(6 * tc), &mut || head_norm(&qkv, weights, layout, 1e-6).map(drop))?;
    row("head_norm_backward", bf16(9 * tc), &mut || {
        head_norm_backward(&dqkv, &qkv, weights, layout, 1e-6, &mut dq, &mut dk).map(drop)
    })?;
    drop(dqkv);
    row("add_bias", bf16(6 * tc), &mut || add_bias(&mut qkv, &qkv_bias))?;
    let mut dbias = Tensor::zeros(device, &[3 * c], DType::F32)?;
    row("bias_gradient", bf16(3 * tc), &mut || bias_gradient(&qkv, &mut dbias))?;
    drop(qkv);

    let (gate_up, dy) = (random(&[t, 2 * f], DType::BF16)?, random(&[t, f], DType::BF16)?);
    row("swiglu", bf16(3 * tf), &mut || activation(SwiGlu, &gate_up).map(drop))?;
    row("swiglu_backward", bf16(5 * tf), &mut || activation_backward(SwiGlu, &dy, &gate_up).map(drop))?;
    row("swiglu, FP8", bf16(2 * tf) + 2 * tf, &mut || {
        activation_to(SwiGlu, &gate_up, both(&scale, &mut seen)).map(drop)
    })?;
    row("swiglu, amax", bf16(2 * tf), &mut || {
        activation_to(SwiGlu, &gate_up, Output::Amax { amax: &mut amax }).map(drop)
    })?;
    row("swiglu_backward, amax", bf16(3 * tf), &mut || {
        activation_backward_to(SwiGlu, &dy, &gate_up, Output::Amax { amax: &mut amax }, None).map(drop)
    })?;
    row("swiglu_backward, FP8", bf16(3 * tf) + 4 * tf, &mut || {
        activation_backward_to(SwiGlu, &dy, &gate_up, both(&scale, &mut seen), None).map(drop)
    })?;
    let mut unseen = CastStatistics::new(device, 1)?;
    row("swiglu_backward, FP8, + activation", bf16(3 * tf) + 5 * tf, &mut || {
        let (format, copies) = (DType::E4M3, CodeCopies::Columns);
        let activated = Fp8Output { format, scale: CastScale::Given(&scale), copies, statistics: &mut unseen, slot: 0 };
        activation_backward_to(SwiGlu, &dy, &gate_up, both(&scale, &mut seen), Some(activated)).map(drop)
    })?;
    let gelu = Activation::Gelu(Gelu::Tanh);
    row("gelu, FP8", bf16(tf) + 2 * tf, &mut || activation_to(gelu, &dy, both(&scale, &mut seen)).map(drop))?;
    row("gelu_backward, FP8, + activation", bf16(2 * tf) + 3 * tf, &mut || {
        let (format, copies) = (DType::E4M3, CodeCopies::Columns);
        let activated = Fp8Output { format, scale: CastScale::Given(&scale), copies, statistics: &mut unseen, slot: 0 };
        activation_backward_to(gelu, &dy, &dy, both(&scale, &mut seen), Some(activated)).map(drop)
    })?;
    row("swiglu, FP8, + compressed input", bf16(2 * tf) + 2 * tf + compressed(2 * tf), &mut || {
        activation_compressing(SwiGlu, &gate_up, both(&scale, &mut seen)).map(drop)
    })?;
    row("compress", bf16(2 * tf) + compressed(2 * tf), &mut || compress(&gate_up).map(drop))?;
    let saved = compress(&gate_up)?;
    row("decompress", bf16(2 * tf) + compressed(2 * tf), &mut || decompress(&saved).map(drop))?;
    let saved = SavedActivation::Compressed(saved);
    row("swiglu_backward of float8, amax", bf16(tf) + compressed(2 * tf), &mut || {
        activation_backward_to(SwiGlu, &dy, &saved, Output::Amax { amax: &mut amax }, None).map(drop)
    })?;
    row("swiglu_backward of float8, FP8, + activation", bf16(tf) + compressed(2 * tf) + 5 * tf, &mut || {
        let (format, copies) = (DType::E4M3, CodeCopies::Columns);
        let activated = Fp8Output { format, scale: CastScale::Given(&scale), copies, statistics: &mut unseen, slot: 0 };
        activation_backward_to(SwiGlu, &dy, &saved, both(&scale, &mut seen), Some(activated)).map(drop)
    })?;
    drop(saved);
    for (name, granularity) in
        [("swiglu, FP8 by rows", Granularity::PerRow), ("swiglu, FP8 by 1x128", Granularity::Blocks1x128)]
    {
        row(name, bf16(2 * tf) + 2 * tf, &mut || {
            activation_to(SwiGlu, &gate_up, own(granularity, &mut seen)).map(drop)
        })?;
    }
    for (names, granularity) in [
        (["swiglu_backward, FP8 by rows", "swiglu_backward, FP8 by rows, + activation"], Granularity::PerRow),
        (["swiglu_backward, FP8 by 1x128", "swiglu_backward, FP8 by 1x128, + activation"], Granularity::Blocks1x128),
        (
            [
                "swiglu_backward, FP8 by 1x128, transposed 128x128",
                "swiglu_backward, FP8 by 1x128, transposed 128x128, + activation",
            ],
            Granularity::MixedBlocks,
        ),
    ] {
        row(names[0], bf16(3 * tf) + 4 * tf, &mut || {
            activation_backward_to(SwiGlu, &dy, &gate_up, own(granularity, &mut seen), None).map(drop)
        })?;
        row(names[1], bf16(3 * tf) + 5 * tf, &mut || {
            let (format, copies, how) = (DType::E4M3, CodeCopies::Columns, CurrentScaling::default());
            let scale = CastScale::Own(granularity.of_rows(), how);
            let activated = Fp8Output { format, scale, copies, statistics: &mut unseen, slot: 0 };
            activation_backward_to(SwiGlu, &dy, &gate_up, own(granularity, &mut seen), Some(activated)).map(drop)
        })?;
    }
    drop((gate_up, dy));

    let vocabulary = VOCABULARY;
    let ids: Vec<i32> = (0..t).map(|i| (i * i % 8191 * 7919 % vocabulary) as i32).collect();
    let ids = Tensor::from_slice(device, &[t], &ids)?;
    let embeddings = random(&[vocabulary, c], DType::BF16)?;
    row("embedding", bf16(2 * tc), &mut || embedding(&embeddings, &ids).map(drop))?;
    let mut dembeddings = Tensor::zeros(device, &[vocabulary, c], DType::F32)?;
    // An upper bound: tokens with the same id share one read and write of a gradient row.
    row("embedding_gradient", bf16(tc) + 8 * tc, &mut || embedding_gradient(&a, &ids, &mut dembeddings))?;
    drop((embeddings, dembeddings));
    let chunk = t.min(CHUNK);
    let targets = ids.rows(0, chunk)?;
    let mut logits = random(&[chunk, vocabulary], DType::BF16)?;
    row("cross_entropy", bf16(chunk * vocabulary), &mut || cross_entropy(&logits, &targets).map(drop))?;
    let one = Tensor::from_slice(device, &[1], &[1f32])?;
    row("cross_entropy_gradient", bf16(2 * chunk * vocabulary), &mut || {
        cross_entropy_gradient(&mut logits, &targets, &one).map(drop)
    })?;
    let vocabulary = LONG_VOCABULARY;
    let mut logits = random(&[chunk, vocabulary], DType::BF16)?;
    row("cross_entropy_gradient, long rows", bf16(2 * chunk * vocabulary), &mut || {
        cross_entropy_gradient(&mut logits, &targets, &one).map(drop)
    })?;
    drop(logits);

    updates::rows(device, [2 * f, c], &mut row)?;
    Ok(rows)
}

/// Codes and their transpose, as training writes them.
fn both<'a>(scale: &'a Tensor, statistics: &'a mut CastStatistics) -> Output<'a> {
    let scale = CastScale::Given(scale);
    Output::Fp8(Fp8Output { format: DType::E4M3, scale, copies: CodeCopies::Both, statistics, slot: 0 })
}

/// An output with per-row or per-block scales found by the cast.
fn own(granularity: Granularity, statistics: &mut CastStatistics) -> Output<'_> {
    let scale = CastScale::Own(granularity, CurrentScaling::default());
    Output::Fp8(Fp8Output { format: DType::E4M3, scale, copies: CodeCopies::Both, statistics, slot: 0 })
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn every_row_runs_on_the_cpu() {
        let rows = kernels(&Device::Cpu, 4, 16, 24).unwrap();
        assert!(rows.len() > 10 && rows.iter().all(|row| row.bytes > 0 && row.floor_milliseconds > 0.0));
    }
}
