//! Causal softmax attention over heads that may share keys and values. Dao et al. 2022, arXiv:2205.14135; Ainslie et al. 2023,
//! arXiv:2305.13245.

mod cpu;
mod cuda;
#[cfg(test)]
mod tests;

use super::{expect_compute, real_type};
use crate::{DType, Device, Error, Result, Tensor};

pub(crate) use cuda::SOURCE;

/// The layout of a fused projection `[B·S, (H + 2·H_kv)·D]`: in each row `H` query heads, `H_kv` key heads, `H_kv` value heads.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash)]
pub struct AttentionLayout {
    /// Sequences `B`.
    pub batch: usize,
    /// Tokens per sequence `S`.
    pub seq_len: usize,
    /// Query heads `H`.
    pub heads: usize,
    /// Key and value heads `H_kv`, a divisor of `H`.
    pub kv_heads: usize,
    /// Size of a head `D`.
    pub head_dim: usize,
    /// Whether the gradient is bit-identical in every run. Otherwise a GPU may use atomic additions.
    pub deterministic: bool,
}

impl AttentionLayout {
    /// Width of a row of the fused projection.
    pub fn qkv_width(&self) -> usize {
        (self.heads + 2 * self.kv_heads) * self.head_dim
    }

    /// Width of a row of the output.
    pub fn output_width(&self) -> usize {
        self.heads * self.head_dim
    }

    fn tokens(&self) -> usize {
        self.batch * self.seq_len
    }

    fn scale(&self) -> f64 {
        1.0 / (self.head_dim as f64).sqrt()
    }

    fn backend(&self, qkv: &Tensor, cu_seqlens: Option<&Tensor>) -> AttentionBackend {
        AttentionBackend::choose(qkv.device(), qkv.dtype(), self.head_dim, cu_seqlens.is_some(), self.deterministic)
    }

    fn check_documents(&self, cu_seqlens: Option<&Tensor>, device: &Device) -> Result<()> {
        let Some(at) = cu_seqlens else { return Ok(()) };
        at.dims::<1>("attention: cu_seqlens")?;
        at.expect_dtype("attention: cu_seqlens", &[DType::I32])?;
        at.expect_device("attention: cu_seqlens", device)?;
        match at.len() {
            0 | 1 => {
                Err(Error::Value("attention: cu_seqlens needs at least the start and the end of a document".into()))
            }
            _ => Ok(()),
        }
    }

    fn check(&self, qkv: &Tensor, rows: usize) -> Result<()> {
        expect_compute("attention: qkv", qkv)?;
        qkv.expect("attention: qkv", &[rows, self.qkv_width()])?;
        if self.kv_heads == 0 || !self.heads.is_multiple_of(self.kv_heads) {
            return Err(Error::Value(format!(
                "attention: {} query heads cannot share {} key heads evenly",
                self.heads, self.kv_heads
            )));
        }
        Ok(())
    }
}

/// Implementation of attention on a device; `ottava plan` prints it.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum AttentionBackend {
    /// The CPU reference.
    Cpu,
    /// cuDNN's fused kernels: BF16, head sizes that are multiples of 8 up to 128. With documents multiples of 16 and not deterministic:
    /// gradients of other sizes are wrong (cuDNN 9.14), and the deterministic form would store the scores of each document as if it
    /// filled a sequence.
    CuDnn,
    /// Plain kernels for all other types and shapes on a GPU.
    Plain,
}

impl AttentionBackend {
    /// The fastest backend that supports this type and size of heads, with `documents` that it keeps apart or without.
    pub fn choose(
        device: &Device,
        dtype: DType,
        head_dim: usize,
        documents: bool,
        deterministic: bool,
    ) -> AttentionBackend {
        let fits = dtype == DType::BF16 && head_dim.is_multiple_of(8) && head_dim <= 128;
        let keeps_apart = !deterministic && head_dim.is_multiple_of(16);
        match device {
            Device::Cpu | Device::DryCpu(_) => AttentionBackend::Cpu,
            Device::Cuda(_) if fits && (keeps_apart || !documents) => AttentionBackend::CuDnn,
            Device::Cuda(_) => AttentionBackend::Plain,
        }
    }
}

/// `o = softmax(q·kᵀ/√D, causal)·v` per head, `[B·S, H·D]`, and `lse`, the logarithm of each softmax's denominator, `[B, H, S]` in F32
/// (F64 for F64), which backward needs; in BF16 on a GPU, with `cu_seqlens`, its elements lie as in `[B·S, H]`.
///
/// With `cu_seqlens`, I32 `[documents + 1]` on the device, a token sees its own document alone: document `d` has the tokens
/// `cu_seqlens[d]..cu_seqlens[d + 1]` of the `B·S`, and lies within one sequence. Unused entries at the end are `B·S`, so that one tensor of
/// fixed capacity holds any number of documents. `None` makes each sequence one document.
pub fn attention(qkv: &Tensor, cu_seqlens: Option<&Tensor>, layout: AttentionLayout) -> Result<(Tensor, Tensor)> {
    layout.check(qkv, layout.tokens())?;
    let device = qkv.device();
    layout.check_documents(cu_seqlens, device)?;
    let mut o = Tensor::empty(device, &[layout.tokens(), layout.output_width()], qkv.dtype())?;
    let mut lse = Tensor::empty(device, &[layout.batch, layout.heads, layout.seq_len], real_type(qkv.dtype()))?;
    match device {
        Device::Cpu => cpu::attention(qkv, cu_seqlens, layout, &mut o, &mut lse),
        Device::DryCpu(tracker) => tracker.scratch(cpu::scratch(layout, qkv.dtype())),
        Device::Cuda(gpu) => cuda::attention(gpu, qkv, cu_seqlens, layout, &mut o, &mut lse)?,
    }
    Ok((o, lse))
}

/// Gradient of [`attention`] by `qkv`, in the same fused layout, from `do` and what forward returned.
pub fn attention_backward(
    d_o: &Tensor,
    qkv: &Tensor,
    o: &Tensor,
    lse: &Tensor,
    cu_seqlens: Option<&Tensor>,
    layout: AttentionLayout,
) -> Result<Tensor> {
    layout.check(qkv, layout.tokens())?;
    layout.check_documents(cu_seqlens, qkv.device())?;
    for (what, tensor) in [("attention_backward: do", d_o), ("attention_backward: o", o)] {
        tensor.expect(what, &[layout.tokens(), layout.output_width()])?;
        tensor.expect_dtype(what, &[qkv.dtype()])?;
    }
    lse.expect("attention_backward: lse", &[layout.batch, layout.heads, layout.seq_len])?;
    let mut dqkv = qkv.empty_like()?;
    match qkv.device() {
        Device::Cpu => cpu::attention_backward(d_o, qkv, o, lse, cu_seqlens, layout, &mut dqkv),
        Device::DryCpu(tracker) => tracker.scratch(cpu::scratch_of_backward(layout, qkv.dtype())),
        Device::Cuda(gpu) => cuda::attention_backward(gpu, [d_o, qkv, o, lse], cu_seqlens, layout, &mut dqkv)?,
    }
    Ok(dqkv)
}
