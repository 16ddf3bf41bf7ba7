//! The ops of recurrent layers and of gates, relative to a copy of the same bytes.

use super::table::{Table, bf16};
use crate::ops::*;
use crate::{DType, Result, Tensor};

/// Times the ops on activations `[T, C]`.
pub(super) fn rows(table: &mut Table, t: usize, c: usize) -> Result<()> {
    gates(table, t, c)?;
    convolutions(table, t, 2 * c)?;
    delta_rules(table, t, c)?;
    state_spaces(table, t, c)
}

/// Times the gates of attention and of gated delta nets, with heads of size 128, and the norm of Mamba-2 with groups of all channels.
fn gates(table: &mut Table, t: usize, c: usize) -> Result<()> {
    let (device, tc, heads) = (table.device(), t * c, c.div_ceil(128));
    let (x, z) = (table.random(&[t, c], DType::BF16)?, table.random(&[t, c], DType::BF16)?);
    table.row("output_gate", bf16(3 * tc), &mut || output_gate(GateFunction::Sigmoid, &x, &z).map(drop))?;
    table.row("output_gate_backward", bf16(5 * tc), &mut || {
        output_gate_backward(GateFunction::Sigmoid, &z, &x, &z).map(drop)
    })?;
    let head_dim = 128.min(c);
    let how = GatedNorm { size: head_dim, order: GateOrder::AfterNorm, eps: 1e-6 };
    let weight = table.random(&[head_dim], DType::BF16)?;
    let mut dweight = Tensor::zeros(device, &[head_dim], DType::F32)?;
    table.row("gated_norm", bf16(3 * tc), &mut || gated_norm(&x, &z, &weight, how).map(drop))?;
    table.row("gated_norm_backward", bf16(5 * tc), &mut || {
        gated_norm_backward(&z, &x, &z, &weight, how, &mut dweight).map(drop)
    })?;
    let how = GatedNorm { size: c, order: GateOrder::BeforeNorm, ..how };
    let weight = table.random(&[c], DType::BF16)?;
    let mut dweight = Tensor::zeros(device, &[c], DType::F32)?;
    table.row("gated_norm, gate before", bf16(3 * tc), &mut || gated_norm(&x, &z, &weight, how).map(drop))?;
    table.row("gated_norm_backward, gate before", bf16(5 * tc), &mut || {
        gated_norm_backward(&z, &x, &z, &weight, how, &mut dweight).map(drop)
    })?;
    let (b, a) = (table.random(&[t, heads], DType::BF16)?, table.random(&[t, heads], DType::BF16)?);
    let (a_log, dt_bias) = (table.random(&[heads], DType::F32)?, table.random(&[heads], DType::F32)?);
    let input = GateInput { b: &b, a: &a, a_log: &a_log, dt_bias: &dt_bias };
    table.row("delta_gates", bf16(2 * t * heads) + 8 * t * heads, &mut || delta_gates(input).map(drop))?;
    let gates = delta_gates(input)?;
    let (mut da_log, mut ddt_bias) = (a_log.duplicate()?, dt_bias.duplicate()?);
    table.row("delta_gates_backward", bf16(3 * t * heads) + 16 * t * heads, &mut || {
        delta_gates_backward(&gates, input, &gates, &mut da_log, &mut ddt_bias).map(drop)
    })
}

/// Times the causal convolution of gated delta nets on activations `[T, C]`: training on four documents, and a decode step of 64 sequences.
fn convolutions(table: &mut Table, t: usize, c: usize) -> Result<()> {
    let (device, tc, taps) = (table.device(), t * c, MAX_TAPS);
    let (x, dy) = (table.random(&[t, c], DType::BF16)?, table.random(&[t, c], DType::BF16)?);
    let weight = table.random(&[c, 1, taps], DType::BF16)?;
    let weights = ConvWeights { weight: &weight, bias: None };
    let mut dweight = Tensor::zeros(device, &[c, 1, taps], DType::F32)?;
    let bounds: Vec<i32> = (0..=4).map(|n| (t * n / 4) as i32).collect();
    let at = Tensor::from_slice(device, &[5], &bounds)?;
    let documents = Segments::At(&at);
    table.row("causal_conv", bf16(2 * tc), &mut || causal_conv(&x, weights, documents, None).map(drop))?;
    table.row("causal_conv_backward", bf16(3 * tc), &mut || {
        causal_conv_backward(&dy, &x, weights, documents, &mut dweight, None).map(drop)
    })?;
    let sequences = 64.min(t);
    let rows = x.rows(0, sequences)?;
    let slots = Tensor::from_slice(device, &[sequences], &(0..sequences as i32).collect::<Vec<_>>())?;
    let past = Tensor::from_slice(device, &[sequences], &vec![1i32; sequences])?;
    let ends = Tensor::from_slice(device, &[sequences + 1], &(0..=sequences as i32).collect::<Vec<_>>())?;
    let mut pool = table.random(&[sequences, taps - 1, c], DType::BF16)?;
    table.row("causal_conv, decode", bf16(2 * taps * sequences * c), &mut || {
        let states = SegmentStates { values: &mut pool, slots: &slots, past: &past };
        causal_conv(&rows, weights, Segments::At(&ends), Some(states)).map(drop)
    })
}

