//! The description of a model's layers, recorded while it is built. Plans, benchmarks and warnings read only this description.

use crate::lora::{ExpertParameter, Lora, Modules, RouterParameter};
use crate::recurrent::RecurrentSpec;
use crate::scaling::AmaxGroup;
use crate::{Decision, LinearSite, Recipe};
use ottava_common::error::Result;
use ottava_tensor::ops::{AttentionBackend, AttentionCase, AttentionSpec};
use ottava_tensor::{DType, Device};
use std::collections::BTreeMap;

/// The linears of a model with the recipe's decisions, its parameters, and its attention layers.
#[derive(Clone, Debug, Default, PartialEq)]
pub struct Description {
    /// The linears of the blocks, in the order in which they were built.
    pub linears: Vec<(LinearSite, Decision)>,
    /// The output head. It is a product too, but is never cast.
    pub head: Option<LinearSite>,
    /// The names of weights that `high_precision_layers` may match although no recipe casts them.
    pub fixed: Vec<String>,
    /// A sentence for each key of `config.json` that is ignored.
    pub ignored: Vec<String>,
    /// The number of trained values.
    pub parameters: usize,
    /// The number of frozen values.
    pub frozen: usize,
    /// The spec of each attention layer, in the order of forward.
    pub attention: Vec<AttentionSpec>,
    /// For each of `attention`, the number of the layer whose keys and values it reads: usually its own number.
    pub caches: Vec<usize>,
    /// The sizes of each recurrent layer, in the order of forward.
    pub recurrent: Vec<RecurrentSpec>,
    /// The names of linears that share the input cast of another linear, with the name of that linear.
    pub shared_inputs: BTreeMap<String, String>,
    /// The block of each of `attention`, and then of each of `recurrent`.
    pub mixers: [Vec<usize>; 2],
    /// The name of each cast, and the ranks that share its scale.
    pub casts: Vec<(String, AmaxGroup)>,
    /// The modules of the model, if it has adapters.
    pub modules: Modules,
    /// The stacked matrices of routed experts, which may have adapters.
    pub experts: Vec<ExpertParameter>,
    /// The routers, which may have adapters.
    pub routers: Vec<RouterParameter>,
    /// The number of trained values of adapters of experts that a token does not choose.
    pub idle_adapters: usize,
}

/// The floating-point operations per second of whole steps of Llama-2-7B, in FP8 and in BF16, on one H200. They are assumed for other models too.
pub const STEP_RATES: [f64; 2] = [880e12, 580e12];

/// The costs of a model's layers, in seconds per token of a training step.
#[derive(Clone, Debug, PartialEq)]
pub struct LayerCosts {
    /// The costs of each block.
    pub blocks: Vec<f64>,
    /// The cost of the head. The embedding has no products.
    pub head: f64,
}

/// Returns twice the average number of keys that a token sees.
fn keys(spec: &AttentionSpec, seq_len: usize) -> usize {
    let window = spec.window.unwrap_or(seq_len).min(seq_len);
    let earlier = 2 * window - window * window / seq_len.max(1);
    if spec.causal { earlier } else { 2 * earlier }
}

/// Returns the number of multiplications in the products of a token with the states of a layer.
fn state_products(spec: &RecurrentSpec) -> usize {
    spec.products * spec.state_len()
}

impl Description {
    /// Adds an attention layer of a `block`, and returns its number among the attention layers.
    pub fn add_attention(&mut self, spec: AttentionSpec, block: Option<(usize, usize)>) -> usize {
        self.attention.push(spec);
        self.mixers[0].push(block.map_or(0, |(block, _)| block));
        let number = self.attention.len() - 1;
        self.caches.push(number);
        number
    }

    /// Returns whether all layers are attention layers, and `device` is a GPU whose fused kernels support documents in each of them, with activations in
    /// `dtype`.
    ///
    /// Errors if no backend supports a layer.
    pub fn packs_documents(&self, device: &Device, dtype: DType) -> Result<bool> {
        let has_own_keys = self.caches.iter().enumerate().all(|(own, &cache)| own == cache);
        let is_attention = has_own_keys && self.recurrent.is_empty();
        let is_fused = |spec| -> Result<bool> {
            let chosen = AttentionBackend::choose(device, &AttentionCase::fused(spec, dtype, true))?;
            Ok(chosen.backend == AttentionBackend::CuDnn)
        };
        self.attention.iter().try_fold(is_attention, |all, spec| Ok(all && is_fused(spec)?))
    }

