//! The table `[reinforcement]`.

use crate::demands::{Problems, from_zero};
use ottava_common::error::{Error, Result};
use ottava_recipe::KvCacheDtype;
use ottava_rewards::{EnvironmentConfig, RewardSpec};
use ottava_tensor::ops::{KlEstimator as Estimator, PolicyBound, PolicyLoss, ValueLoss};
use schemars::JsonSchema;
use serde::{Deserialize, Serialize};
use std::net::SocketAddr;

/// The `[reinforcement]` table: the model draws completions of prompts, rewards score the completions, and steps make good ones more likely.
/// Keys have the names of TRL; sizes count completions, as in TRL.
#[derive(Clone, Debug, PartialEq, Serialize, Deserialize, JsonSchema)]
#[serde(deny_unknown_fields, default)]
pub struct ReinforcementConfig {
    /// Completions of each prompt, which are compared with each other: the group of GRPO.
    pub num_generations: usize,
    /// Prompts whose completions are drawn at once, by all ranks together; 0 draws the completions of one step. Steps divide these
    /// completions, so prompts_per_generation * num_generations is a multiple of the completions of a step.
    pub prompts_per_generation: usize,
    /// How often each completion is used for a step.
    pub num_iterations: usize,
    /// Tokens of a completion at most; with an environment, tokens of a turn at most, and a conversation ends at data.max_length. A prompt has at most
    /// data.max_length minus this number of tokens; longer prompts are left out.
    pub max_completion_length: usize,
    /// Whether completions that reach max_completion_length contribute nothing to the loss.
    pub mask_truncated_completions: bool,
    /// How completions are drawn.
    pub sampling: SamplingConfig,
    /// The advantage of a completion.
    pub advantage: AdvantageConfig,
    /// The loss of tokens.
    pub loss: PolicyConfig,
    /// Factors of the loss that correct for draws whose log-probabilities are not the ones that steps compute.
    pub correction: CorrectionConfig,
    /// A program that answers the turns of the model.
    pub environment: EnvironmentConfig,
    /// An address where clients draw completions and return them with their rewards.
    pub endpoint: EndpointConfig,
    /// What scores completions: a table `[[reinforcement.rewards]]` for each reward, with its type, its weight and its own keys
    /// (docs/rewards.md). Their weighted sum is the reward of a completion. A run with rewards is a run of reinforcement learning, whose data
    /// are prompts. For example:
    ///
    /// ```toml
    /// [[reinforcement.rewards]]
    /// type = "math"
    /// ```
    pub rewards: Vec<RewardSpec>,
}

/// The `[reinforcement.sampling]` table.
#[derive(Clone, Copy, Debug, PartialEq, Serialize, Deserialize, JsonSchema)]
#[serde(deny_unknown_fields, default)]
pub struct SamplingConfig {
    /// The temperature at which completions are drawn. Losses, ratios and entropy refer to the distribution at this temperature.
    pub temperature: f64,
    /// Whether prompts whose completions all have the same reward are replaced by further prompts, since nothing is learned from them (DAPO).
    pub dynamic_sampling: bool,
    /// How often the prompts of a generation are drawn at most, with dynamic_sampling.
    pub max_rounds: usize,
    /// Tokens of the KV cache while completions are drawn; 0 for as many as the completions need and memory has room for. Steps use the memory of the
    /// KV cache for activations. With fewer tokens, fewer completions are drawn at once.
    pub kv_cache_tokens: usize,
    /// The format of the KV cache while completions are drawn: "auto" for the compute type, "bfloat16", or "fp8". With "fp8", the KV cache takes half the
    /// memory, and log-probabilities of draws and of steps differ; `correction.mode` multiplies the loss of each token by its ratio.
    pub kv_cache_dtype: KvCacheDtype,
    /// The maximum age, in steps, of the weights that drew the first tokens of a completion, counted from the weights of its generation. With 0, the
    /// weights of a generation draw all its tokens. Otherwise, the engine starts completions of the next generation while it draws the last completions
    /// of a generation, and the next generation draws their remaining tokens. So the number is 0, or at least the number of steps of a generation.
    pub max_staleness: u64,
}

