//! The router of a mixture: it computes logits of experts in the precision of sums, and chooses experts from the logits.

use super::scales::{RouterScales, Scaled, Scales};
use crate::layers::{Adapter, LinearConfig, NormConfig};
use ottava_common::error::{Error, Result};
use ottava_recipe::ExpertCounts;
use ottava_recipe::context::Context;
use ottava_recipe::lora::RouterParameter;
use ottava_recipe::operand::View;
use ottava_recipe::param::{Builder, FolderLayout, FolderTensor, Init, Param, Split};
use ottava_recipe::scaling::RouterSite;
use ottava_tensor::Tensor;
use ottava_tensor::comm::Axis;
use ottava_tensor::ops::{
    Accumulation, Groups, Operand, RouterLosses, Routes, Routing, Slots, add_bias, bias_gradient, cast, count_choices,
    gemm_nt, gemm_nt_plus, real_type, route, route_backward, slots,
};

/// Factors of the losses that routers add to the loss of the model. [`RouterLosses`](ottava_tensor::ops::RouterLosses) defines the losses.
#[derive(Clone, Copy, Debug, Default, PartialEq)]
pub struct RouterLossFactors {
    /// The factor of the balance loss of each layer.
    pub balance: f64,
    /// The factor of the mean square of the log-sum-exp of the logits of each layer.
    pub z: f64,
}

/// The configuration of a router.
pub struct RouterConfig<'a> {
    /// The name of the router in the model folder.
    pub name: &'a str,
    /// The number of experts that the router chooses from.
    pub experts: usize,
    /// The width of the residual stream.
    pub channels: usize,
    /// Whether a bias is added to logits.
    pub logit_bias: bool,
    /// The vector that is added to scores for the choice, `[E]`. `None` without such a vector.
    pub bias: Option<FolderTensor>,
    /// The rule by which the router chooses experts.
    pub routing: Routing,
    /// The factors of the router's losses.
    pub losses: RouterLossFactors,
    /// The standard deviation of initial weights.
    pub std: f32,
    /// The name of the mixture, and the scales and the norm of the router, if it has scales.
    pub scales: Option<(&'a str, RouterScales, NormConfig)>,
    /// The router as a target of adapters. `None` if it cannot have an adapter.
    pub adapted: Option<&'a RouterParameter>,
}

/// `logits = x · Wᵀ + b`, and the choice of experts from these logits. The logits are computed in F32, and `x` and `W` are never cast to FP8. Most
/// models have no `b`. An adapter adds to the logits.
pub struct Router {
    weight: Param, /* [E, C] */
    adapter: Option<Adapter>,
    /// The bias that is added to logits, `[E]`.
    logit_bias: Option<Param>,
    /// The vector that is added to scores for the choice, `[E]`. It has no gradient.
    /// [`RouterLoad::bias_change`](ottava_recipe::scaling::RouterLoad::bias_change) computes its change.
    bias: Option<Param>,
    experts: usize,
    routing: Routing,
    losses: RouterLossFactors,
    scales: Option<Scales>,
    /// The index among the routers of the model. `None` if the layer has only one expert.
    number: Option<usize>,
}

/// The choices for a micro-batch.
pub struct Routed {
    logits: Tensor, /* [T, E] */
    routes: Routes,
    /// The values of the router's scales, if it has scales.
    scaled: Option<Scaled>,
    /// The positions of the rows of each expert, if all experts and all tokens are on this rank.
    pub slots: Slots,
}

impl Routed {
    /// Returns the weights of the choices, `[T, K]`.
    pub fn weights(&self) -> &Tensor {
        self.scaled.as_ref().map_or(&self.routes.weights, |scaled| &scaled.weights)
    }

    /// Returns the chosen experts, I32 `[T, K]`.
    pub fn ids(&self) -> &Tensor {
        &self.routes.ids
    }
}

