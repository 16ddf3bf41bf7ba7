//! The feed-forward layer.

mod activated;
mod xielu;

pub use xielu::{XieluMlp, XieluSpec};

use super::cast::OperandCast;
use super::sublayer::{BranchOperand, Sublayer, SublayerSaved};
use super::{Adaptable, Linear, LinearConfig, Stream};
use activated::ActivatedLinear;
use ottava_common::error::{Error, Result};
use ottava_recipe::context::Context;
use ottava_recipe::operand::{ResidualGradient, View};
use ottava_recipe::param::{Builder, Param, Split};
use ottava_tensor::Tensor;
use ottava_tensor::ops::Activation;

/// The sizes and settings of an MLP. The activation decides whether the MLP has a gate.
#[derive(Clone, Copy, Debug, PartialEq)]
pub struct MlpSpec {
    /// The width `F` of the activation.
    pub hidden: usize,
    /// The activation between the linears.
    pub activation: Activation,
    /// Whether the linears have biases.
    pub bias: bool,
    /// The factor of the gate before the activation.
    pub gate_factor: f32,
}

impl MlpSpec {
    /// Returns the settings of most families: no biases, and a factor of 1.
    pub const fn new(hidden: usize, activation: Activation) -> MlpSpec {
        MlpSpec { hidden, activation, bias: false, gate_factor: 1.0 }
    }
}

/// `y = down(silu(gate(x)) · up(x))`, with gate and up in one product, or `y = down(gelu(up(x)))`.
pub struct Mlp {
    gate_up: Linear,       /* [2F, C], or [F, C] without a gate */
    down: ActivatedLinear, /* [C, F] */
}

impl Mlp {
    /// Creates an MLP called `name` with the settings of `stream`. `shared_input` is the cast of an operand that another sublayer also reads.
    pub fn new(
        build: &mut Builder,
        name: &str,
        spec: MlpSpec,
        stream: &Stream,
        shared_input: Option<OperandCast>,
    ) -> Result<Mlp> {
        let (MlpSpec { hidden, activation, bias, gate_factor }, Stream { channels, names, std, .. }) = (spec, *stream);
        let part = |proj: &str, rows| (format!("{name}.{proj}"), rows);
        // A folder has gate and up as two tensors or as one.
        let (inputs, tensors) = (activation.inputs(), names.gate_up.len());
        let gate_up: Vec<_> = names.gate_up.iter().map(|proj| part(proj, hidden * inputs / tensors)).collect();
        if !inputs.is_multiple_of(tensors) {
            return Err(Error::Model(format!("{name}: {activation:?} does not read {}", names.gate_up.join(" and "))));
        }
        let down = [part(names.down, channels)];
        let (gate_up_name, down_name) = (format!("{name}.{}", names.gate_up_stack), format!("{name}.{}", names.down));
        let (parts, layout) = (gate_up.as_slice(), names.layout());
        let (name, split) = (&gate_up_name, Split::Output);
        let halves = [hidden, hidden];
        let fused: &[usize] = if tensors < inputs { &halves } else { &[] };
        let config = LinearConfig {
            name,
            parts,
            fused,
            replicas: &[],
            inputs: channels,
            bias,
            std,
            layout,
            split,
            shared_input,
            uncast: None,
        };
        let gate_up = Linear::new(build, config)?;
        let rows = hidden / build.place().ranks;
        let gate_up = gate_up.multiplied(build.device, &[(rows, gate_factor), (rows * (inputs - 1), 1.0)])?;
        let config = LinearConfig {
            name: &down_name,
            parts: &down,
            fused: &[],
            inputs: hidden,
            split: Split::Input,
            shared_input: None,
            uncast: None,
            ..config
        };
        Ok(Mlp { gate_up, down: ActivatedLinear::new(build, config, activation)? })
    }
}

impl Sublayer for Mlp {
    fn input(&self) -> OperandCast {
        self.gate_up.input()
    }

    fn gradient(&self) -> OperandCast {
        self.down.gradient()
    }

    fn forward(&self, x: View, residual: Option<&Tensor>, context: &mut Context) -> Result<(Tensor, SublayerSaved)> {
        if let Some(y) = self.down.forward_product(&x, &self.gate_up, residual, context)? {
            // Inference has no backward.
            return Ok((y, SublayerSaved::new(())));
        }
        let hidden = self.gate_up.fprop(&x, None, context)?;
        drop(x);
        let (y, saved) = self.down.forward(hidden, residual, context)?;
        Ok((y, SublayerSaved::new(saved)))
    }

    fn save(&self, x: View, context: &mut Context) -> Result<SublayerSaved> {
        let hidden = self.gate_up.fprop(&x, None, context)?;
        drop(x);
        Ok(SublayerSaved::new(self.down.save(hidden, context)?))
    }

    fn backward(
        &mut self,
        dy: ResidualGradient,
        saved: SublayerSaved,
        x: BranchOperand,
        other: Option<Tensor>,
        context: &mut Context,
    ) -> Result<Tensor> {
        let x = x.columns(context)?;
        let dhidden = self.down.backward(dy, saved.into(), &mut self.gate_up, context)?;
        self.gate_up.backward_views(dhidden, x, other.as_ref(), context)
    }

    fn parameters<'a>(&'a self, visit: &mut dyn FnMut(&'a Param)) {
        self.gate_up.parameters(visit);
        self.down.parameters(visit);
    }

    fn parameters_mut<'a>(&'a mut self, visit: &mut dyn FnMut(&'a mut Param)) {
        self.gate_up.parameters_mut(visit);
        self.down.parameters_mut(visit);
    }

    fn linears_mut<'a>(&'a mut self, visit: &mut dyn FnMut(&'a mut dyn Adaptable)) {
        visit(&mut self.gate_up);
        visit(self.down.linear_mut());
    }
}