impl Default for SamplingConfig {
    fn default() -> SamplingConfig {
        SamplingConfig {
            temperature: 1.0,
            dynamic_sampling: false,
            max_rounds: 10,
            kv_cache_tokens: 0,
            kv_cache_dtype: KvCacheDtype::Auto,
            max_staleness: 0,
        }
    }
}

impl SamplingConfig {
    /// How often the prompts of a generation are drawn at most.
    pub fn rounds(&self) -> usize {
        if self.dynamic_sampling { self.max_rounds } else { 1 }
    }
}

/// The `[reinforcement.endpoint]` table: the run draws no completions for its steps. Between steps it serves its model, as `ottava serve` does, and waits until
/// clients have returned the completions of a generation (docs/environments.md).
#[derive(Clone, Debug, Default, PartialEq, Serialize, Deserialize, JsonSchema)]
#[serde(deny_unknown_fields, default)]
pub struct EndpointConfig {
    /// The address and the port, such as "127.0.0.1:8009"; port 0 takes a free port. "" serves nothing: the run draws its completions.
    pub address: String,
    /// How many steps older than the weights of today the weights may be that have drawn a completion. Older completions are refused.
    pub max_staleness: u64,
}

impl EndpointConfig {
    /// Whether clients draw the completions.
    pub fn is_on(&self) -> bool {
        !self.address.is_empty()
    }

    /// Returns the address. Errors with [`Error::Config`] if it is none.
    pub fn socket_address(&self) -> Result<SocketAddr> {
        self.address.parse().map_err(|_| {
            Error::Config(format!(
                "`reinforcement.endpoint.address` is {:?}; write an IP address and a port, such as \"127.0.0.1:8009\"",
                self.address
            ))
        })
    }
}

/// The `[reinforcement.advantage]` table.
#[derive(Clone, Copy, Debug, PartialEq, Serialize, Deserialize, JsonSchema)]
#[serde(deny_unknown_fields, default)]
pub struct AdvantageConfig {
    /// What a reward is compared with: "grpo" (the mean of its group), "rloo" (the mean of the others of its group),
    /// "reinforce_plus_plus" (the mean over all tokens of a generation) or "gae" (the values of tokens that a value head estimates: PPO).
    pub estimator: AdvantageEstimator,
    /// The standard deviation by which "grpo" and "rloo" divide: "group", "batch" (all completions of a generation) or "none" (as in
    /// Dr. GRPO).
    pub scale_rewards: ScaleRewards,
    /// The discount of a reward per token with "gae", above 0 and at most 1.
    pub gamma: f64,
    /// The decay of errors of values per token with "gae", from 0 (an advantage compares with the value of the next token) to 1 (with the reward itself).
    /// At 1, advantages have no bias while the value head has learned little. NeMo-RL uses 0.95.
    pub lambda: f64,
}

impl Default for AdvantageConfig {
    fn default() -> AdvantageConfig {
        AdvantageConfig {
            estimator: AdvantageEstimator::Grpo,
            scale_rewards: ScaleRewards::Group,
            gamma: 1.0,
            lambda: 1.0,
        }
    }
}

/// What a reward is compared with.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq, Serialize, Deserialize, JsonSchema)]
#[serde(rename_all = "snake_case")]
pub enum AdvantageEstimator {
    /// The mean of its group.
    #[default]
    Grpo,
    /// The mean of the others of its group.
    Rloo,
    /// The mean over all tokens of a generation, by whose standard deviation it is divided.
    ReinforcePlusPlus,
    /// The values of tokens that a value head estimates.
    Gae,
}

/// The standard deviation by which advantages are divided.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq, Serialize, Deserialize, JsonSchema)]
#[serde(rename_all = "snake_case")]
pub enum ScaleRewards {
    /// Of the rewards of the group.
    #[default]
    Group,
    /// Of all rewards of a generation.
    Batch,
    /// 1.
    None,
}

