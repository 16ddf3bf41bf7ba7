//! Learned attention sinks: a logit per head that takes part in the softmax of each query. The probability of the sink is dropped. Xiao et al. 2023,
//! arXiv:2309.17453; OpenAI 2025, arXiv:2508.10925.

mod cpu;
pub(super) mod cuda;
#[cfg(test)]
mod tests;

use super::{expect_compute, expect_gradient, real_type};
use crate::ops::dispatch::dispatch;
use crate::{Error, Result, Tensor};

pub(super) use cpu::softmax_share;

/// The sizes of a call. They determine the index of the `lse` of a token and head.
#[derive(Clone, Copy)]
struct Sizes {
    tokens: usize,
    heads: usize,
    /// The number of elements of a head in a row of the output.
    dim: usize,
    /// The number of tokens of a sequence if `lse` is `[B, H, S]`; `None` if `lse` is `[B·S, H]`.
    seq_len: Option<usize>,
}

impl Sizes {
    fn new(what: &str, o: &Tensor, lse: &Tensor, sinks: &Tensor) -> Result<Sizes> {
        let ([tokens, width], [heads]) = (o.dims(what)?, sinks.dims(what)?);
        expect_compute(what, o)?;
        sinks.expect_dtype(what, &[o.dtype()])?;
        lse.expect_dtype(what, &[real_type(o.dtype())])?;
        for tensor in [lse, sinks] {
            tensor.expect_device(what, o.device())?;
        }
        let seq_len = match *lse.shape() {
            [batch, of_heads, seq_len] if of_heads == heads && batch * seq_len == tokens => Some(seq_len),
            [of_tokens, of_heads] if of_tokens == tokens && of_heads == heads => None,
            _ => {
                return Err(Error::Shape {
                    what: format!("{what}: lse"),
                    expected: format!("[B, {heads}, S] or [B·S, {heads}] of {tokens} tokens"),
                    got: lse.shape().to_vec(),
                });
            }
        };
        match heads > 0 && width.is_multiple_of(heads) {
            true => Ok(Sizes { tokens, heads, dim: width / heads, seq_len }),
            false => Err(Error::Value(format!("{what}: rows of {width} elements do not divide into {heads} heads"))),
        }
    }

    /// Returns the index of the `lse` of a token and head.
    fn index(&self, token: usize, head: usize) -> usize {
        match self.seq_len {
            Some(seq_len) => (token / seq_len * self.heads + head) * seq_len + token % seq_len,
            None => token * self.heads + head,
        }
    }
}

/// Adds `sinks` `[H]` to the softmax of [`attention`](super::attention()), in place. Without sinks, the results are `o` `[B·S, H·D]` and `lse`; with
/// sinks, `o = o · σ(lse − sink)` and `lse = ln(exp(lse) + exp(sink))`. `sinks` have the type of `o`. If a query sees no key, `lse = sink`.
///
/// With the new `o` and `lse`, [`attention_backward`](super::attention_backward()) gives the gradients by queries, keys and values, because a
/// sink has no value. Errors with [`Error::Shape`] if `lse` does not have the shape that attention returns.
pub fn attention_sink(o: &mut Tensor, lse: &mut Tensor, sinks: &Tensor) -> Result<()> {
    let sizes = Sizes::new("attention_sink", o, lse, sinks)?;
    dispatch! { o.device().clone(),
        cpu => cpu::attention_sink(o, lse, sinks, sizes),
        gpu => cuda::attention_sink(&gpu, o, lse, sinks, sizes)?,
    }
    Ok(())
}

/// Computes the gradient of [`attention_sink`] by the sinks: `dsinks[h] -= Σ_t exp(sinks[h] − lse[t, h]) · Σ_d d_o[t, h, d] · o[t, h, d]`. `o` and
/// `lse` are the results of [`attention_sink`], and `d_o` is the gradient of its output. `dsinks` `[H]` is F32 (F64 for F64).
///
/// Has the errors of [`attention_sink`].
pub fn attention_sink_backward(
    d_o: &Tensor,
    o: &Tensor,
    lse: &Tensor,
    sinks: &Tensor,
    dsinks: &mut Tensor,
) -> Result<()> {
    let sizes = Sizes::new("attention_sink_backward", o, lse, sinks)?;
    d_o.expect("attention_sink_backward: d_o", o.shape())?;
    d_o.expect_dtype("attention_sink_backward: d_o", &[o.dtype()])?;
    dsinks.expect("attention_sink_backward: dsinks", sinks.shape())?;
    expect_gradient("attention_sink_backward: dsinks", dsinks, o)?;
    dispatch! { o.device(),
        cpu => cpu::attention_sink_backward(d_o, o, lse, sinks, dsinks, sizes),
        gpu => cuda::attention_sink_backward(gpu, d_o, o, lse, sinks, dsinks, sizes)?,
    }
    Ok(())
}
