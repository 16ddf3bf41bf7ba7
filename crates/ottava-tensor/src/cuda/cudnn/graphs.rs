//! Attention as graphs of operations, which cuDNN matches to fused kernels. The patterns are fixed. A graph with another stride of an
//! intermediate, or with masks in another order, gets a slower plan or none.

use super::AttentionShape;
use super::backend::{
    ADD, Api, BF16, DIV, EXP, F16, F32, Graph, I32, I64, IDENTITY, LOG, MAX, MUL, Node, SUB, SUM, Slot, Tokens,
    row_major, transposed,
};
use crate::dtype::DType;
use crate::error::Result;

/// Returns the type of queries, keys, values and outputs.
fn half(shape: &AttentionShape) -> i32 {
    if shape.dtype == DType::F16 { F16 } else { BF16 }
}

/// The tensors of [`DocumentPointers`] in a graph. They are `None` if each sequence is one document.
struct Documents {
    lengths: Option<Node>,
    fused: Option<Node>,
    output: Option<Node>,
    rows: Option<Node>,
}

impl Documents {
    fn new(g: &mut Graph, shape: &AttentionShape) -> Result<Documents> {
        if shape.documents == 0 {
            return Ok(Documents { lengths: None, fused: None, output: None, rows: None });
        }
        let documents = shape.documents as i64;
        let mut vector = |slot, dtype, len| g.input(slot, dtype, [len, 1, 1, 1], [1; 4]).map(Some);
        Ok(Documents {
            lengths: vector(Slot::Lengths, I32, documents)?,
            fused: vector(Slot::FusedOffsets, I64, documents + 1)?,
            output: vector(Slot::OutputOffsets, I64, documents + 1)?,
            rows: vector(Slot::RowOffsets, I64, documents + 1)?,
        })
    }
}

/// Adds the scalars of the soft cap and the window, if the shape has them.
fn bounds(g: &mut Graph, shape: &AttentionShape) -> Result<[Option<Node>; 2]> {
    let mut scalar = |wanted: bool, slot| wanted.then(|| g.scalar(slot)).transpose();
    Ok([scalar(shape.capped, Slot::SoftCap)?, scalar(shape.window > 0, Slot::Window)?])
}

/// Builds the forward pass: `S = scale · Q Kᵀ`, masked, `P = softmax(S)`, `O = P V` and `lse = log Σ exp S`.
pub(super) fn forward(api: &'static Api, shape: &AttentionShape) -> Result<Graph> {
    let (mut g, half) = (Graph::new(api), half(shape));
    let Documents { lengths, fused, output, rows } = Documents::new(&mut g, shape)?;
    let (q_dims, kv_dims, row_dims) = (shape.q_dims(), shape.kv_dims(), shape.row_dims());
    let q = g.packed_input(Slot::Q, half, q_dims, shape.strides(shape.q_stride), fused)?;
    let k_strides = transposed(shape.strides(shape.k_stride));
    let k = g.packed_input(Slot::K, half, transposed(kv_dims), k_strides, fused)?;
    let v = g.packed_input(Slot::V, half, kv_dims, shape.strides(shape.v_stride), fused)?;
    let o = g.packed_input(Slot::O, half, q_dims, shape.strides(shape.o_stride), output)?;
    let lse = g.packed_input(Slot::Lse, F32, row_dims, shape.row_strides(), rows)?;
    let (scale, negative_infinity) = (g.scalar(Slot::Scale)?, g.scalar(Slot::NegativeInfinity)?);
    let [cap, window] = bounds(&mut g, shape)?;

    let scores = g.intermediate(F32, shape.score_dims())?;
    g.matmul_into(q, k, scores, Tokens::RowsAndColumns, lengths)?;
    let scores = g.pointwise(MUL, scores, Some(scale))?;
    let scores = cap.map_or(Ok(scores), |cap| g.capped(scores, cap).map(|(capped, _)| capped))?;
    let scores = g.within(scores, lengths, negative_infinity)?;
    let scores = if shape.causal { g.causal(scores, negative_infinity)? } else { scores };
    let scores = window.map_or(Ok(scores), |window| g.in_window(scores, window, negative_infinity))?;
    let largest = g.reduce(MAX, scores, row_dims)?;
    let shifted = g.pointwise(SUB, scores, Some(largest))?;
    let exponentials = g.pointwise(EXP, shifted, None)?;
    let sum = g.reduce(SUM, exponentials, row_dims)?;
    let log = g.pointwise(LOG, sum, None)?;
    g.pointwise_into(ADD, F32, None, largest, Some(log), None, lse)?;
    let p = g.intermediate(half, shape.score_dims())?;
    g.pointwise_into(DIV, F32, None, exponentials, Some(sum), None, p)?;
    g.matmul_into(p, v, o, Tokens::RowsAndContracted, lengths)?;
    Ok(g)
}

