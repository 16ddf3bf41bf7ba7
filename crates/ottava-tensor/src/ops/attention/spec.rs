//! The constant properties of the attention of a layer. Batch sizes are not included.

use crate::{DType, Error, Result};
use std::fmt;

/// The attention of a layer. [`attention`](crate::ops::attention()) uses it in training, and [`paged_attention`](crate::ops::paged_attention()) uses it
/// over a cache.
///
/// Positions are counted within a sequence. The query at position `i` sees the keys `j` of its own document with `j ≤ i` if `causal`, and
/// `j > i − window` if there is a window. Without `causal`, a window also bounds later keys: `j < i + window`. Each pair has the score `s = scale · q·k`, or `s = soft_cap · tanh(scale · q·k / soft_cap)`.
#[derive(Clone, Copy, Debug, PartialEq)]
pub struct AttentionSpec {
    /// The number `H` of query heads.
    pub heads: usize,
    /// The number `H_kv` of key heads and of value heads, a divisor of `H`. Query head `h` reads key head `h / (H / H_kv)`.
    pub kv_heads: usize,
    /// The size `D` of a query head and of a key head.
    pub head_dim: usize,
    /// The size `D_v` of a value head and of a head of the output.
    pub value_dim: usize,
    /// Whether a query sees only keys up to its own position.
    pub causal: bool,
    /// The maximum number of keys that a query sees, counted back from its own position and including it, like `sliding_window` of Hugging Face.
    /// Attention that is not causal has as many keys in the other direction.
    pub window: Option<usize>,
    /// The upper bound of the absolute values of scores.
    pub soft_cap: Option<f64>,
    /// The factor of the product of a query and a key.
    pub scale: f64,
    /// Whether the gradient is bit-identical in every run. Otherwise a GPU may use atomic additions.
    pub deterministic: bool,
    /// The type in which attention of whole documents reads keys and values, as from a cache: E4M3 with one scale per token and head, or BF16. `None`
    /// means the type of the queries. Attention over a cache reads the cache.
    pub kv_dtype: Option<DType>,
}

impl AttentionSpec {
    /// Returns causal attention without a window, with heads of `head_dim` and the scale `1 / √head_dim`.
    pub fn causal(heads: usize, kv_heads: usize, head_dim: usize) -> AttentionSpec {
        AttentionSpec {
            heads,
            kv_heads,
            head_dim,
            value_dim: head_dim,
            causal: true,
            window: None,
            soft_cap: None,
            scale: 1.0 / (head_dim as f64).sqrt(),
            deterministic: false,
            kv_dtype: None,
        }
    }

    /// Returns the number of query elements per token.
    pub fn query_width(&self) -> usize {
        self.heads * self.head_dim
    }

    /// Returns the number of key elements per token.
    pub fn key_width(&self) -> usize {
        self.kv_heads * self.head_dim
    }

    /// Returns the number of value elements per token.
    pub fn value_width(&self) -> usize {
        self.kv_heads * self.value_dim
    }

    /// Returns the number of query, key and value elements per token.
    pub fn qkv_width(&self) -> usize {
        self.query_width() + self.key_width() + self.value_width()
    }

    /// Returns the number of output elements per token.
    pub fn output_width(&self) -> usize {
        self.heads * self.value_dim
    }

    /// Returns the number of query heads that share a key head.
    pub fn group(&self) -> usize {
        self.heads / self.kv_heads
    }

    /// Errors with [`Error::Value`] if fields contradict each other.
    pub(crate) fn check(&self, what: &str) -> Result<()> {
        let AttentionSpec { heads, kv_heads, head_dim, value_dim, .. } = *self;
        let wrong = |text: String| Err(Error::Value(format!("{what}: {text}")));
        if kv_heads == 0 || !heads.is_multiple_of(kv_heads) {
            return wrong(format!("{heads} query heads cannot share {kv_heads} key heads evenly"));
        }
        if heads == 0 || head_dim == 0 || value_dim == 0 {
            return wrong(format!("{heads} heads of {head_dim}, with values of {value_dim}, have no elements"));
        }
        if self.window == Some(0) {
            return wrong("with a window of 0 a token does not see itself; use 1 or more".into());
        }
        if let Some(cap) = self.soft_cap.filter(|cap| !(cap.is_finite() && *cap > 0.0)) {
            return wrong(format!("the soft cap of scores is {cap}; it is a finite number above 0"));
        }
        if !self.scale.is_finite() {
            return wrong(format!("the scale of scores is {}, which is not finite", self.scale));
        }
        Ok(())
    }
}

impl fmt::Display for AttentionSpec {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        write!(f, "{} query and {} key heads of {}", self.heads, self.kv_heads, self.head_dim)?;
        if self.value_dim != self.head_dim {
            write!(f, ", values of {}", self.value_dim)?;
        }
        f.write_str(if self.causal { ", causal" } else { ", both directions" })?;
        if let Some(window) = self.window {
            let sides = if self.causal { "" } else { " to each side" };
            write!(f, ", a window of {window} tokens{sides}")?;
        }
        if let Some(cap) = self.soft_cap {
            write!(f, ", scores capped at {cap}")?;
        }
        self.kv_dtype.map_or(Ok(()), |dtype| write!(f, ", keys and values in {dtype}"))
    }
}
