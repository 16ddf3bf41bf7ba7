//! Memory-bound ops, relative to a copy of the same bytes.

use super::table::{CastTensors, KernelRow, Table, bf16, both, compressed, own};
use super::{Meter, activations, experts, recurrences, updates};
use crate::ops::*;
use crate::{DType, Device, Granularity, Result, Tensor};

/// The vocabularies of embedding and cross-entropy, and the number of tokens per chunk of logits.
const VOCABULARY: usize = 32_000;
const LONG_VOCABULARY: usize = 151_936;
const CHUNK: usize = 2048;
/// The known tokens of a teacher's distribution.
const TOP: usize = 64;

/// Times every memory-bound op on random data: BF16 activations with `tokens` rows T, of width `channels` C or `hidden` F.
pub fn kernels(meter: Meter, tokens: usize, channels: usize, hidden: usize) -> Result<Vec<KernelRow>> {
    let mut table = Table::new(meter)?;
    casts(&mut table, tokens, channels)?;
    magnitudes(&mut table, tokens, channels)?;
    draws(&mut table, tokens, channels)?;
    rms_norms(&mut table, tokens, channels)?;
    layer_norms(&mut table, tokens, channels)?;
    attentions(&mut table, tokens, channels)?;
    sinks(&mut table, tokens, channels)?;
    rotations(&mut table, tokens, channels)?;
    heads(&mut table, tokens, channels)?;
    recurrences::rows(&mut table, tokens, channels)?;
    activations::rows(&mut table, tokens, hidden)?;
    experts::rows(&mut table, tokens, channels)?;
    embedding_and_loss(&mut table, tokens, channels)?;
    updates::rows(&mut table, [2 * hidden, channels])?;
    Ok(table.rows)
}

/// Times ops on activations `[T, C]`, and their casts.
fn casts(table: &mut Table, t: usize, c: usize) -> Result<()> {
    let (device, tc) = (table.device(), t * c);
    let CastTensors { scale, seen, .. } = &mut CastTensors::new(device)?;
    let (a, b) = (table.random(&[t, c], DType::BF16)?, table.random(&[t, c], DType::BF16)?);
    table.row("add", bf16(3 * tc), &mut || add(&a, &b).map(drop))?;
    table.row("amax", bf16(tc), &mut || amax(&a).map(drop))?;
    table.row("quantize, codes", bf16(tc) + tc, &mut || {
        quantize(&a, DType::E4M3, scale, CodeCopies::Rows, seen, 0).map(drop)
    })?;
    table.row("quantize, codes and transpose", bf16(tc) + 2 * tc, &mut || {
        quantize(&a, DType::E4M3, scale, CodeCopies::Both, seen, 0).map(drop)
    })?;
    for (name, granularity) in [
        ("quantize_blocks, rows and columns", Granularity::PerRow),
        ("quantize_blocks, 1x128 in both copies", Granularity::Blocks1x128),
        ("quantize_blocks, 128x128 in both copies", Granularity::Blocks128x128),
        ("quantize_blocks, 1x128, transposed 128x128", Granularity::MixedBlocks),
        ("quantize_blocks, mx in both copies", Granularity::Mx),
        ("quantize_blocks, nvfp4 in both copies, + hadamard", Granularity::Nvfp4),
    ] {
        let (how, both) = (CurrentScaling::default(), CodeCopies::Both);
        table.row(name, bf16(tc) + 2 * tc, &mut || {
            quantize_blocks(&a, DType::E4M3, granularity, how, both, seen, 0).map(drop)
        })?;
    }
    table.row("transpose, BF16", bf16(2 * tc), &mut || transpose(&a).map(drop))?;
    let codes = quantize(&a, DType::E4M3, scale, CodeCopies::Rows, seen, 0)?.codes.expect("rows were asked for");
    table.row("transpose, FP8", 2 * tc, &mut || transpose(&codes).map(drop))?;
    Ok(())
}

/// Times the magnitudes of weight-decomposed adapters.
fn magnitudes(table: &mut Table, t: usize, c: usize) -> Result<()> {
    let (device, tc) = (table.device(), t * c);
    let (a, b) = (table.random(&[t, c], DType::BF16)?, table.random(&[t, c], DType::BF16)?);
    let factors = Tensor::from_slice(device, &[c], &vec![1.5f32; c])?;
    let mut gradient = Tensor::zeros(device, &[c], DType::F32)?;
    table.row("row_squares", bf16(2 * tc), &mut || row_squares(&a, Some(&b)).map(drop))?;
    table.row("scale_columns", bf16(2 * tc), &mut || scale_columns(&a, &factors).map(drop))?;
    table.row("magnitude_gradient", bf16(2 * tc), &mut || magnitude_gradient(&a, &b, &factors, &mut gradient))?;
    Ok(())
}

