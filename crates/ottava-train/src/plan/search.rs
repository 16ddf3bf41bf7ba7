//! `parallel.auto`: searches the fastest division of a run among ranks, by dry runs and the cost model. A division is a size for each mesh axis and a
//! stage of ZeRO.

use super::changes::{gib, time_of};
use super::communication::CommunicationPlan;
use super::cost::{Links, PipelineCost, PredictedStep, predict};
use super::pipeline::PipelinePlan;
use super::resolve::ResolvedRun;
use ottava_common::error::{Error, Result};
use ottava_common::interrupt;
use ottava_models::{Decoder, DecoderConfig};
use ottava_parallel::Zero;
use ottava_recipe::param::STEP_RATES;
use ottava_recipe::recompute::Recompute;
use ottava_settings::{ParallelConfig, RunConfig};
use ottava_tensor::Device;
use ottava_tensor::comm::{GPUS_PER_NODE, MeshShape};
use serde::Serialize;

#[cfg(test)]
mod tests;

/// The number of divisions that are listed.
const LISTED: usize = 3;

/// A division of a run among ranks.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Serialize)]
pub struct Division {
    /// The sizes of the axes.
    pub shape: MeshShape,
    /// The stage of ZeRO.
    pub zero: Zero,
}

/// A division that fits into memory, with its predicted speed.
#[derive(Clone, Debug, Serialize)]
pub struct Candidate {
    /// The division.
    pub division: Division,
    /// The activations that backward recomputes.
    pub recompute: Recompute,
    /// The peak of memory of the rank that needs the most memory.
    pub peak_bytes: u64,
    /// The predicted step. Its tokens per second are the speed of one group of ranks that has the whole model.
    pub step: PredictedStep,
    /// The tokens per second of all ranks.
    pub tokens_per_second: f64,
}

/// A division that cannot be used, and the reason.
#[derive(Clone, Debug, Serialize)]
pub struct Dropped {
    /// The division.
    pub division: Division,
    /// The reason, as a sentence.
    pub why: String,
    /// The memory that the division needs, if there is not enough memory.
    pub needed_bytes: Option<u64>,
}

/// The result of a search.
#[derive(Clone, Debug, Serialize)]
pub struct ParallelSearch {
    /// The number of all ranks.
    pub ranks: usize,
    /// The fastest divisions, at most three, the fastest first.
    pub best: Vec<Candidate>,
    /// The number of divisions that fit and are slower.
    pub slower: usize,
    /// The divisions that cannot be used.
    pub dropped: Vec<Dropped>,
}

impl Division {
    /// Returns the settings of the division, in the syntax of `--set`.
    pub fn settings(&self) -> Vec<String> {
        let MeshShape { data, context, tensor, pipeline, expert } = self.shape;
        let sizes =
            [("data", data), ("tensor", tensor), ("pipeline", pipeline), ("context", context), ("expert", expert)];
        let of = |(key, size): (&str, usize)| (size > 1).then(|| format!("parallel.{key}={size}"));
        let zero = (self.zero > Zero::Nothing).then(|| format!("parallel.zero={}", u8::from(self.zero)));
        sizes.into_iter().filter_map(of).chain(zero).collect()
    }

    /// Returns `config` with this division in place of the search. Recomputation stays `auto` unless `config` sets it to recompute something.
    pub fn applied(&self, config: &RunConfig) -> RunConfig {
        let MeshShape { data, context, tensor, pipeline, expert } = self.shape;
        let mut config = config.clone();
        config.parallel =
            ParallelConfig { auto: false, data, context, tensor, pipeline, expert, zero: self.zero, ..config.parallel };
        config.memory.recompute = config.memory.recompute.filter(|recompute| *recompute != Recompute::None);
        config
    }
}

/// Returns all divisions among `ranks` ranks that could train a model with `experts` experts (1 if it has no experts). They have every possible size
/// of each axis, and each stage of ZeRO that makes a difference. Tensor parallelism stays within a node.
pub fn divisions(ranks: usize, experts: usize) -> Vec<Division> {
    let divisors = |n: usize| (1..=n).filter(move |divisor| n.is_multiple_of(*divisor));
    let mut all = Vec::new();
    for tensor in divisors(ranks).filter(|tensor| *tensor <= GPUS_PER_NODE) {
        for pipeline in divisors(ranks / tensor) {
            for context in divisors(ranks / tensor / pipeline) {
                let data = ranks / tensor / pipeline / context;
                // Without experts, the expert axis has size 1.
                let divides = |expert: &usize| match experts {
                    1 => *expert == 1,
                    _ => experts.is_multiple_of(expert * tensor),
                };
                for expert in divisors(data * context).filter(divides) {
                    let shape = MeshShape { data, context, tensor, pipeline, expert };
                    let stages = Zero::ALL.into_iter().filter(|&zero| match zero {
                        Zero::Nothing => true,
                        Zero::OptimizerStates => data * context > 1,
                        Zero::Gradients | Zero::Weights => data * context > 1 && pipeline == 1,
                    });
                    all.extend(stages.map(|zero| Division { shape, zero }));
                }
            }
        }
    }
    all
}

