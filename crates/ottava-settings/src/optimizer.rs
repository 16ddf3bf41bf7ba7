//! The table `[optimizer]`: the algorithm that updates weights, and the formats in which it stores them.

use crate::demands::{Problems, from_zero};
use crate::{auto, tagged};
use ottava_common::error::Result;
use ottava_parallel::optim::{
    AdamWConfig, AdamWOptimizer, AdjustLr, LionOptimizer, MomentumConfig, MuonOptimizer, Optimizer,
};
use ottava_recipe::param::Param;
use ottava_recipe::storage::{Formats, Gradients, Masters, States, Storage};
use schemars::JsonSchema;
use serde::{Deserialize, Deserializer, Serialize};

/// The learning rate above which a run gets a warning.
const LARGE_RATE: f64 = 1.0;

/// The `[optimizer]` table. A format that is `None` (written `auto`) is the format of `storage`.
#[derive(Clone, Debug, PartialEq, Serialize, Deserialize, JsonSchema)]
#[serde(default)]
pub struct OptimizerConfig {
    /// The algorithm of the updates, with its own keys.
    #[serde(flatten)]
    pub algorithm: Algorithm,
    /// Peak learning rate, reached after lr_scheduler.warmup_steps.
    pub learning_rate: f64,
    /// Decoupled weight decay. It applies to matrices, not to norms and biases.
    pub weight_decay: f64,
    /// Formats of weights, gradients and optimizer states; docs/memory.md has the bytes per parameter:
    pub storage: Storage,
    /// Master weights of models that compute in 16 bits: "float32", "float16" (with a scale), "remainder" (the 16 bits that complete
    /// bfloat16 weights to float32), "none" (updates are rounded stochastically), or "auto" (the format that storage selects).
    #[serde(with = "auto")]
    #[schemars(with = "auto::Auto<Masters>")]
    pub master_weights: Option<Masters>,
    /// Gradients of the blocks' matrices: "float32", "bfloat16" (if the model computes in bfloat16), "float8", or "auto" (the format that
    /// storage selects).
    #[serde(with = "auto")]
    #[schemars(with = "auto::Auto<Gradients>")]
    pub gradient_dtype: Option<Gradients>,
    /// Moments of AdamW: "float32", "bfloat16", "float8" (E4M3 and float16), "coat" (both moments in 8 bits), or "auto" (the format that
    /// storage selects). The momentum of Muon and Lion has the format of the first moment.
    #[serde(with = "auto")]
    #[schemars(with = "auto::Auto<States>")]
    pub state_dtype: Option<States>,
}

/// The algorithm of the updates.
#[derive(Clone, Copy, Debug, PartialEq, Serialize, Deserialize, JsonSchema)]
#[serde(tag = "name", rename_all = "lowercase")]
pub enum Algorithm {
    /// AdamW.
    Adamw(Adamw),
    /// Muon for the matrices of the blocks, and AdamW for embeddings, head, norms and biases.
    Muon(Muon),
    /// Lion: set a learning rate three to ten times smaller than for AdamW, and a weight decay larger by the same factor.
    Lion(Lion),
}

/// The keys of AdamW.
#[derive(Clone, Copy, Debug, PartialEq, Serialize, Deserialize, JsonSchema)]
#[serde(deny_unknown_fields, default)]
pub struct Adamw {
    /// Decay rate of AdamW's first moment.
    pub beta1: f64,
    /// Decay rate of AdamW's second moment.
    pub beta2: f64,
    /// A constant that is added to the denominator of AdamW's update.
    pub eps: f64,
}

/// The keys of Muon.
#[derive(Clone, Copy, Debug, PartialEq, Serialize, Deserialize, JsonSchema)]
#[serde(deny_unknown_fields, default)]
pub struct Muon {
    /// Decay rate of Muon's momentum.
    pub momentum: f64,
    /// Factor of the learning rate in Muon's update of a matrix of R rows and C columns, named as in PyTorch: "match_rms_adamw" or
    /// "original". "match_rms_adamw" is 0.2 sqrt(max(R, C)); you can keep a learning rate and a weight decay tuned for AdamW. "original" is
    /// sqrt(max(1, R / C)); usual learning rates are around 0.02. AdamW updates embeddings, head, norms and biases with the same learning
    /// rate, without the factor.
    pub adjust_lr_fn: AdjustLr,
    /// Decay rate of AdamW's first moment.
    pub beta1: f64,
    /// Decay rate of AdamW's second moment.
    pub beta2: f64,
    /// A constant that is added to the denominator of AdamW's update.
    pub eps: f64,
}

/// The keys of Lion.
#[derive(Clone, Copy, Debug, PartialEq, Serialize, Deserialize, JsonSchema)]
#[serde(deny_unknown_fields, default)]
pub struct Lion {
    /// Weight of Lion's momentum in the direction of an update; the gradient has the weight 1 - beta1.
    pub beta1: f64,
    /// Decay rate of Lion's momentum.
    pub beta2: f64,
}

impl OptimizerConfig {
    /// Returns a sentence if the learning rate is so large that no algorithm trains a model with it.
    pub fn large_learning_rate(&self) -> Option<String> {
        let rate = self.learning_rate;
        (rate > LARGE_RATE).then(|| {
            format!("`optimizer.learning_rate` is {rate}, and rates of common runs lie between 1e-6 and 2e-2; the model is probably destroyed")
        })
    }
}