/// The `[reinforcement.correction]` table. A ratio is the probability of a token, or of a completion, by the model as steps compute it, divided by
/// its probability when it was drawn. If each completion is in one step only, the step computes the first of these probabilities itself. Otherwise, it
/// takes a pass over all completions of a generation.
#[derive(Clone, Copy, Debug, PartialEq, Serialize, Deserialize, JsonSchema)]
#[serde(deny_unknown_fields, default)]
pub struct CorrectionConfig {
    /// How the loss of a token is corrected: "none" (old probabilities are the probabilities of the draws), "token_truncate" (times the ratio of
    /// the token, at most max), "token_mask" (times the ratio, and 0 if the ratio is below min or above max), "sequence_truncate" or
    /// "sequence_mask" (the same with the ratio of the completion). "auto" is "token_truncate" where draws and steps differ: with an FP8 recipe, with a
    /// KV cache in FP8, and with sampling.max_staleness or endpoint.max_staleness above 0; otherwise "none".
    pub mode: CorrectionMode,
    /// The smallest ratio that a mask keeps.
    pub min: f64,
    /// The largest ratio.
    pub max: f64,
}

/// How losses are corrected for draws.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq, Serialize, Deserialize, JsonSchema)]
#[serde(rename_all = "snake_case")]
pub enum CorrectionMode {
    /// By the bounded ratio of the token, if draws and steps differ.
    #[default]
    Auto,
    /// Not at all.
    None,
    /// By the bounded ratio of the token.
    TokenTruncate,
    /// By the ratio of the token within bounds.
    TokenMask,
    /// By the bounded ratio of the completion.
    SequenceTruncate,
    /// By the ratio of the completion within bounds.
    SequenceMask,
}

impl Default for CorrectionConfig {
    fn default() -> CorrectionConfig {
        CorrectionConfig { mode: CorrectionMode::Auto, min: 0.0, max: 3.0 }
    }
}

/// The `[reinforcement.loss]` table.
#[derive(Clone, Copy, Debug, PartialEq, Serialize, Deserialize, JsonSchema)]
#[serde(deny_unknown_fields, default)]
pub struct PolicyConfig {
    /// The loss: "dapo" (clipped ratios of tokens, mean over all tokens of a step), "grpo" (mean over completions of the means over their
    /// tokens), "dr_grpo" (sum over tokens divided by max_completion_length, mean over completions), "gspo" (clipped ratios of completions,
    /// mean over completions), "cispo" (clipped weights, mean over tokens) or "reinforce" (no ratio, mean over tokens).
    pub loss_type: PolicyLossType,
    /// How far below 1 the ratio of new and old probability is followed.
    pub epsilon: f64,
    /// How far above 1 the ratio is followed; 0 is epsilon. DAPO uses 0.28, GSPO 4e-4 (with epsilon = 3e-4), CISPO 4 (with epsilon = 1).
    pub epsilon_high: f64,
    /// The bound of the ratio of completions with a negative advantage, above 1 + epsilon; 0 for no bound. verl uses 3.
    pub delta: f64,
    /// The factor of the divergence from the reference model; 0 for none. With LoRA, the reference model is the model without its adapters, otherwise
    /// the model of model.path, which then stays in memory.
    pub beta: f64,
    /// The estimator of the divergence: "weighted_k3" (unbiased gradient), "k1", "k2" or "k3" (biased, as in GRPO's paper).
    pub kl_estimator: KlEstimator,
    /// The factor of the entropy of each token's distribution, which is subtracted from the loss of the token, so that draws stay different; 0 for
    /// none. verl names it entropy_coeff.
    pub entropy_coef: f64,
    /// The factor of the loss of values, with advantage.estimator = "gae".
    pub vf_coef: f64,
    /// How far the value of a token may move from its value at the draw and still reduce the loss of values; 0 for no bound.
    pub cliprange_value: f64,
}

/// The loss of a policy.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq, Serialize, Deserialize, JsonSchema)]
#[serde(rename_all = "snake_case")]
pub enum PolicyLossType {
    /// Yu et al. 2025, arXiv:2503.14476.
    #[default]
    Dapo,
    /// Shao et al. 2024, arXiv:2402.03300.
    Grpo,
    /// Liu et al. 2025, arXiv:2503.20783.
    DrGrpo,
    /// Zheng et al. 2025, arXiv:2507.18071.
    Gspo,
    /// MiniMax 2025, arXiv:2506.13585.
    Cispo,
    /// Williams 1992.
    Reinforce,
}

