//! The sublayer of a block that reads the block's per-layer embedding ([`LayerEmbeddings`](super::LayerEmbeddings)).

use super::cast::{OperandCast, SavedOperand};
use super::columns::{columns, side_by_side};
use super::sublayer::{BranchOperand, Sublayer, SublayerSaved};
use super::{Adaptable, Linear, LinearConfig, Stream};
use ottava_common::error::Result;
use ottava_recipe::context::Context;
use ottava_recipe::operand::{ResidualGradient, View};
use ottava_recipe::param::{Builder, FolderLayout, Param, Split};
use ottava_recipe::shared_values::SharedKey;
use ottava_tensor::Tensor;
use ottava_tensor::ops::{Activation, activation, activation_backward};

/// The settings of the sublayer.
#[derive(Clone, Copy, Debug, PartialEq)]
pub struct GatedEmbeddingSpec {
    /// The number of elements `D` of the embedding.
    pub width: usize,
    /// The activation of a gated MLP, whose gate is projected and whose other factor is the embedding.
    pub activation: Activation,
}

/// `y = projection(gelu(gate(x)) · p)`, with the embedding `p` `[T, D]` of the block.
pub struct GatedEmbedding {
    gate: Linear,       /* [D, C] */
    projection: Linear, /* [C, D] */
    activation: Activation,
    width: usize,
    /// The index of the block.
    block: usize,
}

/// The values that forward of [`GatedEmbedding`] saves.
struct GatedSaved {
    /// The gate and the embedding, `[T, 2·D]`.
    hidden: Tensor,
    operand: SavedOperand,
}

impl GatedEmbedding {
    /// Creates the sublayer of the block called `name` with the settings of `stream`.
    pub fn new(build: &mut Builder, name: &str, spec: GatedEmbeddingSpec, stream: &Stream) -> Result<GatedEmbedding> {
        let (GatedEmbeddingSpec { width, activation }, Stream { channels, std, .. }) = (spec, *stream);
        let mut linear = |proj: &str, outputs, inputs| {
            let name = &format!("{name}.{proj}");
            let config = LinearConfig {
                name,
                parts: &[(name.clone(), outputs)],
                fused: &[],
                replicas: &[],
                inputs,
                bias: false,
                std,
                layout: FolderLayout::Same,
                // The linears are narrow, so each rank has all rows and columns, for its own tokens.
                split: Split::None,
                shared_input: None,
                uncast: None,
            };
            Linear::new(build, config)
        };
        let gate = linear("per_layer_input_gate", width, channels)?;
        let projection = linear("per_layer_projection", channels, width)?;
        let block = build.block.map_or(0, |(block, _)| block);
        Ok(GatedEmbedding { gate, projection, activation, width, block })
    }

    /// Returns the gate of the operand `x` and the embedding.
    fn hidden(&self, x: &View, context: &mut Context) -> Result<Tensor> {
        let gate = self.gate.fprop(x, None, context)?;
        let embedding = context.shared().get(SharedKey::LayerEmbedding(self.block))?;
        side_by_side([&gate, &embedding])
    }
}

impl Sublayer for GatedEmbedding {
    fn input(&self) -> OperandCast {
        self.gate.input()
    }

    fn gradient(&self) -> OperandCast {
        self.projection.gradient()
    }

    fn forward(&self, x: View, residual: Option<&Tensor>, context: &mut Context) -> Result<(Tensor, SublayerSaved)> {
        let hidden = self.hidden(&x, context)?;
        drop(x);
        let (y, operand) = self.projection.forward(activation(self.activation, &hidden)?, residual, context)?;
        Ok((y, SublayerSaved::new(GatedSaved { hidden, operand })))
    }

    fn save(&self, x: View, context: &mut Context) -> Result<SublayerSaved> {
        let hidden = self.hidden(&x, context)?;
        drop(x);
        let operand = self.projection.save(activation(self.activation, &hidden)?, context)?;
        Ok(SublayerSaved::new(GatedSaved { hidden, operand }))
    }

    fn backward(
        &mut self,
        dy: ResidualGradient,
        saved: SublayerSaved,
        x: BranchOperand,
        other: Option<Tensor>,
        context: &mut Context,
    ) -> Result<Tensor> {
        let GatedSaved { hidden, operand } = saved.into();
        let x = x.columns(context)?;
        let how = self.activation;
        let recompute = |_: &Context| Ok(activation(how, &hidden)?);
        let dactivated = self.projection.backward_recomputing(dy, operand, recompute, context)?;
        let dhidden = activation_backward(how, &dactivated, &hidden)?;
        drop(dactivated);
        let [dgate, dembedding] = [0, self.width].map(|first| columns(&dhidden, first, self.width));
        let (dgate, dembedding) = (dgate?, dembedding?);
        drop(dhidden);
        context.shared().add_gradient(SharedKey::LayerEmbedding(self.block), dembedding)?;
        let dgate = self.gate.cast_gradient(dgate.into(), context)?;
        self.gate.backward_views(dgate, x, other.as_ref(), context)
    }

    fn parameters<'a>(&'a self, visit: &mut dyn FnMut(&'a Param)) {
        self.gate.parameters(visit);
        self.projection.parameters(visit);
    }

    fn parameters_mut<'a>(&'a mut self, visit: &mut dyn FnMut(&'a mut Param)) {
        self.gate.parameters_mut(visit);
        self.projection.parameters_mut(visit);
    }

    fn linears_mut<'a>(&'a mut self, visit: &mut dyn FnMut(&'a mut dyn Adaptable)) {
        visit(&mut self.gate);
        visit(&mut self.projection);
    }
}
