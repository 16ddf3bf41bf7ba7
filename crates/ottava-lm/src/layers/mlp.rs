//! The feed-forward layer.

use super::branch::{BranchOperand, Sublayer};
use super::cast::{OperandCast, SavedOperand};
use super::{ColumnScales, DownProjection, Linear, LinearConfig, Names};
use crate::context::Context;
use crate::error::{Error, Result};
use crate::operand::{ResidualGradient, View, Views};
use crate::param::{Builder, Param};
use ottava_tensor::Tensor;
use ottava_tensor::ops::{
    Activation, Output, SavedActivation, activation, activation_backward_to, activation_compressing, activation_to,
};

/// Sizes of an MLP.
#[derive(Clone, Copy, Debug)]
pub struct MlpConfig {
    /// Width `C` of the residual stream.
    pub channels: usize,
    /// Width `F` of the activation.
    pub hidden: usize,
    /// What it computes between its linears.
    pub activation: Activation,
    /// Whether its linears have biases.
    pub bias: bool,
    /// Names of its tensors.
    pub names: &'static Names,
    /// Standard deviation of initial weights.
    pub std: f32,
}

/// `y = down(silu(gate(x)) · up(x))`, with gate and up in one product, or `y = down(gelu(up(x)))`.
pub struct Mlp {
    activation: Activation,
    gate_up: Linear,      /* [2F, C], or [F, C] without a gate */
    down: DownProjection, /* [C, F] */
}

/// Saved by [`Mlp`].
pub struct MlpSaved {
    hidden: SavedActivation, /* [T, 2F], or [T, F] without a gate */
    activated: Activated,
}

/// What forward saves of the activation.
enum Activated {
    Plain(SavedOperand),
    Smooth(ColumnScales),
}

impl Mlp {
    /// An MLP `name` with tensors called as its names say; `shared_input` is the cast of an operand that another sublayer reads too.
    pub fn new(build: &mut Builder, name: &str, config: MlpConfig, shared_input: Option<OperandCast>) -> Result<Mlp> {
        let MlpConfig { channels, hidden, activation, bias, names, std } = config;
        let part = |proj: &str, rows| (format!("{name}.{proj}"), rows);
        let gate_up: Vec<_> = names.gate_up.iter().map(|proj| part(proj, hidden)).collect();
        if gate_up.len() != activation.inputs() {
            return Err(Error::Model(format!("{name}: {activation:?} does not read {}", names.gate_up.join(" and "))));
        }
        let down = [part(names.down, channels)];
        let (gate_up_name, down_name) = (format!("{name}.{}", names.gate_up_stack), format!("{name}.{}", names.down));
        let (parts, transposed) = (gate_up.as_slice(), names.transposed);
        let config = LinearConfig { name: &gate_up_name, parts, inputs: channels, bias, std, transposed, shared_input };
        let gate_up = Linear::new(build, config)?;
        let config = LinearConfig { name: &down_name, parts: &down, inputs: hidden, shared_input: None, ..config };
        Ok(Mlp { activation, gate_up, down: DownProjection::new(build, config)? })
    }

    /// The activation and the down projection; without `residual`, the output is not computed.
    fn forward_activated(
        &self,
        hidden: Tensor,
        residual: Option<&Tensor>,
        context: &mut Context,
    ) -> Result<(Option<Tensor>, MlpSaved)> {
        if let Some(casts) = self.down.smooth_casts(context.mode()) {
            let (activated, hidden) = (activation(self.activation, &hidden)?, context.save(hidden)?);
            let (y, scales) = self.down.forward_smooth(&activated, casts, residual, context)?;
            return Ok((Some(y), MlpSaved { hidden, activated: Activated::Smooth(scales) }));
        }
        let down = &self.down.linear;
        // The activation's backward writes the transposed codes in its own pass, so forward never does.
        let (copies, compresses) = (context.copies_without_transpose(&down.input()), context.compresses());
        let (activated, compressed) = down.input().produce_input(copies, &mut context.casts, |output| {
            if compresses && !matches!(output, Output::Amax { .. }) {
                let (activated, hidden) = activation_compressing(self.activation, &hidden, output)?;
                return Ok((activated, Some(hidden)));
            }
            Ok((activation_to(self.activation, &hidden, output)?, None))
        })?;
        self.down.measure_smooth(&activated.rows, context)?;
        let hidden = compressed.map_or_else(|| SavedActivation::Exact(hidden), SavedActivation::Compressed);
        let y = residual.map(|_| down.fprop(&activated.rows, residual, context)).transpose()?;
        Ok((y, MlpSaved { hidden, activated: Activated::Plain(activated.saved) }))
    }

