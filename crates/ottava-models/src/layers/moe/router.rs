//! The router of a mixture: logits of experts, in the precision of sums, and what follows from them.

use ottava_common::error::{Error, Result};
use ottava_recipe::ExpertCounts;
use ottava_recipe::context::Context;
use ottava_recipe::operand::View;
use ottava_recipe::param::{Builder, FolderTensor, Init, Param, Split};
use ottava_recipe::scaling::RouterSite;
use ottava_tensor::Tensor;
use ottava_tensor::comm::Axis;
use ottava_tensor::ops::{
    Accumulation, Groups, Operand, RouterLosses, Routes, Routing, Slots, add_bias, bias_gradient, cast, count_choices,
    gemm_nt, gemm_nt_plus, real_type, route, route_backward, slots,
};

/// Factors of losses that routers add to the loss of the model, as [`RouterLosses`](ottava_tensor::ops::RouterLosses) says.
#[derive(Clone, Copy, Debug, Default, PartialEq)]
pub struct RouterLossFactors {
    /// Of the loss of balance, in each layer.
    pub balance: f64,
    /// Of the mean square of the logarithm of the sum of the exponentials of logits, in each layer.
    pub z: f64,
}

/// The configuration of a router.
pub struct RouterConfig<'a> {
    /// Its name in the model folder.
    pub name: &'a str,
    /// Experts that it chooses from.
    pub experts: usize,
    /// Width of the residual stream.
    pub channels: usize,
    /// Whether a bias is added to logits.
    pub logit_bias: bool,
    /// The name of the vector that is added to scores for the choice; `None` without one.
    pub bias: Option<&'a str>,
    /// How it chooses.
    pub routing: Routing,
    /// Its losses.
    pub losses: RouterLossFactors,
    /// Standard deviation of initial weights.
    pub std: f32,
}

/// `logits = x · Wᵀ + b`, in F32 and never cast to FP8, and the choices of experts; most have no `b`.
pub struct Router {
    weight: Param, /* [E, C] */
    /// `[E]`: added to logits.
    logit_bias: Option<Param>,
    /// `[E]`: added to scores for the choice. It has no gradient; [`RouterLoad::bias_change`](ottava_recipe::scaling::RouterLoad::bias_change) changes it.
    bias: Option<Param>,
    experts: usize,
    routing: Routing,
    losses: RouterLossFactors,
    /// Its number among the routers of the model; `None` if it has nothing to choose.
    number: Option<usize>,
}

/// The choices for a micro-batch.
pub struct Routed {
    logits: Tensor, /* [T, E] */
    routes: Routes,
    /// Where the rows of each expert are, if this rank has all experts and no other tokens.
    pub slots: Slots,
}

impl Routed {
    /// `[T, K]`: the weights of the choices.
    pub fn weights(&self) -> &Tensor {
        &self.routes.weights
    }

    /// I32 `[T, K]`: the chosen experts.
    pub fn ids(&self) -> &Tensor {
        &self.routes.ids
    }
}

impl Router {
    /// A router with weights from the builder.
    pub fn new(build: &mut Builder, config: RouterConfig) -> Result<Router> {
        let RouterConfig { name, experts, channels, logit_bias, bias, routing, losses, std } = config;
        let shards = |build: &Builder, part: &str, shape| -> Result<_> {
            Ok(vec![build.shard(FolderTensor::new(format!("{name}.{part}"), shape), Split::None)?])
        };
        let of_weight = shards(build, "weight", vec![experts, channels])?;
        let weight = Param::new(build, of_weight, Init::Normal(std))?;
        let of_logits = logit_bias.then(|| shards(build, "bias", vec![experts])).transpose()?;
        let logit_bias = of_logits.map(|shards| Param::new(build, shards, Init::Normal(std))).transpose()?;
        let of_choice = bias.map(|bias| shards(build, bias, vec![experts])).transpose()?;
        let bias = of_choice.map(|shards| Param::new(build, shards, Init::Zeros)).transpose()?;
        let bias = bias.map(|vector| vector.in_sums(build));
        build.description.fixed.push(name.to_string());
        let counts = ExpertCounts { count: experts, chosen: routing.chosen };
        if let Some(bias) = bias.as_ref().filter(|bias| bias.is_trained()) {
            build.router_biases.push((name.to_string(), bias.identity.id));
        }
        let site = || RouterSite { name: name.to_string(), experts: counts, real: real_type(build.recipe.compute) };
        let number = (experts > 1).then(site).map(|site| build.slots.add_router(site));
        Ok(Router { weight, logit_bias, bias, experts, routing, losses, number })
    }