/// Times random numbers of tokens.
fn draws(table: &mut Table, t: usize, c: usize) -> Result<()> {
    let (a, numbers) = (table.random(&[t, c], DType::BF16)?, (0..t as i32).collect::<Vec<_>>());
    let (draws, columns) = (TokenDraws::new(table.device(), &numbers)?, DrawnColumns { key: 1, first: 0 });
    table.row("dropout", bf16(2 * t * c), &mut || dropout(&a, 0.05, &draws, columns).map(drop))?;
    table.row("add_noise", bf16(2 * t * c), &mut || add_noise(&a, 0.1, &draws, columns).map(drop))?;
    let packed = [quantize_nf4(&table.random(&[t, c], DType::F32)?)?];
    // Half a byte for a code, and two bytes for a value.
    table.row("dequantize_nf4", t * c / 2 + bf16(t * c), &mut || dequantize_nf4(&packed, DType::BF16).map(drop))?;
    Ok(())
}

/// Times RMSNorm.
fn rms_norms(table: &mut Table, t: usize, c: usize) -> Result<()> {
    let (device, tc) = (table.device(), t * c);
    let CastTensors { scale, amax, seen, .. } = &mut CastTensors::new(device)?;
    let (a, b, weight) =
        (table.random(&[t, c], DType::BF16)?, table.random(&[t, c], DType::BF16)?, table.random(&[c], DType::BF16)?);
    table.row("rmsnorm", bf16(2 * tc), &mut || rmsnorm(&a, &weight, 1e-5).map(drop))?;
    let (_, rstd) = rmsnorm(&a, &weight, 1e-5)?;
    let mut dweight = Tensor::zeros(device, &[c], DType::F32)?;
    table.row("rmsnorm_backward", bf16(3 * tc), &mut || {
        norm_backward(&b, &a, NormWeights::rms(&weight), &rstd, &mut dweight, NormBackward::default()).map(drop)
    })?;

    let other = table.random(&[t, c], DType::BF16)?;
    table.row("rmsnorm_backward, + dresidual, amax", bf16(4 * tc), &mut || {
        let options = NormBackward { dresidual: Some(&other), amax: Some(&mut *amax), ..NormBackward::default() };
        norm_backward(&b, &a, NormWeights::rms(&weight), &rstd, &mut dweight, options).map(drop)
    })?;
    let saved = SavedActivation::Compressed(compress(&a)?);
    table.row("rmsnorm_backward of float8, + dresidual, amax", bf16(3 * tc) + compressed(tc), &mut || {
        let options = NormBackward { dresidual: Some(&other), amax: Some(&mut *amax), ..NormBackward::default() };
        norm_backward(&b, &saved, NormWeights::rms(&weight), &rstd, &mut dweight, options).map(drop)
    })?;
    table.row("rmsnorm, amax", bf16(tc), &mut || rmsnorm_to(&a, &weight, 1e-5, Output::Amax { amax }).map(drop))?;
    table.row("rmsnorm, FP8 by rows", bf16(tc) + 2 * tc, &mut || {
        rmsnorm_to(&a, &weight, 1e-5, own(Granularity::PerRow, seen)).map(drop)
    })?;
    table.row("rmsnorm, FP8 by 1x128", bf16(tc) + 2 * tc, &mut || {
        rmsnorm_to(&a, &weight, 1e-5, own(Granularity::Blocks1x128, seen)).map(drop)
    })?;
    table.row("rmsnorm, FP8", bf16(tc) + 2 * tc, &mut || rmsnorm_to(&a, &weight, 1e-5, both(scale, seen)).map(drop))?;
    Ok(())
}

