//! Adapters of parameters that transformers does not have as linears: the stacked matrices of all experts of a layer, and the weights of routers.
//!
//! PEFT selects such parameters by `target_parameters`. For some models, PEFT also translates names of linears, which older versions of transformers
//! had for each expert: the adapters of `gate_proj` and `up_proj` become one adapter of `gate_up_proj`, whose rank is the sum of their ranks.

use super::targets::names_it;
use super::{Exceptions, Lora};
use ottava_common::error::{Error, Result};
use std::collections::BTreeSet;

/// A parameter with the matrices of all experts of a layer, as in the memory of transformers.
#[derive(Clone, Debug, PartialEq)]
pub struct ExpertParameter {
    /// The name, such as `model.layers.0.mlp.experts.gate_up_proj`.
    pub name: String,
    /// The names in an expert of the linears that the parameter has one after another, such as `gate_proj` and `up_proj`.
    pub linears: &'static [&'static str],
    /// The number of experts.
    pub experts: usize,
    /// Whether PEFT translates names of linears of this model to parameters.
    pub by_name: bool,
}

/// A router, whose weight can have an adapter.
#[derive(Clone, Debug, PartialEq)]
pub struct RouterParameter {
    /// The name of the router, which is the name of its weight without `.weight`.
    pub name: String,
    /// Whether PEFT translates the name of the router to the name of its weight.
    pub by_name: bool,
}

/// The adapter of an [`ExpertParameter`]: each expert has matrices of this rank.
#[derive(Clone, Copy, Debug, PartialEq)]
pub struct ExpertRank {
    /// The rank of the matrices of an expert.
    pub rank: usize,
    /// The numerator of the factor, as PEFT's `alpha_pattern` states it for the parameter.
    pub alpha: f64,
    /// The factor of the product of `A` and `B`.
    pub scale: f64,
}

impl ExpertParameter {
    /// Returns the names of a linear of all experts: without a number, and with the number of each expert.
    fn names_of(&self, linear: &str) -> impl Iterator<Item = String> {
        let (module, _) = self.name.rsplit_once('.').expect("a parameter is in a module");
        let of_each = (0..self.experts).map(move |expert| format!("{module}.{expert}.{linear}"));
        std::iter::once(format!("{module}.{linear}")).chain(of_each)
    }

    /// Returns the names of the linears of all experts, by which `target_modules` may select the parameter.
    pub fn linear_names(&self) -> Vec<String> {
        self.linears.iter().flat_map(|linear| self.names_of(linear)).collect()
    }
}

/// Returns the names of a parameter: in the folder of its model, and in transformers, which calls some mixtures `mlp`.
pub fn parameter_names(name: &str) -> [String; 2] {
    [name.to_string(), name.replace(".block_sparse_moe.", ".mlp.")]
}

/// Returns the last two parts of the name of a parameter, such as `experts.gate_up_proj`.
fn end_of(name: &str) -> &str {
    let parts = name.rmatch_indices('.').nth(1);
    parts.map_or(name, |(at, _)| &name[at + 1..])
}

impl Lora {
    /// Returns whether `target_parameters` names `parameter`.
    pub fn has_parameter(&self, parameter: &str) -> bool {
        let names = || parameter_names(parameter);
        self.parameters.iter().any(|target| names().iter().any(|name| names_it(target, name)))
    }

    /// Checks the names in `parameters` against the names of all parameters of a model that can have adapters.
    ///
    /// Errors with [`Error::Config`], which lists the parameters, if a name is no parameter of the model.
    pub fn check_parameters(&self, known: &[String]) -> Result<()> {
        let names = |target: &String, name: &String| parameter_names(name).iter().any(|name| names_it(target, name));
        match self.parameters.iter().find(|target| !known.iter().any(|name| names(target, name))) {
            None => Ok(()),
            Some(target) => {
                let ends: BTreeSet<&str> = known.iter().map(|name| end_of(name)).collect();
                let ends = ends.into_iter().map(|name| format!("`{name}`")).collect::<Vec<_>>().join(", ");
                Err(Error::Config(format!(
                    "`target_parameters`: `{target}` is no parameter of this model's blocks that can have an adapter, which are {ends}; name some of them, \
                     or none"
                )))
            }
        }
    }

    /// Returns whether the weight of `router` has an adapter.
    pub fn has_router(&self, router: &RouterParameter) -> bool {
        // A file of adapters has matrices of all linears that it names, so its names need no translation.
        let by_name = router.by_name || !self.experts_by_name;
        by_name && self.has_linear(&router.name) || self.has_parameter(&format!("{}.weight", router.name))
    }

