//! Attention, relative to the rate of a large BF16 product.

use super::gemm::ROUND_MILLISECONDS;
use super::{Cost, Meter};
use crate::ops::{AttentionInput, AttentionSpec, attention as forward, attention_backward, cast, normal};
use crate::{DType, Result};

/// The measurement of attention of one shape.
#[derive(Clone, Debug, serde::Serialize)]
pub struct AttentionRow {
    /// The heads, mask and soft cap.
    pub attention: String,
    /// The number of sequences.
    pub batch: usize,
    /// The number of tokens per sequence.
    pub seq_len: usize,
    /// The costs of forward and of backward.
    pub costs: [Cost; 2],
    /// The FLOPs of forward and of backward: two products in forward and five in backward, over the scores that the mask leaves.
    pub flops: [f64; 2],
}

/// Times attention in BF16, forward and backward, on random data of `batch` sequences of `seq_len` tokens.
pub fn attention(meter: Meter, spec: &AttentionSpec, batch: usize, seq_len: usize) -> Result<AttentionRow> {
    let device = meter.device;
    let random = |width, seed| cast(&normal(device, &[batch * seq_len, width], 1.0, seed)?, DType::BF16);
    let (qkv, d_o) = (random(spec.qkv_width(), 1)?, random(spec.output_width(), 2)?);
    let input = AttentionInput::fused(&qkv, spec, batch, None);
    let (o, lse) = forward(input, spec)?;
    let costs = [
        meter.rounds_for(ROUND_MILLISECONDS, &mut || forward(input, spec).map(drop))?,
        meter.rounds_for(ROUND_MILLISECONDS, &mut || attention_backward(&d_o, input, &o, &lse, spec).map(drop))?,
    ];
    // The scores are half of a square up to the window, and then a band with the width of the window.
    let (len, window) = (seq_len as f64, spec.window.map_or(seq_len, |window| window.min(seq_len)) as f64);
    let product = 2.0 * (batch * spec.query_width()) as f64 * window * (len - window / 2.0);
    let (attention, flops) = (spec.to_string(), [2.0 * product, 5.0 * product]);
    Ok(AttentionRow { attention, batch, seq_len, costs, flops })
}