/// Builds the backward pass. `P = exp(S - lse)` is recomputed, then `dV = Pᵀ dO`, `dS = P ∘ (dO Vᵀ - rowsum(dO ∘ O)) · scale`, `dK = dSᵀ Q` and
/// `dQ = dS K`. The gradients of a key head are sums over the query heads that share it.
pub(super) fn backward(api: &'static Api, shape: &AttentionShape) -> Result<Graph> {
    let (mut g, half) = (Graph::new(api), half(shape));
    let Documents { lengths, fused, output, rows } = Documents::new(&mut g, shape)?;
    let (q_dims, kv_dims, row_dims) = (shape.q_dims(), shape.kv_dims(), shape.row_dims());
    let (q_strides, o_strides) = (shape.strides(shape.q_stride), shape.strides(shape.o_stride));
    let (k_strides, v_strides) = (shape.strides(shape.k_stride), shape.strides(shape.v_stride));
    let q = g.packed_input(Slot::Q, half, q_dims, q_strides, fused)?;
    let k = g.packed_input(Slot::K, half, transposed(kv_dims), transposed(k_strides), fused)?;
    let v = g.packed_input(Slot::V, half, transposed(kv_dims), transposed(v_strides), fused)?;
    let o = g.packed_input(Slot::O, half, q_dims, o_strides, output)?;
    let d_o = g.packed_input(Slot::DO, half, q_dims, o_strides, output)?;
    let lse = g.packed_input(Slot::Lse, F32, row_dims, shape.row_strides(), rows)?;
    let dq = g.packed_input(Slot::DQ, half, q_dims, q_strides, fused)?;
    let dk = g.packed_input(Slot::DK, half, kv_dims, k_strides, fused)?;
    let dv = g.packed_input(Slot::DV, half, kv_dims, v_strides, fused)?;
    let row_sum = g.packed_input(Slot::RowSum, F32, row_dims, shape.row_strides(), rows)?;
    let (scale, negative_infinity) = (g.scalar(Slot::Scale)?, g.scalar(Slot::NegativeInfinity)?);
    let one = g.scalar(Slot::One)?;
    let [cap, window] = bounds(&mut g, shape)?;
    // The strides of the transposed score matrix.
    let score_strides = row_major(shape.score_dims());
    let by_columns = transposed(score_strides);

    let product = g.pointwise(MUL, d_o, Some(o))?;
    let sum = g.reduce(SUM, product, row_dims)?;
    g.pointwise_into(MUL, F32, None, sum, Some(one), None, row_sum)?;

    let scores = g.intermediate(F32, shape.score_dims())?;
    g.matmul_into(q, k, scores, Tokens::RowsAndColumns, lengths)?;
    let scores = g.pointwise(MUL, scores, Some(scale))?;
    let capped = cap.map(|cap| g.capped(scores, cap)).transpose()?;
    let scores = capped.map_or(scores, |(capped, _)| capped);
    let scores = g.within(scores, lengths, negative_infinity)?;
    let shifted = g.pointwise(SUB, scores, Some(lse))?;
    let masked = if shape.causal { g.causal(shifted, negative_infinity)? } else { shifted };
    let masked = window.map_or(Ok(masked), |window| g.in_window(masked, window, negative_infinity))?;
    let p = g.pointwise(EXP, masked, None)?;

    let over_tokens = Tokens::RowsAndContracted;
    let sum_over_group = |g: &mut Graph, a: Node, b: Node, out: Node, heads: Slot| {
        if shape.heads == shape.kv_heads {
            return g.matmul_into(a, b, out, over_tokens, lengths);
        }
        let per_head = match fused {
            // Without this tensor, cuDNN would allocate as many tokens for each document as a sequence has. cuDNN multiplies the offsets of the key
            // heads.
            Some(fused) => g.packed_input(heads, half, q_dims, shape.strides(shape.heads_stride()), Some(fused))?,
            None => g.intermediate(half, q_dims)?,
        };
        g.matmul_into(a, b, per_head, over_tokens, lengths)?;
        g.reduce_into(SUM, per_head, out)
    };
    let p_by_columns = g.transpose(half, p, by_columns, None)?;
    sum_over_group(&mut g, p_by_columns, d_o, dv, Slot::DVHeads)?;

    let dp = g.intermediate(F32, shape.score_dims())?;
    g.matmul_into(d_o, v, dp, Tokens::RowsAndColumns, lengths)?;
    let ds = g.pointwise(SUB, dp, Some(row_sum))?;
    let ds = g.pointwise(MUL, ds, Some(p))?;
    let ds = match (cap, capped) {
        (Some(cap), Some((_, ratio))) => g.capped_gradient(ds, ratio, cap)?,
        _ => ds,
    };
    let ds = g.pointwise(MUL, ds, Some(scale))?;
    let ds_by_columns = g.transpose(half, ds, by_columns, None)?;
    sum_over_group(&mut g, ds_by_columns, q, dk, Slot::DKHeads)?;

    let k_rows = g.transpose(half, k, k_strides, fused)?;
    // Without `dq_sum`, cuDNN chooses an engine that stores the gradient of the scores and needs no atomic additions.
    if shape.deterministic {
        g.matmul_into(ds, k_rows, dq, over_tokens, lengths)?;
    } else {
        let dq_sum = g.packed_input(Slot::DQSum, F32, q_dims, shape.sum_strides(), fused)?;
        g.matmul_into(ds, k_rows, dq_sum, over_tokens, lengths)?;
        g.pointwise_into(IDENTITY, F32, None, dq_sum, None, None, dq)?;
    }
    Ok(g)
}