    /// Errors with [`Error::Config`] if adapters have magnitudes, and `parameter` has an adapter and is no linear in transformers.
    pub fn expect_without_magnitudes(&self, parameter: &str) -> Result<()> {
        match self.use_dora {
            false => Ok(()),
            true => Err(Error::Config(format!(
                "`use_dora` is set, and `{parameter}` has an adapter; PEFT has no magnitudes for experts and routers: set `use_dora` to false, or name \
                 linears without experts and routers in `target_modules`"
            ))),
        }
    }

    /// Returns the rank of the adapters of `parameter`; `None` if it has no adapters.
    ///
    /// Errors with [`Error::Config`] if the targets select some experts or some linears of the parameter, or if its linears have different factors.
    pub fn of_experts(&self, parameter: &ExpertParameter) -> Result<Option<ExpertRank>> {
        let ExpertParameter { name, linears, .. } = parameter;
        if self.has_parameter(name) {
            return Ok(Some(self.expert_rank(self.rank(name), self.alpha(name))));
        }
        if !parameter.by_name || !self.experts_by_name {
            return Ok(None);
        }
        let mut missing = Vec::new();
        for linear in *linears {
            let mut names = parameter.names_of(linear);
            let is_target = names.next().is_some_and(|name| self.has_linear(&name));
            let targets = names.filter(|name| self.has_linear(name)).count();
            if !is_target && targets == 0 {
                missing.push(*linear);
            } else if !is_target && targets < parameter.experts {
                return Err(Error::Config(format!(
                    "`target_modules` selects `{linear}` of {targets} of the {} experts of `{name}`; the adapters of all experts of a layer are trained \
                     together: select all of them, or none",
                    parameter.experts
                )));
            }
        }
        match missing.len() {
            0 => self.of_linears(parameter).map(Some),
            all if all == linears.len() => Ok(None),
            _ => Err(Error::Config(format!(
                "`target_modules` selects some linears of `{name}` and not `{}`; experts have one adapter for these linears, as in PEFT: select all of {}, \
                 or none",
                missing.join("`, `"),
                linears.iter().map(|linear| format!("`{linear}`")).collect::<Vec<_>>().join(", ")
            ))),
        }
    }

    /// Returns the rank of an adapter that replaces the adapters of all linears of `parameter`, with PEFT's factor.
    fn of_linears(&self, parameter: &ExpertParameter) -> Result<ExpertRank> {
        let [ranks, alphas] = [self.exceptions.ranks.is_empty(), self.exceptions.alphas.is_empty()];
        let (has_patterns, rank_of) = (!ranks || !alphas, Exceptions::values(&self.exceptions.ranks));
        let alpha_of = Exceptions::values(&self.exceptions.alphas);
        let of = |linear: &str| {
            // A pattern may match the names of experts with or without their numbers.
            let names: Vec<String> =
                parameter.names_of(linear).take(if has_patterns { usize::MAX } else { 1 }).collect();
            let ranks: Vec<usize> = names.iter().filter_map(|name| rank_of(name)).collect();
            let alphas: Vec<f64> = names.iter().filter_map(|name| alpha_of(name)).collect();
            let differs = ranks.iter().any(|rank| *rank != ranks[0]) || alphas.iter().any(|alpha| *alpha != alphas[0]);
            (ranks.first().copied().unwrap_or(self.r), alphas.first().copied().unwrap_or(self.alpha), differs)
        };
        let found: Vec<_> = parameter.linears.iter().map(|linear| of(linear)).collect();
        let (r, alpha, _) = found[0];
        let wrong = |what: &str| {
            Err(Error::Config(format!(
                "`rank_pattern` or `alpha_pattern` gives {what} of `{}` different values; the adapters of a layer's experts are one adapter: write a pattern \
                 for `{}`",
                parameter.name,
                super::last_name(&parameter.name)
            )))
        };
        if found.iter().any(|(.., differs)| *differs) {
            return wrong("the experts");
        }
        if found.iter().any(|(rank, other, _)| other / *rank as f64 != alpha / r as f64) {
            return wrong("the linears");
        }
        let rank = found.iter().map(|(rank, ..)| rank).sum();
        let rank = Exceptions::of(&self.exceptions.ranks, &parameter.name).unwrap_or(rank);
        let own = Exceptions::of(&self.exceptions.alphas, &parameter.name);
        Ok(self.expert_rank(rank, own.unwrap_or(alpha / r as f64 * rank as f64)))
    }

    fn expert_rank(&self, rank: usize, alpha: f64) -> ExpertRank {
        ExpertRank { rank, alpha, scale: self.factor(alpha, rank) }
    }
}
