//! Root-mean-square normalisation, written straight into the form that the linear after it reads.

use crate::error::Result;
use crate::layer::{Context, GemmInput};
use crate::param::{Builder, Init, Param, Part};
use crate::scaling::Slot;
use ottava_tensor::Tensor;
use ottava_tensor::ops::{RmsnormBackward, add_rmsnorm_to, rmsnorm_backward, rmsnorm_to};

/// `y = x / sqrt(mean(x²) + eps) · weight`.
pub struct Norm {
    /// `[C]`.
    pub weight: Param,
    eps: f64,
}

/// Saved by [`Norm`].
pub struct NormSaved {
    x: Tensor,    /* [T, C] */
    rstd: Tensor, /* [T] */
}

impl Norm {
    /// A norm over `channels` whose weight is called `name` + `.weight`.
    pub fn new(build: &mut Builder, name: &str, channels: usize, eps: f64) -> Result<Norm> {
        let part = Part { name: format!("{name}.weight"), shape: vec![channels] };
        Ok(Norm { weight: Param::new(build, vec![part], Init::Ones)?, eps })
    }

    /// Normalises `x` for the cast in `slot`.
    pub fn forward(&self, x: &Tensor, slot: Option<Slot>, context: &mut Context) -> Result<(GemmInput, NormSaved)> {
        let (y, rstd) = context
            .scaling
            .produce(slot, context.input_copies(), |output| rmsnorm_to(x, &self.weight.value, self.eps, output))?;
        Ok((y, NormSaved { x: x.clone(), rstd }))
    }

    /// Normalises the sum `a + b` for the cast in `slot`, in one pass with the sum, which is returned first.
    pub fn forward_sum(
        &self,
        a: &Tensor,
        b: &Tensor,
        slot: Option<Slot>,
        context: &mut Context,
    ) -> Result<(Tensor, GemmInput, NormSaved)> {
        let (y, (sum, rstd)) = context.scaling.produce(slot, context.input_copies(), |output| {
            let (sum, y, rstd) = add_rmsnorm_to(a, b, &self.weight.value, self.eps, output)?;
            Ok((y, (sum, rstd)))
        })?;
        Ok((sum.clone(), y, NormSaved { x: sum, rstd }))
    }

    /// The gradient by `x`; `around`, if given, is added to it: the gradient that passes by the norm on the residual connection.
    pub fn backward(&mut self, dy: &Tensor, saved: NormSaved, around: Option<&Tensor>) -> Result<Tensor> {
        let weight = self.weight.value.clone();
        let (weight, grad, NormSaved { x, rstd }) = (&weight, self.weight.grad_mut()?, &saved);
        let beside = RmsnormBackward { dresidual: around, amax: None };
        Ok(rmsnorm_backward(dy, x, weight, rstd, grad, beside)?)
    }
}