    /// Returns why some attention of training on `device` has no kernel in the order of sums of attention over a cache, with activations in `dtype`, as a
    /// clause. Recurrent layers have other sums in training.
    pub fn order_refusal(&self, device: &Device, dtype: DType) -> Option<String> {
        if !self.recurrent.is_empty() {
            return Some("training computes recurrent layers in chunks, and decoding token by token".into());
        }
        let mut cases = self.attention.iter().map(|spec| AttentionCase::fused(spec, dtype, false));
        cases.find_map(|case| AttentionBackend::order_refusal(&case, device))
    }

    /// Makes attention layer `number` read the keys and values of the layer `lender`, and returns `lender`.
    pub fn share_cache(&mut self, number: usize, lender: usize) -> usize {
        self.caches[number] = lender;
        lender
    }

    /// Adds a recurrent layer of a `block`, and returns its number among the recurrent layers.
    pub fn add_recurrent(&mut self, spec: RecurrentSpec, block: Option<(usize, usize)>) -> usize {
        self.recurrent.push(spec);
        self.mixers[1].push(block.map_or(0, |(block, _)| block));
        self.recurrent.len() - 1
    }

    /// Returns the floating-point operations of forward and backward per token, for sequences of `seq_len`. Each weight of a product counts six
    /// operations, or four if it is frozen, since it has no gradient. Attention counts within its mask and window, and recurrent layers count the products
    /// with their states. Recomputation and norms are not counted.
    pub fn flops_per_token(&self, seq_len: usize) -> f64 {
        let sites = self.linears.iter().map(|(site, _)| site).chain(&self.head);
        let products: usize = sites.map(|site| site.outputs * site.inputs * site.matrices()[1]).sum();
        let products = match self.frozen {
            0 => 6.0 * products as f64,
            _ => {
                let adapters = self.parameters - self.modules.trained_values() - self.idle_adapters;
                // A head that is trained whole also has a gradient. The embedding and norms have no products.
                let head = self.head.as_ref().filter(|head| self.modules.trains(&head.name));
                let head = head.map_or(0, |head| head.outputs * head.inputs);
                4.0 * products as f64 + 6.0 * adapters as f64 + 2.0 * head as f64
            }
        };
        let attention: usize = self.attention.iter().map(|spec| spec.query_width() * keys(spec, seq_len)).sum();
        let states: usize = self.recurrent.iter().map(state_products).sum();
        products + 6.0 * (attention + states) as f64
    }

    /// Returns the costs of each block and of the head for sequences of `seq_len`, at [`STEP_RATES`]. Recomputed blocks run forward twice.
    pub fn layer_costs(&self, seq_len: usize, recomputes_blocks: bool) -> LayerCosts {
        let seconds = |operations: usize, is_fp8: bool| 6.0 * operations as f64 / STEP_RATES[usize::from(!is_fp8)];
        let attention = self.attention.iter().map(|spec| spec.query_width() * keys(spec, seq_len));
        let [of_attention, of_states] = self.mixers.each_ref().map(|blocks| blocks.iter().copied());
        let mixers = of_attention.zip(attention).chain(of_states.zip(self.recurrent.iter().map(state_products)));
        let count = self.linears.iter().filter_map(|(site, _)| site.block).map(|(_, count)| count).max();
        let mut blocks = vec![0.0; count.unwrap_or(0)];
        for (block, operations) in mixers {
            blocks[block] += seconds(operations, false);
        }
        for (site, decision) in &self.linears {
            if let Some((block, _)) = site.block {
                let chosen = site.matrices()[1];
                blocks[block] += seconds(chosen * site.outputs * site.inputs, decision.fp8.is_some());
            }
        }
        if recomputes_blocks {
            blocks.iter_mut().for_each(|block| *block *= 4.0 / 3.0);
        }
        let head = self.head.as_ref().map_or(0.0, |head| seconds(head.outputs * head.inputs, false));
        LayerCosts { blocks, head }
    }

