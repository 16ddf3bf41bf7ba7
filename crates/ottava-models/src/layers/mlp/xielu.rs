//! The feed-forward layer with xIELU, whose factors are learned. The activation is an op of its own, and the linears cast their operands themselves.

use crate::layers::cast::{OperandCast, SavedOperand};
use crate::layers::sublayer::{BranchOperand, Sublayer, SublayerSaved};
use crate::layers::{Adaptable, Linear, LinearConfig, Stream};
use ottava_common::error::Result;
use ottava_recipe::context::Context;
use ottava_recipe::operand::{ResidualGradient, View, Views};
use ottava_recipe::param::{Builder, FolderTensor, Init, Param, Split};
use ottava_tensor::Tensor;
use ottava_tensor::ops::{XieluAlphas, xielu, xielu_backward};

/// The sizes of an MLP with xIELU.
#[derive(Clone, Copy, Debug, PartialEq)]
pub struct XieluSpec {
    /// The width `F` of the activation.
    pub hidden: usize,
}

/// The initial numbers, whose softplus is 0.8 for positive inputs and 0.3 for the other inputs.
const INITIAL: [f32; 2] = [0.203_4, -1.050_2];

/// `y = down(xielu(up(x)))`.
pub struct XieluMlp {
    up: Linear, /* [F, C] */
    alphas: Alphas,
    down: Linear, /* [C, F] */
}

/// The learned numbers of the activation.
struct Alphas {
    positive: Param, /* [1] */
    negative: Param, /* [1] */
}

/// The values that forward of [`XieluMlp`] saves.
struct XieluSaved {
    hidden: Tensor, /* [T, F] */
    operand: SavedOperand,
}

impl Alphas {
    fn new(build: &mut Builder, name: &str) -> Result<Alphas> {
        let mut alpha = |of: &str, initial| {
            let shard = build.shard(FolderTensor::new(format!("{name}.act_fn.{of}"), vec![1]), Split::None)?;
            Param::new(build, vec![shard], Init::Constant(initial))
        };
        Ok(Alphas { positive: alpha("alpha_p", INITIAL[0])?, negative: alpha("alpha_n", INITIAL[1])? })
    }

    fn activate(&self, hidden: &Tensor) -> Result<Tensor> {
        let (positive, negative) = (&self.positive.weights.value()?, &self.negative.weights.value()?);
        Ok(xielu(hidden, XieluAlphas { positive, negative })?)
    }

    /// Returns the gradient by `hidden`. Adds to the gradients of the numbers.
    fn backward(&mut self, dy: &Tensor, hidden: &Tensor) -> Result<Tensor> {
        let (positive, negative) = (&self.positive.weights.value()?, &self.negative.weights.value()?);
        let (mut unread_p, mut unread_n) = (None, None);
        let gradients = [self.positive.grad_or_unread(&mut unread_p)?, self.negative.grad_or_unread(&mut unread_n)?];
        Ok(xielu_backward(dy, hidden, XieluAlphas { positive, negative }, gradients)?)
    }
}

impl XieluMlp {
    /// Creates an MLP called `name` with the settings of `stream`.
    pub fn new(build: &mut Builder, name: &str, XieluSpec { hidden }: XieluSpec, stream: &Stream) -> Result<XieluMlp> {
        let Stream { channels, names, std, .. } = *stream;
        let mut linear = |proj: &str, rows, inputs, split| {
            let name = &format!("{name}.{proj}");
            let config = LinearConfig {
                name,
                parts: &[(name.clone(), rows)],
                fused: &[],
                replicas: &[],
                inputs,
                bias: false,
                std,
                layout: names.layout(),
                split,
                shared_input: None,
                uncast: None,
            };
            Linear::new(build, config)
        };
        let up = linear(names.gate_up[0], hidden, channels, Split::Output)?;
        let down = linear(names.down, channels, hidden, Split::Input)?;
        Ok(XieluMlp { up, alphas: Alphas::new(build, name)?, down })
    }
}

impl Sublayer for XieluMlp {
    fn input(&self) -> OperandCast {
        self.up.input()
    }

    fn gradient(&self) -> OperandCast {
        self.down.gradient()
    }

    fn forward(&self, x: View, residual: Option<&Tensor>, context: &mut Context) -> Result<(Tensor, SublayerSaved)> {
        let hidden = self.up.fprop(&x, None, context)?;
        drop(x);
        let (y, operand) = self.down.forward(self.alphas.activate(&hidden)?, residual, context)?;
        Ok((y, SublayerSaved::new(XieluSaved { hidden, operand })))
    }

    fn save(&self, x: View, context: &mut Context) -> Result<SublayerSaved> {
        let hidden = self.up.fprop(&x, None, context)?;
        drop(x);
        let operand = self.down.save(self.alphas.activate(&hidden)?, context)?;
        Ok(SublayerSaved::new(XieluSaved { hidden, operand }))
    }

    fn backward(
        &mut self,
        dy: ResidualGradient,
        saved: SublayerSaved,
        x: BranchOperand,
        other: Option<Tensor>,
        context: &mut Context,
    ) -> Result<Tensor> {
        let XieluSaved { hidden, operand } = saved.into();
        let x = x.columns(context)?;
        let alphas = &self.alphas;
        let dactivated = self.down.backward_recomputing(dy, operand, |_| alphas.activate(&hidden), context)?;
        let dhidden = self.alphas.backward(&dactivated, &hidden)?;
        drop((dactivated, hidden));
        let dhidden: Views = self.up.cast_gradient(dhidden.into(), context)?;
        self.up.backward_views(dhidden, x, other.as_ref(), context)
    }

    fn parameters<'a>(&'a self, visit: &mut dyn FnMut(&'a Param)) {
        self.up.parameters(visit);
        visit(&self.alphas.positive);
        visit(&self.alphas.negative);
        self.down.parameters(visit);
    }

    fn parameters_mut<'a>(&'a mut self, visit: &mut dyn FnMut(&'a mut Param)) {
        self.up.parameters_mut(visit);
        visit(&mut self.alphas.positive);
        visit(&mut self.alphas.negative);
        self.down.parameters_mut(visit);
    }

    fn linears_mut<'a>(&'a mut self, visit: &mut dyn FnMut(&'a mut dyn Adaptable)) {
        visit(&mut self.up);
        visit(&mut self.down);
    }
}
