//! The ops. Each op has a folder with its contract, CPU reference, CUDA launch, kernel, and tests that CPU and GPU agree.
//!
//! **No op without a CPU reference.** The folder of an op has five files:
//!
//! - `mod.rs`: the contract (formula, shapes, types, errors, source), then checks, allocation and dispatch
//! - `cpu.rs`: the definition, plain loops over one row
//! - `cuda.rs`: the declaration of the kernels, and their launches
//! - `NAME.cu`: the kernel, CUDA C++
//! - `tests.rs`: tests that CPU and GPU agree, with a tolerance and its reason
//!
//! An op that does not support its arguments returns an error. Precision never changes silently.
//!
//! Sums on the CPU are split by position, so the bits do not depend on the number of threads. Counters are I64 tensors, because the GPU adds to
//! counters atomically, and only integer sums are independent of the order of additions.

mod adamw;
mod add;
mod argmax;
mod attention;
mod attention_sink;
mod bias;
mod cast;
mod causal_conv;
mod checksum;
mod chunks;
mod column_parts;
mod column_scales;
mod compare;
mod compress;
mod cross_entropy;
mod declaration;
mod delayed_scaling;
mod delta_gates;
mod dequantize;
mod descend;
mod destination;
mod dispatch;
mod divergence;
mod document_attention;
mod dropout;
mod ema;
mod embedding;
mod entropy;
mod expanded;
mod gated_delta_rule;
mod gated_norm;
mod gemm;
mod global_norm;
#[cfg(test)]
mod golden;
mod gradient_codes;
mod grouped_gemm;
mod groups;
mod head_norm;
mod kernels;
mod label_loss;
pub(crate) mod launch;
mod magnitude;
mod microscaling;
mod momentum;
mod move_columns;
mod negate_targets;
mod newton_schulz;
mod nf4;
mod operand;
mod output_gate;
mod paged_attention;
mod parallel_rows;
mod parameter;
mod permute;
mod policy;
mod preference;
mod projection_norm;
mod quantize;
mod quantize_slice;
mod random;
mod repeat_columns;
mod rmsnorm;
mod rope;
mod router;
mod sample;
mod scaled;
mod segments;
#[cfg(test)]
mod signatures;
mod ssd;
mod sum_parts;
mod swiglu;
mod transpose;
mod value;
mod xielu;