impl Router {
    /// Creates a router with weights from the builder.
    pub fn new(build: &mut Builder, config: RouterConfig) -> Result<Router> {
        let RouterConfig { name, experts, channels, logit_bias, bias, routing, losses, std, scales, adapted } = config;
        let shards = |build: &Builder, tensor: String, shape| -> Result<_> {
            Ok(vec![build.shard(FolderTensor::new(tensor, shape), Split::None)?])
        };
        let of_weight = shards(build, format!("{name}.weight"), vec![experts, channels])?;
        let weight = Param::new(build, of_weight, Init::Normal(std))?;
        let adapter = adapted.map(|adapted| Router::adapter(build, adapted, [experts, channels], std)).transpose()?;
        let of_logits = logit_bias.then(|| shards(build, format!("{name}.bias"), vec![experts])).transpose()?;
        let logit_bias = of_logits.map(|shards| Param::new(build, shards, Init::Normal(std))).transpose()?;
        let of_choice = bias.map(|bias| Ok::<_, Error>(vec![build.shard(bias, Split::None)?])).transpose()?;
        let bias = of_choice.map(|shards| Param::new(build, shards, Init::Zeros)).transpose()?;
        let bias = bias.map(|vector| vector.in_sums(build));
        build.description.fixed.push(name.to_string());
        let counts = ExpertCounts { count: experts, chosen: routing.chosen };
        if let Some(bias) = bias.as_ref().filter(|bias| bias.is_trained()) {
            build.router_biases.push((name.to_string(), bias.identity.id));
        }
        let site = || RouterSite { name: name.to_string(), experts: counts, real: real_type(build.recipe.compute) };
        let number = (experts > 1).then(site).map(|site| build.slots.add_router(site));
        let scales = scales.map(|scales| Scales::new(build, scales, [experts, channels])).transpose()?;
        let adapter = adapter.flatten();
        Ok(Router { weight, adapter, logit_bias, bias, experts, routing, losses, scales, number })
    }

    /// Creates the adapter of the router, if the router is a target.
    fn adapter(
        build: &mut Builder,
        adapted: &RouterParameter,
        [experts, channels]: [usize; 2],
        std: f32,
    ) -> Result<Option<Adapter>> {
        build.description.routers.push(adapted.clone());
        let Some(lora) = build.lora.filter(|lora| lora.has_router(adapted)) else { return Ok(None) };
        lora.expect_without_magnitudes(&format!("{}.weight", adapted.name))?;
        let config = LinearConfig {
            name: &adapted.name,
            parts: &[(adapted.name.clone(), experts)],
            fused: &[],
            replicas: &[],
            inputs: channels,
            bias: false,
            std,
            layout: FolderLayout::Same,
            split: Split::None,
            shared_input: None,
            uncast: None,
        };
        Adapter::new(build, &config)
    }

    /// Returns the adapter, if the router has one.
    pub fn adapter_mut(&mut self) -> &mut Option<Adapter> {
        &mut self.adapter
    }

    /// Routes the tokens of `x` `[T, C]`.
    pub fn forward(&self, x: &Tensor, context: &mut Context) -> Result<Routed> {
        let weight = self.weight.read(context.loan)?;
        let read = self.scales.as_ref().map(|scales| scales.read(x, context)).transpose()?;
        let (of_router, w) = (read.as_ref().map_or(x, |(normed, _)| normed), Operand::plain(&weight));
        let mut logits = gemm_nt(Operand::plain(of_router), w, real_type(weight.dtype()), Accumulation::Exact)?;
        if let Some(adapter) = self.adapter.as_ref().filter(|_| context.mode().adapts()) {
            logits = adapter.forward(of_router, Some(&logits), context)?;
        }
        if let Some(scales) = &self.scales {
            logits = scales.scale_logits(&logits)?;
        }
        if let Some(bias) = &self.logit_bias {
            add_bias(&mut logits, &cast(&bias.weights.value()?, real_type(weight.dtype()))?)?;
        }
        let bias = self.bias.as_ref().map(|bias| bias.weights.value()).transpose()?;
        let counted = self.number.filter(|_| context.mode().measures()).map(|_| own_counted(context)).transpose()?;
        let routes = route(&logits, bias.as_ref(), self.routing, counted.as_ref())?;
        let slots = slots(&routes.ids, 0..self.experts)?;
        let scaled = self.scales.as_ref().zip(read);
        let scaled =
            scaled.map(|(scales, read)| scales.scale_weights(read, &routes.weights, &routes.ids)).transpose()?;
        Ok(Routed { logits, routes, scaled, slots })
    }

    /// In a pass that measures, adds the choices in `routed` to the sums. `rows` are the rows of this rank's experts.
    pub fn record(&self, routed: &Routed, rows: &Groups, context: &mut Context) -> Result<()> {
        let Some(number) = self.number.filter(|_| context.mode().measures()) else { return Ok(()) };
        let counts = count_choices(&routed.routes.ids, &own_counted(context)?, self.experts)?;
        context.casts.record_routes(number, &routed.routes, &counts, rows)
    }