/// Times LayerNorm.
fn layer_norms(table: &mut Table, t: usize, c: usize) -> Result<()> {
    let (device, tc) = (table.device(), t * c);
    let CastTensors { scale, amax, seen, .. } = &mut CastTensors::new(device)?;
    let (a, b, weight) =
        (table.random(&[t, c], DType::BF16)?, table.random(&[t, c], DType::BF16)?, table.random(&[c], DType::BF16)?);
    let other = table.random(&[t, c], DType::BF16)?;
    let mut dweight = Tensor::zeros(device, &[c], DType::F32)?;
    let layer = NormWeights { kind: NormKind::Layer, weight: &weight, bias: Some(&weight) };
    table.row("layernorm, amax", bf16(tc), &mut || norm_to(&a, layer, 1e-5, Output::Amax { amax }).map(drop))?;
    table.row("layernorm, FP8 by 1x128", bf16(tc) + 2 * tc, &mut || {
        norm_to(&a, layer, 1e-5, own(Granularity::Blocks1x128, seen)).map(drop)
    })?;
    table.row("layernorm, FP8", bf16(tc) + 2 * tc, &mut || norm_to(&a, layer, 1e-5, both(scale, seen)).map(drop))?;
    let (_, statistics) = norm_to(&a, layer, 1e-5, Output::Plain)?;
    let mut dbias = Tensor::zeros(device, &[c], DType::F32)?;
    table.row("layernorm_backward, + dresidual, amax", bf16(4 * tc), &mut || {
        let options = NormBackward { dbias: Some(&mut dbias), dresidual: Some(&other), amax: Some(amax) };
        norm_backward(&b, &a, layer, &statistics, &mut dweight, options).map(drop)
    })?;
    Ok(())
}

/// Times causal attention of one sequence, with heads of size 128, which is bound by products.
fn attentions(table: &mut Table, t: usize, c: usize) -> Result<()> {
    let (Device::Cuda(gpu), heads) = (table.device().clone(), c.div_ceil(128)) else { return Ok(()) };
    let spec = AttentionSpec::causal(heads, heads, 128);
    let qkv = table.random(&[t, spec.qkv_width()], DType::BF16)?;
    let mut attend = || attention(AttentionInput::fused(&qkv, &spec, 1, None), &spec).map(drop);
    let bytes = bf16(t * (spec.qkv_width() + spec.output_width())) + 4 * t * heads;
    table.row("attention", bytes, &mut attend)?;
    table.row("attention, independent of the batch", bytes, &mut || gpu.with_batch_invariance(attend))
}

/// Times attention sinks, with heads of size 64.
fn sinks(table: &mut Table, t: usize, c: usize) -> Result<()> {
    let (device, tc, heads) = (table.device(), t * c, c.div_ceil(64));
    let (mut o, d_o) = (table.random(&[t, c], DType::BF16)?, table.random(&[t, c], DType::BF16)?);
    let (mut lse, sinks) = (table.random(&[t, heads], DType::F32)?, table.random(&[heads], DType::BF16)?);
    let mut dsinks = Tensor::zeros(device, &[heads], DType::F32)?;
    table.row("attention_sink", bf16(2 * tc) + 8 * t * heads, &mut || attention_sink(&mut o, &mut lse, &sinks))?;
    table.row("attention_sink_backward", bf16(2 * tc) + 4 * t * heads, &mut || {
        attention_sink_backward(&d_o, &o, &lse, &sinks, &mut dsinks)
    })
}

/// Times rotary positions of queries and keys `[T, 3 · C]`.
fn rotations(table: &mut Table, t: usize, c: usize) -> Result<()> {
    let (device, tc) = (table.device(), t * c);
    let CastTensors { scale, amax, seen, .. } = &mut CastTensors::new(device)?;
    let mut qkv = table.random(&[t, 3 * c], DType::BF16)?;
    let (head_dim, seq_len) = (128.min(c), t.min(4096));
    let frequencies: Vec<f64> = (0..head_dim / 2).map(|i| 10_000f64.powf(-2.0 * i as f64 / head_dim as f64)).collect();
    let angles_table = rope_table(device, &frequencies, seq_len, DType::F32)?;
    let layout = RopeLayout { heads: 2 * c / head_dim, head_dim, pairs: RopePairs::Halves };
    let positions: Vec<i32> = (0..t).map(|row| (row % seq_len) as i32).collect();
    let positions = &Tensor::from_slice(device, &[t], &positions)?;
    let angles = Angles { table: &angles_table, positions };
    table.row("rope", bf16(4 * tc), &mut || rope(&mut qkv, angles, layout, Rotation::Forward))?;
    table.row("rope_backward, FP8", bf16(3 * tc) + 6 * tc, &mut || {
        rope_to(&qkv, angles, layout, Rotation::Backward, both(scale, seen)).map(drop)
    })?;
    for (name, granularity) in [
        ("rope_backward, FP8 by rows", Granularity::PerRow),
        ("rope_backward, FP8 by 1x128", Granularity::Blocks1x128),
        ("rope_backward, FP8 by 1x128, transposed 128x128", Granularity::MixedBlocks),
    ] {
        table.row(name, bf16(3 * tc) + 6 * tc, &mut || {
            rope_to(&qkv, angles, layout, Rotation::Backward, own(granularity, seen)).map(drop)
        })?;
    }
    table.row("rope_backward, amax", bf16(3 * tc), &mut || {
        rope_to(&qkv, angles, layout, Rotation::Backward, Output::Amax { amax }).map(drop)
    })?;
    Ok(())
}