impl ParallelSearch {
    /// Searches the divisions of `config` among `ranks` ranks for a model of `sizes` on `device`, with a dry run of each division. Recomputation is
    /// `auto` unless the run sets it. If ZeRO stage 1 or higher fits without recomputation, higher stages are not tried.
    ///
    /// Errors with [`Error::Config`] if `training.global_batch_size` is not set, since the number of sequences of a step would depend on the
    /// division. Errors with [`Error::Cancelled`] after a request to stop.
    pub fn new(config: &RunConfig, sizes: &DecoderConfig, device: &Device, ranks: usize) -> Result<ParallelSearch> {
        if config.training.global_batch_size.is_none() {
            return Err(Error::Config(
                "`parallel.auto` is true, and the number of sequences of a step would depend on its choice; set \
                 `training.global_batch_size`"
                    .into(),
            ));
        }
        let recipe = config.recipe_on(device);
        let flops = Decoder::describe(sizes, &recipe)?.flops_per_token(config.data.max_length);
        let seconds_per_token = flops / STEP_RATES[usize::from(recipe.casts.is_none())];
        let experts = sizes.experts().map_or(1, |experts| experts.count);
        let (mut fitting, mut dropped) = (Vec::new(), Vec::new());
        // The mesh for which a stage of ZeRO fits without recomputation. Higher stages are skipped.
        let mut enough = None;
        for division in divisions(ranks, experts) {
            interrupt::check("searching a division")?;
            if enough == Some(division.shape) {
                continue;
            }
            match Candidate::new(division, config, sizes, device, seconds_per_token) {
                Ok(candidate) => {
                    let is_lean = division.zero > Zero::Nothing && candidate.recompute == Recompute::None;
                    enough = is_lean.then_some(division.shape).or(enough);
                    fitting.push(candidate);
                }
                Err(Unusable::Large { needed_bytes, why }) => {
                    dropped.push(Dropped { division, why, needed_bytes: Some(needed_bytes) })
                }
                Err(Unusable::Refused(error)) => {
                    dropped.push(Dropped { division, why: error.to_string(), needed_bytes: None })
                }
            }
        }
        fitting.sort_by(|a, b| b.tokens_per_second.total_cmp(&a.tokens_per_second));
        let slower = fitting.len().saturating_sub(LISTED);
        fitting.truncate(LISTED);
        Ok(ParallelSearch { ranks, best: fitting, slower, dropped })
    }

    /// Returns the fastest division.
    ///
    /// Errors with [`Error::Memory`] and the reasons if no division can be used.
    pub fn fastest(&self) -> Result<&Candidate> {
        let reasons = || {
            let mut reasons = format!("`parallel.auto`: no division among {} ranks can be used", self.ranks);
            for (why, divisions) in self.reasons() {
                reasons += &format!("\n  {}: {why}", divisions.join("; "));
            }
            Error::Memory(reasons)
        };
        self.best.first().ok_or_else(reasons)
    }

    /// Returns the reasons why divisions were dropped, each once. Each reason has the settings of its divisions, and the memory that they need.
    pub fn reasons(&self) -> Vec<(String, Vec<String>)> {
        let mut reasons: Vec<(String, Vec<String>)> = Vec::new();
        for Dropped { division, why, needed_bytes } in &self.dropped {
            let needed = needed_bytes.map_or(String::new(), |bytes| format!(" ({:.1} GiB)", gib(bytes)));
            let settings = division.settings().join(" ") + &needed;
            match reasons.iter_mut().find(|(known, _)| known == why) {
                Some((_, divisions)) => divisions.push(settings),
                None => reasons.push((why.clone(), vec![settings])),
            }
        }
        reasons
    }
}

/// The reason why a division cannot be used.
enum Unusable {
    /// The division needs too much memory.
    Large { needed_bytes: u64, why: String },
    /// The settings or the model do not allow the division.
    Refused(Error),
}

impl From<Error> for Unusable {
    fn from(error: Error) -> Unusable {
        Unusable::Refused(error)
    }
}

impl Candidate {
    /// Plans `run` with this division by a dry run.
    fn new(
        division: Division,
        run: &RunConfig,
        sizes: &DecoderConfig,
        device: &Device,
        seconds_per_token: f64,
    ) -> Result<Candidate, Unusable> {
        let mut config = division.applied(run);
        config.expect_no_more_problems_than(run)?;
        config.share(division.shape.ranks())?;
        let resolved = ResolvedRun::new(&config, sizes, device)?;
        let memory = &resolved.memory;
        if !memory.fits {
            let (recompute, available) = (resolved.config.recompute.as_str(), gib(memory.available_bytes));
            let why = format!("it does not fit with recompute = \"{recompute}\": {available:.1} GiB available");
            return Err(Unusable::Large { needed_bytes: memory.reserved_bytes, why });
        }
        let model = Decoder::describe(sizes, &config.recipe_on(device))?;
        let pipeline = PipelinePlan::new(&resolved.config, &model, memory)?;
        let pipeline = pipeline.map_or(PipelineCost::NONE, |plan| plan.cost());
        let communication = CommunicationPlan::new(&resolved.config, sizes, device)?;
        let sharing = (division.shape.data * division.shape.context) as f64;
        let recompute = resolved.config.recompute;
        let tokens = config.tokens_per_step() as f64 / sharing;
        let alone = seconds_per_token * tokens * time_of(recompute);
        let step = match &communication {
            Some(plan) => predict(plan, pipeline, plan.ranks, &Links::H200, Some(alone)).step,
            None => None,
        };
        let step = step.unwrap_or(PredictedStep::alone(alone, tokens));
        // The run fits, so the pool returns in time the memory above the memory of the GPU.
        let peak_bytes = memory.reserved_bytes.min(memory.available_bytes);
        let tokens_per_second = step.tokens_per_second * sharing;
        Ok(Candidate { division, recompute, peak_bytes, step, tokens_per_second })
    }
}