    /// Routes the tokens of `x` `[T, C]`.
    pub fn forward(&self, x: &Tensor, context: &mut Context) -> Result<Routed> {
        let weight = self.weight.read(context.loan)?;
        let (x, w) = (Operand::plain(x), Operand::plain(&weight));
        let mut logits = gemm_nt(x, w, real_type(weight.dtype()), Accumulation::Exact)?;
        if let Some(bias) = &self.logit_bias {
            add_bias(&mut logits, &cast(&bias.weights.value()?, real_type(weight.dtype()))?)?;
        }
        let bias = self.bias.as_ref().map(|bias| bias.weights.value()).transpose()?;
        let counted = self.number.filter(|_| context.mode().measures()).map(|_| own_counted(context)).transpose()?;
        let routes = route(&logits, bias.as_ref(), self.routing, counted.as_ref())?;
        let slots = slots(&routes.ids, 0..self.experts)?;
        Ok(Routed { logits, routes, slots })
    }

    /// Adds what was `routed` to the sums of a pass that measures; `rows` are the rows of this rank's experts.
    pub fn record(&self, routed: &Routed, rows: &Groups, context: &mut Context) -> Result<()> {
        let Some(number) = self.number.filter(|_| context.mode().measures()) else { return Ok(()) };
        let counts = count_choices(&routed.routes.ids, &own_counted(context)?, self.experts)?;
        context.casts.record_routes(number, &routed.routes, &counts, rows)
    }

    /// The gradient by `x` from the gradient by the weights of the choices, plus `other` if given; adds to the gradient of the weight.
    pub fn backward(
        &mut self,
        dweights: &Tensor,
        routed: &Routed,
        x: &Tensor,
        other: Option<&Tensor>,
        context: &mut Context,
    ) -> Result<Tensor> {
        let Routed { logits, routes, .. } = routed;
        let RouterLossFactors { balance, z } = self.losses;
        let has_losses = self.number.is_some() && (balance != 0.0 || z != 0.0);
        let scale = context.layer_loss_scale.filter(|_| has_losses);
        let read = scale.map(|_| Ok::<_, Error>((own_counted(context)?, self.counts_of_ranks(routes, context)?)));
        let read = read.transpose()?;
        let losses = scale.zip(read.as_ref());
        let losses = losses.map(|(scale, (counted, counts))| RouterLosses { balance, counts, z, counted, scale });
        let dlogits = route_backward(logits, routes, dweights, self.routing, losses)?;
        if let Some(bias) = self.logit_bias.as_mut().filter(|bias| bias.is_trained()) {
            bias_gradient(&dlogits, bias.gradient.sum_mut()?)?;
        }
        let weight = self.weight.read(context.loan)?;
        let dlogits = cast(&dlogits, weight.dtype())?;
        let (dy, w) = (Operand::plain(&dlogits), Operand::plain_transposed(&weight));
        let dx = match other {
            Some(other) => gemm_nt_plus(dy, w, other, Accumulation::Exact)?,
            None => gemm_nt(dy, w, x.dtype(), Accumulation::Exact)?,
        };
        if let Some(bias) = self.bias.as_mut().filter(|bias| bias.is_trained()) {
            // Choices have no gradient; zeros leave the bias as it is.
            bias.gradient.sum_mut()?;
        }
        if self.weight.is_trained() {
            let (dy, x) = (View::Value(dlogits), View::Value(x.clone()));
            context.add_wgrad(&mut self.weight, &dy, &x, None, Accumulation::Exact)?;
        }
        Ok(dx)
    }

    /// I32 `[R, E]`: the choices of the tokens that count, by expert, on each of the ranks that divide the tokens of a micro-batch: ranks that divide
    /// the tensors of layers, and ranks that divide sequences.
    fn counts_of_ranks(&self, routes: &Routes, context: &Context) -> Result<Tensor> {
        let own = count_choices(&routes.ids, &own_counted(context)?, self.experts)?.reshape(&[1, self.experts])?;
        let counts = context.gather(self.weight.identity.name(), &own)?;
        match context.sequences.place.is_divided() {
            true => context.ranks.gather(Axis::Context, self.weight.identity.name(), &counts),
            false => Ok(counts),
        }
    }

    /// Its parameters.
    pub fn parameters(&self) -> impl Iterator<Item = &Param> {
        std::iter::once(&self.weight).chain(&self.logit_bias).chain(&self.bias)
    }

    /// Its parameters, mutably.
    pub fn parameters_mut(&mut self) -> impl Iterator<Item = &mut Param> {
        std::iter::once(&mut self.weight).chain(&mut self.logit_bias).chain(&mut self.bias)
    }
}

/// [`Sequences::counted`](ottava_recipe::context::Sequences::counted) of the tokens that this rank routes.
fn own_counted(context: &Context) -> Result<Tensor> {
    context.own_rows(&context.sequences.counted)
}