/// Times norms of heads, and biases, of queries, keys and values `[T, 3 · C]`.
fn heads(table: &mut Table, t: usize, c: usize) -> Result<()> {
    let (device, tc) = (table.device(), t * c);
    let head_dim = 128.min(c);
    let (mut qkv, qkv_bias) = (table.random(&[t, 3 * c], DType::BF16)?, table.random(&[3 * c], DType::BF16)?);
    let heads = c / head_dim;
    let layout = HeadNormLayout { heads, kv_heads: heads, head_dim, kind: NormKind::Rms };
    let (weight, dqkv) = (table.random(&[head_dim], DType::BF16)?, table.random(&[t, 3 * c], DType::BF16)?);
    let weights = HeadNormWeights { q: &weight, k: &weight };
    let zeros = || Tensor::zeros(device, &[head_dim], DType::F32);
    let (mut dq, mut dk) = (zeros()?, zeros()?);
    table.row("head_norm", bf16(6 * tc), &mut || head_norm(&qkv, weights, layout, 1e-6).map(drop))?;
    table.row("head_norm_backward", bf16(9 * tc), &mut || {
        head_norm_backward(&dqkv, &qkv, weights, layout, 1e-6, &mut dq, &mut dk).map(drop)
    })?;
    table.row("add_bias", bf16(6 * tc), &mut || add_bias(&mut qkv, &qkv_bias))?;
    let mut dbias = Tensor::zeros(device, &[3 * c], DType::F32)?;
    table.row("bias_gradient", bf16(3 * tc), &mut || bias_gradient(&qkv, &mut dbias))?;
    Ok(())
}

/// Times the embedding, and the loss of logits `[tokens, V]`.
fn embedding_and_loss(table: &mut Table, t: usize, c: usize) -> Result<()> {
    let (device, tc) = (table.device(), t * c);
    let a = table.random(&[t, c], DType::BF16)?;
    let vocabulary = VOCABULARY;
    let ids: Vec<i32> = (0..t).map(|i| (i * i % 8191 * 7919 % vocabulary) as i32).collect();
    let ids = Tensor::from_slice(device, &[t], &ids)?;
    let embeddings = table.random(&[vocabulary, c], DType::BF16)?;
    table.row("embedding", bf16(2 * tc), &mut || embedding(&embeddings, &ids).map(drop))?;
    let mut dembeddings = Tensor::zeros(device, &[vocabulary, c], DType::F32)?;
    // The bytes are an upper bound: tokens with the same id share one read and write of a gradient row.
    table.row("embedding_gradient", bf16(tc) + 8 * tc, &mut || embedding_gradient(&a, &ids, &mut dembeddings))?;
    drop((embeddings, dembeddings));
    let chunk = t.min(CHUNK);
    let targets = ids.rows(0, chunk)?;
    let mut logits = table.random(&[chunk, vocabulary], DType::BF16)?;
    let how = CrossEntropy::default();
    table.row("cross_entropy", bf16(chunk * vocabulary), &mut || {
        cross_entropy(&logits, vocabulary, &targets, how).map(drop)
    })?;
    let one = Tensor::from_slice(device, &[1], &[1f32])?;
    table.row("cross_entropy_gradient", bf16(2 * chunk * vocabulary), &mut || {
        cross_entropy_gradient(&mut logits, vocabulary, &targets, &one, how).map(drop)
    })?;
    let (teacher, half) =
        (table.random(&[chunk, vocabulary], DType::BF16)?, Divergence { beta: 0.5, temperature: 1.0 });
    table.row("divergence_gradient", bf16(3 * chunk * vocabulary), &mut || {
        divergence_gradient(&mut logits, &teacher, vocabulary, &targets, &one, half).map(drop)
    })?;
    drop(teacher);
    let (top, rest) = (table.random(&[chunk, TOP], DType::F32)?, table.random(&[chunk], DType::F32)?);
    let columns: Vec<i32> = (0..chunk * TOP).map(|at| (at % TOP) as i32).collect();
    let columns = Tensor::from_slice(device, &[chunk, TOP], &columns)?;
    let teacher = TopLogProbs { ids: &columns, log_probs: &top, rest: &rest };
    table.row("divergence_gradient_of_top", bf16(2 * chunk * vocabulary), &mut || {
        divergence_gradient_of_top(&mut logits, teacher, vocabulary, &targets, &one, half).map(drop)
    })?;
    let each = table.random(&[chunk], DType::F32)?;
    let bonus = EntropyBonus { factors: &each, weights: &each, scale: &one, coefficient: 0.01 };
    table.row("entropy_gradient", bf16(2 * chunk * vocabulary), &mut || {
        entropy_gradient(&mut logits, vocabulary, &targets, bonus).map(drop)
    })?;
    let vocabulary = LONG_VOCABULARY;
    let mut logits = table.random(&[chunk, vocabulary], DType::BF16)?;
    table.row("cross_entropy_gradient, long rows", bf16(2 * chunk * vocabulary), &mut || {
        cross_entropy_gradient(&mut logits, vocabulary, &targets, &one, how).map(drop)
    })?;
    preference(table, t)
}