/// Times the gated delta rule with values `[T, C]`, heads of size 128 and two value heads for each key head: training, and a decode step of 64 sequences.
fn delta_rules(table: &mut Table, t: usize, c: usize) -> Result<()> {
    let (device, dim) = (table.device(), 128.min(c / 2));
    let spec = DeltaSpec { key_heads: c / dim / 2, value_heads: c / dim / 2 * 2, key_dim: dim, value_dim: dim };
    let (width, values, heads) = (spec.qkv_width(), spec.value_width(), spec.value_heads);
    let (qkv, d_o) = (table.random(&[t, width], DType::BF16)?, table.random(&[t, values], DType::BF16)?);
    let (b, a) = (table.random(&[t, heads], DType::BF16)?, table.random(&[t, heads], DType::BF16)?);
    let (a_log, dt_bias) = (table.random(&[heads], DType::F32)?, table.random(&[heads], DType::F32)?);
    let gates = delta_gates(GateInput { b: &b, a: &a, a_log: &a_log, dt_bias: &dt_bias })?;
    let (of_gates, one) = (8 * t * heads, Segments::Even(1));
    table.row("gated_delta_rule", bf16(t * (width + values)) + of_gates, &mut || {
        gated_delta_rule(&qkv, &gates, &spec, one, None).map(drop)
    })?;
    table.row("gated_delta_rule_backward", bf16(t * (2 * width + values)) + 2 * of_gates, &mut || {
        gated_delta_rule_backward(&d_o, &qkv, &gates, &spec, one, BoundaryStates::default()).map(drop)
    })?;
    let sequences = 64.min(t);
    let (rows, of_rows) = (qkv.rows(0, sequences)?, |x: &Tensor| x.rows(0, sequences));
    let gates = DeltaGates { g: of_rows(&gates.g)?, beta: of_rows(&gates.beta)? };
    let indices = |of: Vec<i32>| Tensor::from_slice(device, &[of.len()], &of);
    let (slots, past) = (indices((0..sequences as i32).collect())?, indices(vec![1; sequences])?);
    let mut states = table.random(&[sequences, heads, dim, dim], DType::F32)?;
    table.row("gated_delta_rule, decode", 8 * states.len(), &mut || {
        let states = SegmentStates { values: &mut states, slots: &slots, past: &past };
        gated_delta_rule(&rows, &gates, &spec, Segments::Even(sequences), Some(states)).map(drop)
    })
}

/// Times the state space duality with inputs `[T, C]`, heads of size 64 that share eight groups, and states of 128 columns: training, and a decode step of
/// 64 sequences.
fn state_spaces(table: &mut Table, t: usize, c: usize) -> Result<()> {
    let (device, head_dim) = (table.device(), 64.min(c));
    let heads = c / head_dim;
    let groups = (1..=8).rev().find(|&groups| heads.is_multiple_of(groups)).unwrap_or(1);
    let spec = SsdSpec { heads, groups, head_dim, state_dim: 128, dt_limits: [0.0, f64::INFINITY] };
    let (width, values) = (spec.xbc_width(), spec.width());
    let (xbc, dy) = (table.random(&[t, width], DType::BF16)?, table.random(&[t, values], DType::BF16)?);
    let (dt, vector) = (table.random(&[t, heads], DType::BF16)?, table.random(&[heads], DType::F32)?);
    let input = SsdInput { xbc: &xbc, dt: &dt, a_log: &vector, dt_bias: &vector, d: &vector };
    let one = Segments::Even(1);
    table.row("ssd", bf16(t * (width + values + heads)), &mut || ssd(input, &spec, one, None).map(drop))?;
    let [mut a_log, mut dt_bias, mut d] = [vector.duplicate()?, vector.duplicate()?, vector.duplicate()?];
    table.row("ssd_backward", bf16(t * (2 * width + values + 2 * heads)), &mut || {
        let parameters = SsdParameterGradients { a_log: &mut a_log, dt_bias: &mut dt_bias, d: &mut d };
        ssd_backward(&dy, input, &spec, one, BoundaryStates::default(), parameters).map(drop)
    })?;
    let sequences = 64.min(t);
    let [rows, steps] = [xbc.rows(0, sequences)?, dt.rows(0, sequences)?];
    let input = SsdInput { xbc: &rows, dt: &steps, ..input };
    let indices = |of: Vec<i32>| Tensor::from_slice(device, &[of.len()], &of);
    let (slots, past) = (indices((0..sequences as i32).collect())?, indices(vec![1; sequences])?);
    let mut states = table.random(&[&[sequences][..], &spec.state_shape()].concat(), DType::F32)?;
    table.row("ssd, decode", 8 * states.len(), &mut || {
        let states = SegmentStates { values: &mut states, slots: &slots, past: &past };
        ssd(input, &spec, Segments::Even(sequences), Some(states)).map(drop)
    })
}