/// An estimator of the divergence from the reference model.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq, Serialize, Deserialize, JsonSchema)]
#[serde(rename_all = "snake_case")]
pub enum KlEstimator {
    /// The ratio times k3.
    #[default]
    WeightedK3,
    /// The ratio times the difference of log-probabilities.
    K1,
    /// Half the square of the difference of log-probabilities.
    K2,
    /// Schulman's third estimator.
    K3,
}

/// How the losses of tokens become the loss of a step.
#[derive(Clone, Copy, Debug, PartialEq)]
pub enum Aggregation {
    /// The mean over all tokens.
    Tokens,
    /// The mean over sequences of the mean over their tokens.
    Sequences,
    /// The mean over sequences of the sum over their tokens, divided by this number.
    Constant(f64),
}

impl Aggregation {
    /// The weight of a token of a sequence of `tokens` tokens.
    pub fn weight(self, tokens: usize) -> f64 {
        match self {
            Aggregation::Tokens => 1.0,
            Aggregation::Sequences => 1.0 / tokens.max(1) as f64,
            Aggregation::Constant(length) => 1.0 / length,
        }
    }
}

impl Default for ReinforcementConfig {
    fn default() -> ReinforcementConfig {
        ReinforcementConfig {
            num_generations: 8,
            prompts_per_generation: 0,
            num_iterations: 1,
            max_completion_length: 512,
            mask_truncated_completions: false,
            sampling: SamplingConfig::default(),
            advantage: AdvantageConfig::default(),
            loss: PolicyConfig::default(),
            correction: CorrectionConfig::default(),
            environment: EnvironmentConfig::default(),
            endpoint: EndpointConfig::default(),
            rewards: Vec::new(),
        }
    }
}

impl Default for PolicyConfig {
    fn default() -> PolicyConfig {
        PolicyConfig {
            loss_type: PolicyLossType::Dapo,
            epsilon: 0.2,
            epsilon_high: 0.0,
            delta: 0.0,
            beta: 0.0,
            kl_estimator: KlEstimator::WeightedK3,
            entropy_coef: 0.0,
            vf_coef: 0.1,
            cliprange_value: 0.5,
        }
    }
}

impl ReinforcementConfig {
    /// Whether the run is one of reinforcement learning.
    pub fn is_on(&self) -> bool {
        !self.rewards.is_empty()
    }

    /// Returns the number of prompts of a generation, if a step has `of_step` completions of all ranks.
    pub fn prompts(&self, of_step: usize) -> usize {
        match self.prompts_per_generation {
            0 => of_step / self.num_generations.max(1),
            prompts => prompts,
        }
    }

    /// The loss of a token, without a correction in the step.
    pub fn policy_loss(&self) -> PolicyLoss {
        let PolicyConfig { loss_type, epsilon: low, epsilon_high, delta, beta, kl_estimator, .. } = self.loss;
        let high = if epsilon_high > 0.0 { epsilon_high } else { low };
        let most = if delta > 0.0 { delta } else { f64::INFINITY };
        let bound = match loss_type {
            PolicyLossType::Cispo => PolicyBound::Weight { low, high },
            PolicyLossType::Reinforce => PolicyBound::None,
            _ => PolicyBound::Clip { low, high, most },
        };
        let kl = match kl_estimator {
            KlEstimator::WeightedK3 => Estimator::WeightedK3,
            KlEstimator::K1 => Estimator::K1,
            KlEstimator::K2 => Estimator::K2,
            KlEstimator::K3 => Estimator::K3,
        };
        PolicyLoss { bound, of_sequence: loss_type == PolicyLossType::Gspo, beta, kl, correction: None }
    }

    /// The loss of values, if a value head estimates the values of tokens.
    pub fn value_loss(&self) -> Option<ValueLoss> {
        let PolicyConfig { vf_coef, cliprange_value, .. } = self.loss;
        let range = if cliprange_value > 0.0 { cliprange_value } else { f64::INFINITY };
        (self.advantage.estimator == AdvantageEstimator::Gae).then_some(ValueLoss { coefficient: vf_coef, range })
    }