impl Default for OptimizerConfig {
    fn default() -> OptimizerConfig {
        OptimizerConfig {
            algorithm: Algorithm::Adamw(Adamw::default()),
            learning_rate: 3e-4,
            weight_decay: 0.1,
            storage: Storage::default(),
            master_weights: None,
            gradient_dtype: None,
            state_dtype: None,
        }
    }
}

impl Default for Adamw {
    fn default() -> Adamw {
        Adamw { beta1: 0.9, beta2: 0.95, eps: 1e-8 }
    }
}

impl Default for Muon {
    fn default() -> Muon {
        let Adamw { beta1, beta2, eps } = Adamw::default();
        Muon { momentum: 0.95, adjust_lr_fn: AdjustLr::default(), beta1, beta2, eps }
    }
}

impl Default for Lion {
    fn default() -> Lion {
        Lion { beta1: 0.9, beta2: 0.99 }
    }
}

impl Algorithm {
    /// Returns the spelling in `optimizer.name`.
    pub const fn as_str(self) -> &'static str {
        match self {
            Algorithm::Adamw(_) => "adamw",
            Algorithm::Muon(_) => "muon",
            Algorithm::Lion(_) => "lion",
        }
    }

    /// Returns the keys of the algorithm whose values are shares below 1, with these values.
    fn shares(self) -> Vec<(&'static str, f64)> {
        match self {
            Algorithm::Adamw(Adamw { beta1, beta2, .. }) | Algorithm::Lion(Lion { beta1, beta2 }) => {
                vec![("beta1", beta1), ("beta2", beta2)]
            }
            Algorithm::Muon(Muon { momentum, beta1, beta2, .. }) => {
                vec![("momentum", momentum), ("beta1", beta1), ("beta2", beta2)]
            }
        }
    }

    fn eps(self) -> Option<f64> {
        match self {
            Algorithm::Adamw(Adamw { eps, .. }) | Algorithm::Muon(Muon { eps, .. }) => Some(eps),
            Algorithm::Lion(_) => None,
        }
    }
}

impl OptimizerConfig {
    /// Reads the `[optimizer]` table.
    pub(super) fn read<'de, D: Deserializer<'de>>(from: D) -> std::result::Result<OptimizerConfig, D::Error> {
        tagged::read(from, "name", "adamw")
    }

    /// Returns the formats, with `auto` resolved.
    pub fn formats(&self) -> Formats {
        let Formats { masters, gradients, states } = self.storage.formats();
        Formats {
            masters: self.master_weights.unwrap_or(masters),
            gradients: self.gradient_dtype.unwrap_or(gradients),
            states: self.state_dtype.unwrap_or(states),
        }
    }

    /// Creates the optimizer before its first step. Gradients are clipped to the norm `max_grad_norm`; 0 turns clipping off.
    pub fn build(&self, max_grad_norm: f64, params: &[&mut Param]) -> Result<Box<dyn Optimizer>> {
        let weight_decay = self.weight_decay;
        let adamw = |beta1, beta2, epsilon| AdamWConfig { beta1, beta2, epsilon, weight_decay, max_grad_norm };
        Ok(match self.algorithm {
            Algorithm::Adamw(Adamw { beta1, beta2, eps }) => {
                Box::new(AdamWOptimizer::new(adamw(beta1, beta2, eps), params)?)
            }
            Algorithm::Muon(Muon { momentum, adjust_lr_fn, beta1, beta2, eps }) => {
                Box::new(MuonOptimizer::new(momentum, adjust_lr_fn, adamw(beta1, beta2, eps), params)?)
            }
            Algorithm::Lion(Lion { beta1, beta2 }) => {
                Box::new(LionOptimizer::new(MomentumConfig { beta1, beta2, weight_decay, max_grad_norm }, params)?)
            }
        })
    }

    /// Lists the problems of the values, one sentence each.
    pub(super) fn problems(&self) -> Vec<String> {
        let mut problems = Problems::default();
        let rate = self.learning_rate;
        problems.demand(rate.is_finite() && rate > 0.0, "`optimizer.learning_rate` must be above 0");
        problems.demand(from_zero(self.weight_decay), "`optimizer.weight_decay` must not be negative or infinite");
        for (key, share) in self.algorithm.shares() {
            problems.demand((0.0..1.0).contains(&share), format!("`optimizer.{key}` is {share}; it lies in [0, 1)"));
            problems.demand(
                !(0.0..1.0).contains(&share) || (share as f32) < 1.0,
                format!("`optimizer.{key}` is {share}, which F32 rounds to 1; the moments would never change"),
            );
        }
        let eps = self.algorithm.eps();
        problems.demand(eps.is_none_or(|eps| from_zero(eps) && eps > 0.0), "`optimizer.eps` must be above 0");
        problems.demand_single("optimizer.learning_rate", rate);
        problems.demand_single("optimizer.weight_decay", self.weight_decay);
        eps.into_iter().for_each(|eps| problems.demand_single("optimizer.eps", eps));
        problems.0
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_learning_rate_that_trains_no_model_is_told() {
        let mut optimizer = OptimizerConfig::default();
        assert_eq!(optimizer.large_learning_rate(), None);
        optimizer.learning_rate = 1e9;
        assert!(optimizer.large_learning_rate().unwrap().contains("`optimizer.learning_rate` is 1000000000"));
    }
}
