//! AdamW with decoupled weight decay. Loshchilov and Hutter 2019, arXiv:1711.05101; order of operations as in PyTorch.

mod cpu;
mod cuda;
#[cfg(test)]
mod tests;

use crate::{DType, Device, Result, Tensor};

pub(crate) use cuda::{SOURCE, VARIANTS};

/// Scalars of one update.
#[derive(Clone, Copy, Debug)]
pub struct AdamW {
    /// Step size at this step.
    pub learning_rate: f64,
    /// Decay of the first moment.
    pub beta1: f64,
    /// Decay of the second moment.
    pub beta2: f64,
    /// Added to the root of the second moment.
    pub epsilon: f64,
    /// Share of the weight removed per unit of learning rate.
    pub weight_decay: f64,
    /// Number of this update, from 1.
    pub step: u64,
    /// Gradients are scaled down to this global norm; 0 leaves them alone.
    pub max_norm: f64,
}

/// What the arithmetic of one element needs, each rounded once from F64.
struct Scalars {
    keep: f32,
    step_size: f32,
    take1: f32,
    beta2: f32,
    take2: f32,
    correction2: f32,
    epsilon: f32,
    max_norm: f32,
}

impl AdamW {
    fn scalars(&self) -> Scalars {
        let correction = |beta: f64| 1.0 - beta.powi(self.step.min(i32::MAX as u64) as i32);
        Scalars {
            keep: (1.0 - self.learning_rate * self.weight_decay) as f32,
            step_size: (self.learning_rate / correction(self.beta1)) as f32,
            take1: (1.0 - self.beta1) as f32,
            beta2: self.beta2 as f32,
            take2: (1.0 - self.beta2) as f32,
            correction2: correction(self.beta2).sqrt() as f32,
            epsilon: self.epsilon as f32,
            max_norm: self.max_norm as f32,
        }
    }
}

/// The tensors of one parameter, all of one shape.
pub struct AdamWState<'a> {
    /// The weights that are updated, F32.
    pub master: &'a mut Tensor,
    /// First moment, F32.
    pub m: &'a mut Tensor,
    /// Second moment, F32.
    pub v: &'a mut Tensor,
    /// Where a rounded copy of the new weights goes, F16 or BF16, if one is kept.
    pub copy: Option<&'a mut Tensor>,
}

/// One update: with `g = grad · min(1, max_norm / (norm + 1e-6))`,
/// `w = master · (1 - lr·wd)`, `m += (g - m)·(1 - β1)`, `v = v·β2 + g²·(1 - β2)`,
/// `master = w - lr/(1-β1^t) · m / (√v/√(1-β2^t) + ε)`.
///
/// `grad` is F32; `norm` F32 `[1]` is the global gradient norm. If it is not finite, nothing is written. Exact on every device:
/// each operation is rounded on its own.
pub fn adamw(state: AdamWState, grad: &Tensor, norm: &Tensor, how: &AdamW) -> Result<()> {
    let shape = grad.shape();
    grad.expect_dtype("adamw: grad", &[DType::F32])?;
    norm.expect("adamw: norm", &[1])?;
    for (what, tensor) in [("adamw: master", &*state.master), ("adamw: m", &*state.m), ("adamw: v", &*state.v)] {
        tensor.expect(what, shape)?;
        tensor.expect_dtype(what, &[DType::F32])?;
        tensor.expect_device(what, grad.device())?;
    }
    if let Some(copy) = &state.copy {
        copy.expect("adamw: copy", shape)?;
        copy.expect_dtype("adamw: copy", &[DType::F16, DType::BF16])?;
    }
    match grad.device() {
        Device::Cpu => cpu::adamw(state, grad, norm, &how.scalars()),
        Device::Cuda(gpu) => cuda::adamw(gpu, state, grad, norm, &how.scalars())?,
    }
    Ok(())
}