    /// The gradient by `hidden`, in the views that `gate_up` reads, from a gradient `dy` cast by `down`; adds to the gradient of `down`.
    fn backward_activated(&mut self, dy: Views, saved: MlpSaved, context: &mut Context) -> Result<Views> {
        let MlpSaved { hidden, activated } = saved;
        match activated {
            Activated::Plain(activated) => self.backward_plain(dy, hidden, activated, context),
            Activated::Smooth(scales) => {
                let Views { rows, columns: dy } = dy;
                let dactivated = self.down.dgrad_smooth(&rows, &scales, context)?;
                drop(rows);
                let dhidden = self.produce_dhidden(&dactivated, &hidden, context)?;
                drop(dactivated);
                let activated = activation(self.activation, &hidden.value()?)?;
                drop(hidden);
                self.down.wgrad_smooth(&dy, &activated, &scales, context)?;
                Ok(dhidden)
            }
        }
    }

    fn backward_plain(
        &mut self,
        dy: Views,
        hidden: SavedActivation,
        activated: SavedOperand,
        context: &mut Context,
    ) -> Result<Views> {
        let (Views { rows, columns: dy }, input) = (dy, self.down.linear.input());
        let dactivated = self.down.linear.dgrad(&rows, None, context)?;
        drop(rows);
        let (dhidden, activated) = match (activated.into_columns(), input.fused(context.mode())) {
            // The activation's backward reads what the activation is computed from, and writes its codes in the same pass.
            (Err(frozen), Some(slot)) => {
                let how = self.activation;
                self.gate_up.produce_gradient_and_recast(slot, &frozen, context, |output, activated| {
                    Ok(activation_backward_to(how, &dactivated, &hidden, output, activated)?)
                })?
            }
            (activated, _) => {
                let activated = activated.or_else(|frozen| {
                    let value = activation(self.activation, &hidden.value()?)?;
                    input.recast_columns(value, &frozen, &mut context.casts)
                })?;
                (self.produce_dhidden(&dactivated, &hidden, context)?, activated)
            }
        };
        drop((hidden, dactivated));
        self.down.linear.wgrad(&dy, &activated, context.mode())?;
        Ok(dhidden)
    }

    fn produce_dhidden(
        &mut self,
        dactivated: &Tensor,
        hidden: &SavedActivation,
        context: &mut Context,
    ) -> Result<Views> {
        let how = self.activation;
        self.gate_up
            .produce_gradient(context, |output| Ok(activation_backward_to(how, dactivated, hidden, output, None)?.0))
    }
}

impl Sublayer for Mlp {
    type Saved = MlpSaved;

    fn input(&self) -> OperandCast {
        self.gate_up.input()
    }

    fn gradient(&self) -> OperandCast {
        self.down.linear.gradient()
    }

    fn forward(&self, x: View, residual: &Tensor, context: &mut Context) -> Result<(Tensor, MlpSaved)> {
        let hidden = self.gate_up.fprop(&x, None, context)?;
        drop(x);
        let (y, saved) = self.forward_activated(hidden, Some(residual), context)?;
        Ok((y.expect("an output was asked for"), saved))
    }

    fn save(&self, x: View, context: &mut Context) -> Result<MlpSaved> {
        let hidden = self.gate_up.fprop(&x, None, context)?;
        drop(x);
        Ok(self.forward_activated(hidden, None, context)?.1)
    }

    fn backward(
        &mut self,
        dy: ResidualGradient,
        saved: MlpSaved,
        x: BranchOperand,
        other: Option<Tensor>,
        context: &mut Context,
    ) -> Result<Tensor> {
        let x = x.columns(context)?;
        let dy = self.down.linear.cast_gradient(dy, context)?;
        let dhidden = self.backward_activated(dy, saved, context)?;
        self.gate_up.backward_views(dhidden, x, other.as_ref(), context)
    }

    fn parameters<'a>(&'a self, visit: &mut dyn FnMut(&'a Param)) {
        self.gate_up.parameters(visit);
        self.down.linear.parameters(visit);
    }

    fn parameters_mut<'a>(&'a mut self, visit: &mut dyn FnMut(&'a mut Param)) {
        self.gate_up.parameters_mut(visit);
        self.down.linear.parameters_mut(visit);
    }
}
