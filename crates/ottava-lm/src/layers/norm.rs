//! Root-mean-square normalisation, written straight into the form that the linear after it reads.

use crate::error::Result;
use crate::layer::{Context, GemmInput};
use crate::param::{Builder, Init, Param, Part};
use crate::scaling::{Frozen, Slot};
use ottava_tensor::Tensor;
use ottava_tensor::ops::{Copies, RmsnormBackward, Saved, rmsnorm_backward, rmsnorm_to};

/// `y = x / sqrt(mean(x²) + eps) · weight`.
pub struct Norm {
    /// `[C]`.
    pub weight: Param,
    eps: f64,
}

/// Saved by [`Norm`].
pub struct NormSaved {
    x: Saved,     /* [T, C] */
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
        let weight = self.weight.value()?;
        let copies = context.operand_copies();
        let (y, rstd) = context.scaling.produce(slot, copies, |output| rmsnorm_to(x, &weight, self.eps, output))?;
        Ok((y, NormSaved { x: context.save(x.clone())?, rstd }))
    }

    /// The output of [`Norm::forward`] once more, of the input as it was saved, in `copies`, by the scale that it had.
    pub fn again(
        &self,
        saved: &NormSaved,
        slot: Option<Slot>,
        frozen: &Frozen,
        copies: Copies,
        context: &mut Context,
    ) -> Result<GemmInput> {
        let (x, weight) = (saved.x.value()?, self.weight.value()?);
        context.scaling.again(slot, frozen, copies, |output| Ok(rmsnorm_to(&x, &weight, self.eps, output)?.0))
    }

    /// The gradient by `x`; `around`, if given, is added to it: the gradient that passes by the norm on the residual connection.
    pub fn backward(&mut self, dy: &Tensor, saved: NormSaved, around: Option<&Tensor>) -> Result<Tensor> {
        self.backward_beside(dy, saved, RmsnormBackward { dresidual: around, amax: None })
    }

    /// The same with its amax, where the cast in `next`, which reads it, wants that.
    pub fn backward_for(
        &mut self,
        dy: &Tensor,
        saved: NormSaved,
        around: &Tensor,
        next: Option<Slot>,
        context: &mut Context,
    ) -> Result<GemmInput> {
        let mut amax = context.scaling.amax_for(next)?;
        let beside = RmsnormBackward { dresidual: Some(around), amax: amax.as_mut() };
        let dx = self.backward_beside(dy, saved, beside)?;
        Ok(match amax {
            Some(amax) => GemmInput::Measured(dx, amax),
            None => GemmInput::Plain(dx),
        })
    }

    fn backward_beside(&mut self, dy: &Tensor, saved: NormSaved, beside: RmsnormBackward) -> Result<Tensor> {
        let weight = self.weight.value()?;
        let (weight, grad, NormSaved { x, rstd }) = (&weight, self.weight.grad_mut()?, &saved);
        Ok(rmsnorm_backward(dy, x, weight, rstd, grad, beside)?)
    }
}
