//! Root-mean-square normalisation.

use crate::error::Result;
use crate::layer::{Context, Layer};
use crate::param::{Builder, Init, Param, Part};
use ottava_tensor::Tensor;
use ottava_tensor::ops::{rmsnorm, rmsnorm_backward};

/// `y = x / sqrt(mean(x²) + eps) · weight`.
pub struct Norm {
    weight: Param, /* [C] */
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
}

impl Layer for Norm {
    type Saved = NormSaved;

    fn forward(&self, x: &Tensor, _: &mut Context) -> Result<(Tensor, NormSaved)> {
        let (y, rstd) = rmsnorm(x, &self.weight.value, self.eps)?;
        Ok((y, NormSaved { x: x.clone(), rstd }))
    }

    fn backward(&mut self, dy: &Tensor, saved: NormSaved, _: &mut Context) -> Result<Tensor> {
        let grad = self.weight.grad.as_mut().expect("backward runs on a model built for training");
        Ok(rmsnorm_backward(dy, &saved.x, &self.weight.value, &saved.rstd, grad)?)
    }

    fn parameters<'a>(&'a mut self, visit: &mut dyn FnMut(&'a mut Param)) {
        visit(&mut self.weight);
    }
}