    /// How losses of tokens become the loss of a step.
    pub fn aggregation(&self) -> Aggregation {
        match self.loss.loss_type {
            PolicyLossType::Grpo | PolicyLossType::Gspo => Aggregation::Sequences,
            PolicyLossType::DrGrpo => Aggregation::Constant(self.max_completion_length as f64),
            PolicyLossType::Dapo | PolicyLossType::Cispo | PolicyLossType::Reinforce => Aggregation::Tokens,
        }
    }
}

/// Problems of `[reinforcement]` in a run with rows of `max_length` tokens.
pub(crate) fn problems(config: &ReinforcementConfig, max_length: usize) -> Vec<String> {
    if !config.is_on() {
        return Vec::new();
    }
    let mut problems = Problems::default();
    let PolicyConfig { epsilon, epsilon_high, delta, beta, entropy_coef, loss_type, vf_coef, cliprange_value, .. } =
        config.loss;
    problems.demand(
        config.num_generations > 0,
        "`reinforcement.num_generations` is 0; a prompt has at least one completion",
    );
    problems
        .demand(config.num_iterations > 0, "`reinforcement.num_iterations` is 0; a completion is used at least once");
    problems.demand(
        config.sampling.max_rounds > 0,
        "`reinforcement.sampling.max_rounds` is 0; prompts are drawn at least once",
    );
    problems.demand(
        (1..max_length).contains(&config.max_completion_length),
        "`reinforcement.max_completion_length` must be at least 1 and below `data.max_length`, which has the tokens of prompt and completion",
    );
    problems.demand(
        config.sampling.kv_cache_tokens == 0 || config.sampling.kv_cache_tokens >= max_length,
        "`reinforcement.sampling.kv_cache_tokens` is below `data.max_length`, so no completion of this length has room in the KV cache",
    );
    problems.demand(
        config.sampling.temperature.is_finite() && config.sampling.temperature > 0.0,
        "`reinforcement.sampling.temperature` must be above 0: the most likely completion of a prompt is always the same",
    );
    let AdvantageConfig { estimator, gamma, lambda, .. } = config.advantage;
    let compares = matches!(estimator, AdvantageEstimator::Grpo | AdvantageEstimator::Rloo);
    problems.demand(
        config.num_generations > 1 || !compares,
        "`reinforcement.num_generations` is 1, and the estimators grpo and rloo compare completions of one prompt; raise it, or set `reinforcement.advantage.estimator` to \"reinforce_plus_plus\" or \"gae\"",
    );
    problems.demand(
        gamma > 0.0 && gamma <= 1.0 && (0.0..=1.0).contains(&lambda),
        "`reinforcement.advantage.gamma` must be above 0 and at most 1, and `reinforcement.advantage.lambda` from 0 to 1",
    );
    problems.demand(
        estimator != AdvantageEstimator::Gae || loss_type != PolicyLossType::Gspo,
        "`reinforcement.advantage.estimator` is \"gae\", which gives each token an advantage of its own, and `reinforcement.loss.loss_type` is \"gspo\", whose ratio is the completion's; set one of them to another value",
    );
    problems.demand(
        vf_coef.is_finite() && vf_coef > 0.0,
        "`reinforcement.loss.vf_coef` must be above 0: a value head that is not trained estimates 0 for each token",
    );
    let numbers = [("epsilon", epsilon), ("epsilon_high", epsilon_high), ("delta", delta), ("beta", beta)];
    for (key, value) in
        numbers.into_iter().chain([("entropy_coef", entropy_coef), ("cliprange_value", cliprange_value)])
    {
        problems.demand(from_zero(value), format!("`reinforcement.loss.{key}` must not be negative or infinite"));
    }
    let CorrectionConfig { min, max, .. } = config.correction;
    problems.demand(
        from_zero(min) && max.is_finite() && max >= 1.0 && min <= 1.0,
        "`reinforcement.correction.min` must be from 0 to 1, and `reinforcement.correction.max` at least 1: equal probabilities have the ratio 1",
    );
    problems.demand(
        epsilon > 0.0 || loss_type == PolicyLossType::Reinforce,
        "`reinforcement.loss.epsilon` is 0, with which no ratio is followed; set it to 0.2, for example",
    );
    problems.demand(
        delta == 0.0 || delta > 1.0 + epsilon,
        "`reinforcement.loss.delta` must be above 1 + `reinforcement.loss.epsilon`, or 0",
    );
    problems.0
}