pub use adamw::{AdamW, AdamWParameter, AdamWScalars, Moments, WeightCast, adamw, adamw_amaxes};
pub use add::add;
pub use argmax::argmax;
pub use attention::{
    AttentionBackend, AttentionCase, AttentionGradient, AttentionInput, AttentionSpec, ChosenBackend, HeadView,
    KeySource,
};
pub use attention_sink::{attention_sink, attention_sink_backward};
pub use bias::{add_bias, add_grouped_bias, bias_gradient, grouped_bias_dots, grouped_bias_gradient};
pub use cast::{cast, cast_into};
pub use causal_conv::{ConvWeights, MAX_TAPS, causal_conv, causal_conv_backward};
pub use checksum::checksums;
pub use column_parts::{divide_columns, join_columns};
pub use column_scales::{add_unscaled_columns, column_scales, scale_columns, unscale_columns};
pub use compare::{SUMS, compare, compare_along, compare_codes, compare_rows};
pub use compress::{CompressedTensor, SavedActivation, compress, decompress};
pub use cross_entropy::{
    CrossEntropy, IGNORE_INDEX, VocabularyPart, cap_logits, cross_entropy, cross_entropy_gradient, merge_losses,
    partial_gradient, partial_losses,
};
pub use delayed_scaling::{AmaxReducer, DelayedScales, DelayedScaling, NonFinite, delayed_scaling};
pub use delta_gates::{DeltaGates, GateGradient, GateInput, delta_gates, delta_gates_backward};
pub use dequantize::dequantize;
pub use descend::{DescendParameter, descend, descend_amax};
pub use destination::{CastScale, CastStatistics, CodeCopies, CurrentScaling, Fp8Output, Output, Produced};
pub use divergence::{Divergence, TopLogProbs, divergence_gradient, divergence_gradient_of_top};
pub use document_attention::{attention, attention_backward, attention_with_sinks};
pub use dropout::{DrawnColumns, TokenDraws, add_noise, dropout};
pub use ema::ema;
pub use embedding::{embedding, embedding_gradient, embedding_of_part, embedding_of_part_gradient};
pub use entropy::{EntropyBonus, entropy_gradient};
pub use expanded::{expanded, unexpanded};
pub use gated_delta_rule::{DeltaGradient, DeltaSpec, gated_delta_rule, gated_delta_rule_backward};
pub use gated_norm::{GateOrder, GatedNorm, gated_norm, gated_norm_backward};
pub use gemm::{gemm_nt, gemm_nt_add, gemm_nt_into, gemm_nt_plus, has_ordered_sums};
pub use global_norm::{global_norm, limit_norm, root_of_sum, sum_of_squares, sums_of_squares};
pub use gradient_codes::{CodingError, decode_gradients, encode_gradients, gradient_code_bytes, sum_gradient_codes};
pub use grouped_gemm::{grouped_gemm_nt, grouped_wgrad_add, grouped_wgrad_into};
pub use groups::{GroupedRows, Groups};
pub use head_norm::{HeadNormLayout, HeadNormWeights, head_norm, head_norm_backward};
pub use kernels::{KernelSupport, kernel_support, kernels};
pub use label_loss::{LabelLoss, label_loss};
pub use magnitude::{magnitude_factors, magnitude_gradient, row_norms, row_squares};
pub use microscaling::{Hadamard, hadamard};
pub use momentum::{Direction, Momentum, MomentumParameter, MomentumScalars, MomentumStep, momentum, momentum_amax};
pub use move_columns::{ColumnRuns, move_columns, sum_columns};
pub use negate_targets::negate_targets;
pub use newton_schulz::newton_schulz;
pub use nf4::{dequantize_nf4, nf4_amaxes, nf4_levels, nf4_of_parts, nf4_values, quantize_nf4};
pub use operand::{Accumulation, Operand};
pub use output_gate::{GateFunction, output_gate, output_gate_backward};
pub use paged_attention::{KvBlocks, PagedBatch, SuspendedKv, append_kv, paged_attention};
pub use parameter::{Gradient, UpdatedWeight, WeightCopy};
pub use permute::{
    Slots, clear_unused_rows, combine, gather_quantized, gather_to, gathered_weight_gradient, slots, weight_gradient,
};
pub use policy::{Correction, KlEstimator, PolicyBound, PolicyLoss, PolicyTargets, policy_loss};
pub use preference::{
    PreferenceLoss, PreferenceTargets, PreferenceTerm, log_odds, preference_loss, sequence_log_probs,
};
pub use projection_norm::{
    ProjectionNormLayout, ProjectionSums, projection_dots, projection_norm, projection_norm_backward,
    projection_squares,
};
pub use quantize::blocks::quantize_blocks;
pub use quantize::{amax, measure, quantize, quantize_into, quantize_rounded_into, raise_amax, take_scale};
pub use quantize_slice::{MatrixSlice, empty_slice, quantize_slice, slice_amaxes};
pub use random::{normal, normal_from};
pub use repeat_columns::{RepeatedColumns, repeat_columns, repeat_columns_backward};
pub use rmsnorm::{NormBackward, NormKind, NormWeights, norm_backward, norm_to, rmsnorm, rmsnorm_to};
pub use rope::{Angles, RopeLayout, RopePairs, Rotation, factor_table, rope, rope_table, rope_to};
pub use router::{
    ExpertGroups, GroupScore, RouterLosses, RouterScores, Routes, Routing, add_counts, count_choices, route,
    route_backward,
};
pub use sample::{Adjustment, Distribution, Draw, Draws, sample};
pub use scaled::{scaled, scaled_by, split, unscaled};
pub use segments::{BoundaryStates, SegmentStates, Segments};
pub use ssd::{SsdGradient, SsdInput, SsdParameterGradients, SsdSpec, ssd, ssd_backward};
pub use sum_parts::sum_parts;
pub(crate) use sum_parts::{Inboxes, sum_in_one_shot, sum_parts_into};
pub use swiglu::{
    Activation, Gelu, activation, activation_backward, activation_backward_to, activation_compressing, activation_dots,
    activation_to, product_activation_to,
};
pub use transpose::{transpose, transpose_codes};
pub use value::{ValueLoss, ValueTargets, value_loss};
pub use xielu::{XIELU_BETA, XIELU_EPS, XieluAlphas, xielu, xielu_backward};

use crate::{DType, Result, Tensor};

/// The types in which layers compute.
const COMPUTE: &[DType] = &[DType::F64, DType::F32, DType::F16, DType::BF16];

fn expect_compute(what: &str, x: &Tensor) -> Result<()> {
    x.expect_dtype(what, COMPUTE)
}

/// Returns the type of sums and statistics of `dtype`.
pub const fn real_type(dtype: DType) -> DType {
    match dtype {
        DType::F64 => DType::F64,
        _ => DType::F32,
    }
}

/// Checks that a weight gradient has the type of sums and is on the device of `x`.
fn expect_gradient(what: &str, gradient: &Tensor, x: &Tensor) -> Result<()> {
    gradient.expect_dtype(what, &[real_type(x.dtype())])?;
    gradient.expect_device(what, x.device())
}