/// Times the loss of a pair of sequences with `t` tokens together.
fn preference(table: &mut Table, t: usize) -> Result<()> {
    let (losses, zero) = (table.random(&[t], DType::F32)?, Tensor::zeros(table.device(), &[1], DType::F32)?);
    table.row("sequence_log_probs", 4 * t, &mut || sequence_log_probs(&losses, 2).map(drop))?;
    let policy = sequence_log_probs(&losses, 2)?;
    let (reference, lengths, labels) = (policy.duplicate()?, policy.duplicate()?, policy.duplicate()?);
    let targets = PreferenceTargets { reference, lengths, labels, kl: zero.duplicate()? };
    let terms = [PreferenceTerm { loss: PreferenceLoss::Sigmoid { label_smoothing: 0.0 }, weight: 1.0 }];
    table.row("preference_loss", 4 * t, &mut || preference_loss(&terms, 0.1, &policy, &targets, &zero, t).map(drop))?;
    let mut known = || table.random(&[t], DType::F32);
    let (old, reference, advantages, corrections) = (known()?, known()?, known()?, known()?);
    let (weights, ids) = (known()?, Tensor::zeros(table.device(), &[t], DType::I32)?);
    let sequences = Tensor::from_slice(table.device(), &[3], &[0, t as i32 / 2, t as i32])?;
    let known = PolicyTargets { old, reference, advantages, corrections, weights, sequences };
    let bound = PolicyBound::Clip { low: 0.2, high: 0.28, most: 3.0 };
    let how = PolicyLoss { bound, of_sequence: true, beta: 0.1, kl: KlEstimator::WeightedK3, correction: None };
    table.row("policy_loss", 36 * t, &mut || policy_loss(&how, &losses, &ids, &known, &zero).map(drop))?;
    let of_values = ValueTargets { old: &known.old, returns: &known.reference, weights: &known.weights };
    let how = ValueLoss { coefficient: 0.1, range: 0.5 };
    table.row("value_loss", 28 * t, &mut || value_loss(&how, &losses, &ids, of_values, &zero).map(drop))?;
    let (mut scores, labels) = (table.random(&[t, 2], DType::F32)?, table.random(&[1, 2], DType::F32)?);
    table.row("label_loss", 24 * t, &mut || {
        label_loss(LabelLoss::SingleLabel, &mut scores, &ids, &labels, &zero).map(drop)
    })
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::Device;

    #[test]
    fn every_row_runs_on_the_cpu() {
        let rows = kernels(Meter { device: &Device::Cpu, power: true }, 4, 16, 24).unwrap();
        assert!(rows.len() > 10 && rows.iter().all(|row| row.bytes > 0 && row.floor_milliseconds > 0.0));
    }
}