    /// Returns the linears of the first block.
    pub fn block_linears(&self) -> impl Iterator<Item = &LinearSite> {
        self.linears.iter().map(|(site, _)| site).filter(|site| site.block.is_some_and(|(block, _)| block == 0))
    }

    /// Returns the name of the linear that owns the input cast of the linear called `name`: the linear in `shared_inputs`, or itself.
    pub fn input_owner<'a>(&'a self, name: &'a str) -> &'a str {
        self.shared_inputs.get(name).map_or(name, String::as_str)
    }

    /// Returns the names of the linears that may have adapters, as in a folder. These are all linears except the linears of experts, which are
    /// [`Description::experts`].
    pub fn adaptable(&self) -> impl Iterator<Item = &String> {
        self.linears.iter().filter(|(site, _)| site.experts.is_none()).flat_map(|(site, _)| &site.parts)
    }

    /// Returns the names of all parameters that `target_parameters` may name: stacked matrices of experts, and weights of linears and routers.
    fn adaptable_parameters(&self) -> Vec<String> {
        let routers = self.routers.iter().map(|router| &router.name);
        let weights = self.adaptable().chain(routers).map(|name| format!("{name}.weight"));
        self.experts.iter().map(|parameter| parameter.name.clone()).chain(weights).collect()
    }

    /// Checks the targets of adapters against all linears and parameters.
    fn check_adapters(&self, lora: &Lora) -> Result<()> {
        if !lora.parameters.is_empty() {
            lora.check_parameters(&self.adaptable_parameters())?;
        }
        // A file of adapters may select experts by the names of their linears in any model.
        let by_name = |by_name: bool| by_name || !lora.experts_by_name;
        let experts = self.experts.iter().filter(|parameter| by_name(parameter.by_name));
        let of_experts: Vec<String> = experts.flat_map(ExpertParameter::linear_names).collect();
        let routers = self.routers.iter().filter(|router| by_name(router.by_name));
        let routers = routers.map(|router| &router.name);
        lora.check(self.adaptable().chain(routers).chain(&of_experts), &self.modules)
    }

    /// Returns a sentence for each reason for which `recipe` leaves linears in high precision, if the recipe casts to FP8.
    pub fn exceptions(&self, recipe: &Recipe) -> Vec<String> {
        let mut reasons: BTreeMap<&str, usize> = BTreeMap::new();
        let decisions = self.linears.iter().map(|(_, decision)| decision);
        for decision in decisions.filter(|decision| recipe.casts_to_fp8() && decision.fp8.is_none()) {
            *reasons.entry(&decision.reason).or_default() += 1;
        }
        let sentence = |(reason, count): (&str, usize)| {
            format!("{count} of {} linears stay in {}: {reason}", self.linears.len(), recipe.compute)
        };
        reasons.into_iter().map(sentence).collect()
    }

    /// Returns a sentence if this model casts another number of linears than the run that saved `casts`, the names of its casts. The settings are the
    /// same.
    pub fn difference(&self, casts: &[String]) -> Option<String> {
        let saved = casts.iter().filter(|name| name.ends_with(".input")).count();
        let here = self.linears.iter().filter(|(_, decision)| decision.fp8.is_some()).count();
        (saved != here).then(|| {
            format!(
                "the run that saved the checkpoint cast {saved} of its {} linears to FP8; here {here} are, since `skip_slow_linears` goes by the speed of a GPU",
                self.linears.len()
            )
        })
    }

    /// Checks the exceptions of `recipe` and the targets of adapters against all linears.
    ///
    /// Errors when a pattern or a target matches nothing.
    pub fn check(&self, recipe: &Recipe, lora: Option<&Lora>) -> Result<()> {
        if let Some(lora) = lora {
            self.check_adapters(lora)?;
        }
        // No setting casts a linear whose name is fixed.
        let sites = self.linears.iter().map(|(site, _)| site).filter(|site| !self.fixed.contains(&site.name));
        recipe.check(sites, &self.fixed)
    }
}