    /// Returns the gradient by `x` from the gradient by the weights of the choices, plus `other` if given. Adds to the gradient of the weight.
    pub fn backward(
        &mut self,
        dweights: &Tensor,
        routed: Routed,
        x: &Tensor,
        other: Option<&Tensor>,
        context: &mut Context,
    ) -> Result<Tensor> {
        let Routed { logits, routes, scaled, .. } = routed;
        let RouterLossFactors { balance, z } = self.losses;
        let has_losses = self.number.is_some() && (balance != 0.0 || z != 0.0);
        let scale = context.layer_loss_scale.filter(|_| has_losses);
        let read = scale.map(|_| Ok::<_, Error>((own_counted(context)?, self.counts_of_ranks(&routes, context)?)));
        let read = read.transpose()?;
        let losses = scale.zip(read.as_ref());
        let losses = losses.map(|(scale, (counted, counts))| RouterLosses { balance, counts, z, counted, scale });
        let dweights = match (&mut self.scales, &scaled) {
            (Some(scales), Some(scaled)) => scales.weights_backward(dweights, scaled, &routes.weights, &routes.ids)?,
            _ => dweights.clone(),
        };
        let mut dlogits = route_backward(&logits, &routes, &dweights, self.routing, losses)?;
        if let Some(bias) = self.logit_bias.as_mut().filter(|bias| bias.is_trained()) {
            bias_gradient(&dlogits, bias.gradient.sum_mut()?)?;
        }
        if let Some(scales) = &self.scales {
            dlogits = scales.scale_logits(&dlogits)?;
        }
        let weight = self.weight.read(context.loan)?;
        let dlogits = cast(&dlogits, weight.dtype())?;
        let (dy, w) = (Operand::plain(&dlogits), Operand::plain_transposed(&weight));
        let read = scaled.as_ref().map_or(x, |scaled| &scaled.normed).clone();
        let beside = other.filter(|_| self.scales.is_none());
        let mut dx = match beside {
            Some(other) => gemm_nt_plus(dy, w, other, Accumulation::Exact)?,
            None => gemm_nt(dy, w, x.dtype(), Accumulation::Exact)?,
        };
        if let Some(adapter) = &mut self.adapter {
            dx = adapter.dgrad(&dlogits, Some(&dx), context)?;
            adapter.wgrad(&dlogits, &read, context)?;
        }
        if let Some(bias) = self.bias.as_mut().filter(|bias| bias.is_trained()) {
            // Choices have no gradient. A gradient of zeros makes the update leave the bias unchanged.
            bias.gradient.sum_mut()?;
        }
        if self.weight.is_trained() {
            let (dy, x) = (View::Value(dlogits), View::Value(read));
            context.add_wgrad(&mut self.weight, &dy, &x, None, Accumulation::Exact)?;
        }
        if let (Some(scales), Some(scaled)) = (&mut self.scales, scaled) {
            dx = scales.read_backward(&dx, scaled, other, context)?;
        }
        Ok(dx)
    }

    /// Returns I32 `[R, E]`: for each rank, how often its counted tokens chose each expert. The `R` ranks are the ranks that divide the tokens of a
    /// micro-batch: the ranks of tensor parallelism and the ranks that divide sequences.
    fn counts_of_ranks(&self, routes: &Routes, context: &Context) -> Result<Tensor> {
        let own = count_choices(&routes.ids, &own_counted(context)?, self.experts)?.reshape(&[1, self.experts])?;
        let counts = context.gather(self.weight.identity.name(), &own)?;
        match context.sequences.place.is_divided() {
            true => context.ranks.gather(Axis::Context, self.weight.identity.name(), &counts),
            false => Ok(counts),
        }
    }

    /// Calls `visit` for each parameter, always in the same order.
    pub fn parameters<'a>(&'a self, visit: &mut dyn FnMut(&'a Param)) {
        std::iter::once(&self.weight).chain(&self.logit_bias).chain(&self.bias).for_each(&mut *visit);
        self.adapter.iter().for_each(|adapter| adapter.parameters(visit));
        self.scales.iter().for_each(|scales| scales.parameters(visit));
    }

    /// Calls `visit` for each parameter mutably, in the order of [`Router::parameters`].
    pub fn parameters_mut<'a>(&'a mut self, visit: &mut dyn FnMut(&'a mut Param)) {
        std::iter::once(&mut self.weight).chain(&mut self.logit_bias).chain(&mut self.bias).for_each(&mut *visit);
        self.adapter.iter_mut().for_each(|adapter| adapter.parameters_mut(visit));
        self.scales.iter_mut().for_each(|scales| scales.parameters_mut(visit));
    }
}

/// Returns [`Sequences::counted`](ottava_recipe::context::Sequences::counted) of the tokens that this rank routes.
fn own_counted(context: &Context) -> Result<Tensor> {
    context.own_rows(&context.sequences.counted)
}
