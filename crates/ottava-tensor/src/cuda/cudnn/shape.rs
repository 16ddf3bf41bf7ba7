//! The shape of an attention call, and the dimensions and strides of its tensors.

use super::backend::{Dims, row_major};
use crate::dtype::DType;
use crate::error::{Error, Result};

/// The shape of one attention call. `q` and `o` are `[B, T, H, D]`, and `k` and `v` are `[B, T, Hkv, D]`. The heads of a token are contiguous, and
/// tokens have a stride: `q`, `k` and `v` may be parts of one buffer.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash)]
pub struct AttentionShape {
    /// The type of queries, keys, values, the output and their gradients: BF16 or F16.
    pub dtype: DType,
    /// The number of sequences.
    pub batch: usize,
    /// The number of query heads.
    pub heads: usize,
    /// The number of key and value heads, which divides `heads`.
    pub kv_heads: usize,
    /// The number of tokens of each sequence.
    pub seq: usize,
    /// The maximum number of documents in the batch. A token sees only tokens of its document. The value is 0 if each sequence is one document.
    pub documents: usize,
    /// The number of elements of a head: a multiple of 8, at most 256.
    pub head_dim: usize,
    /// Whether a query sees only keys up to its own position.
    pub causal: bool,
    /// The maximum number of keys that a query sees, including its own key. The value is 0 without a window, and for attention that is not causal.
    pub window: usize,
    /// Whether scores are capped.
    pub capped: bool,
    /// The number of elements from the queries of one token to the next, also in `dq`.
    pub q_stride: usize,
    /// The number of elements from the keys of one token to the next, also in `dk`.
    pub k_stride: usize,
    /// The number of elements from the values of one token to the next, also in `dv`.
    pub v_stride: usize,
    /// The number of elements from the output of one token to the next, also in the gradient of the output.
    pub o_stride: usize,
    /// Whether `dq` is computed without atomic additions.
    pub deterministic: bool,
}

impl AttentionShape {
    /// Creates a shape with BF16 queries, keys and values fused in one row per token, `[B * T, (H + 2 Hkv) * D]`, and a contiguous output.
    pub fn fused([batch, seq]: [usize; 2], heads: usize, kv_heads: usize, head_dim: usize) -> AttentionShape {
        let row = (heads + 2 * kv_heads) * head_dim;
        AttentionShape {
            dtype: DType::BF16,
            batch,
            heads,
            kv_heads,
            seq,
            documents: 0,
            head_dim,
            causal: true,
            window: 0,
            capped: false,
            q_stride: row,
            k_stride: row,
            v_stride: row,
            o_stride: heads * head_dim,
            deterministic: false,
        }
    }

    /// Returns the number of elements from one token to the next in the gradients of keys, or of values, per query head. Only documents use it. cuDNN
    /// assumes the layout of the key heads, with rows that are longer by the number of query heads per key head.
    pub(super) fn heads_stride(&self) -> usize {
        self.k_stride * (self.heads / self.kv_heads)
    }

    /// Returns the size in bytes of the gradients of keys, or of values, per query head. The size is 0 if cuDNN allocates these gradients.
    pub(in crate::cuda) fn heads_bytes(&self) -> usize {
        let ours = self.documents > 0 && self.heads != self.kv_heads;
        if ours { self.batch * self.seq * self.heads_stride() * self.dtype.size() } else { 0 }
    }

    /// Returns the number of elements of the log-sum-exp, F32 `[B, H, T]`.
    pub fn lse_len(&self) -> usize {
        self.batch * self.heads * self.seq
    }

    pub(super) fn check(&self) -> Result<()> {
        let wrong = |text: String| Err(Error::Value(format!("attention: {text}")));
        if !matches!(self.dtype, DType::BF16 | DType::F16) {
            return wrong(format!("cuDNN's kernels take bfloat16 and float16, not {}", self.dtype));
        }
        if [self.batch, self.heads, self.kv_heads, self.seq].contains(&0) {
            return wrong(format!("an empty dimension in {self:?}"));
        }
        if !self.heads.is_multiple_of(self.kv_heads) {
            return wrong(format!("{} query heads cannot share {} key heads evenly", self.heads, self.kv_heads));
        }
        if self.head_dim == 0 || !self.head_dim.is_multiple_of(8) || self.head_dim > 256 {
            return wrong(format!("head size {} is not a multiple of 8 up to 256", self.head_dim));
        }
        let (q, kv) = (self.heads * self.head_dim, self.kv_heads * self.head_dim);
        for (name, stride, row) in
            [("q", self.q_stride, q), ("k", self.k_stride, kv), ("v", self.v_stride, kv), ("o", self.o_stride, q)]
        {
            if stride < row || !stride.is_multiple_of(8) {
                return wrong(format!("the stride of {name} is {stride}, not a multiple of 8 of at least {row}"));
            }
        }
        if self.documents > 0
            && (self.deterministic || self.q_stride != self.k_stride || self.k_stride != self.v_stride)
        {
            return wrong("documents need one stride of queries, keys and values, and atomic additions".into());
        }
        Ok(())
    }

    /// Returns the number of documents that the softmax treats separately. A sequence may be one document.
    fn entries(&self) -> usize {
        if self.documents > 0 { self.documents } else { self.batch }
    }

    pub(super) fn q_dims(&self) -> Dims {
        [self.entries(), self.heads, self.seq, self.head_dim].map(|dim| dim as i64)
    }

    pub(super) fn kv_dims(&self) -> Dims {
        [self.entries(), self.kv_heads, self.seq, self.head_dim].map(|dim| dim as i64)
    }

    /// Returns the strides of `[B, H, T, D]` with `row` elements between tokens.
    pub(super) fn strides(&self, row: usize) -> Dims {
        [self.seq * row, self.head_dim, row, 1].map(|stride| stride as i64)
    }

    pub(super) fn score_dims(&self) -> Dims {
        [self.entries(), self.heads, self.seq, self.seq].map(|dim| dim as i64)
    }

    /// Returns the dimensions of a tensor with one value per query and head.
    pub(super) fn row_dims(&self) -> Dims {
        [self.entries(), self.heads, self.seq, 1].map(|dim| dim as i64)
    }

    /// Returns the strides of a tensor with one value per query and head: `[B, H, T]`, or `[B · T, H]` with documents.
    pub(super) fn row_strides(&self) -> Dims {
        if self.documents == 0 {
            return row_major(self.row_dims());
        }
        [self.seq * self.heads, 1, self.heads, 1].map(|stride| stride as i64)
    }

    /// Returns the strides of `dq_sum`, F32 `[B, H, T, D]`. With documents, cuDNN assumes the layout of `dq`.
    pub(super) fn sum_strides(&self) -> Dims {
        if self.documents == 0 { row_major(self.q_dims()) } else { self.strides(self.q_stride) }
    }

    /// Returns the size of `dq_sum` in bytes.
    pub(in crate::cuda) fn sum_bytes(&self) -> usize {
        let of_token = if self.documents == 0 { self.heads * self.head_dim } else { self.q_stride };
        if self.deterministic { 0 } else { self.batch * self.seq * of_token * 4 }
    }
}
