//! The rows of a run of reinforcement learning: completions that the model draws between steps.

use super::clients::{Clients, Wanted};
use super::completion::{Completion, Generation, metrics, metrics_of_turns};
use super::credit::scored;
use super::generator::{Generator, Seeded, Work};
use super::held_out::held_out_metrics;
use super::loss::{OtherModels, PolicyMicroBatch, Scored};
use super::packing::{PackedBatch, Place, SampleRows};
use super::policy::Policy;
use super::sample::{Drawn, Sample, seed_of};
use crate::objective::{Evaluation, LoadedRows, Opening, Rows, Validation};
use crate::step::host::values;
use crate::step::{Metrics, MicroBatch, TrainStep, token_losses, token_values};
use ottava_common::error::{Error, Result};
use ottava_common::hash::sha256_of;
use ottava_data::{DataState, Prompt, PromptLoader, PromptSet, RowShare};
use ottava_models::Decoder;
use ottava_parallel::Partition;
use ottava_recipe::layer_ranks::ShardPlace;
use ottava_recipe::mode::{Pass, StepPrecision};
use ottava_settings::{EvaluationConfig, ReinforcementConfig};
use ottava_tensor::Tensor;
use ottava_tensor::comm::Axis;
use serde::de::DeserializeOwned;
use serde::{Deserialize, Serialize};
use serde_json::Value;
use std::collections::{BTreeMap, VecDeque};

/// Completions of prompts, their rewards and advantages.
pub(super) struct RolloutRows {
    config: ReinforcementConfig,
    seed: u64,
    sizes: Sizes,
    /// The share of the rows of steps.
    share: RowShare,
    /// The share of the prompts, whose completions this rank draws: alone, or together with other ranks.
    draws: RowShare,
    prompts: PromptLoader,
    generator: Generator,
    unfinished: Unfinished,
    step: u64,
    /// The last generation, until a step reports it.
    report: Report,
    /// Completions of a generation for a reader.
    shown: usize,
    evaluation: EvaluationConfig,
    /// Whether the reference model is another model than the trained model without its adapters.
    has_reference_policy: bool,
    /// Whether a pass over completions computes the log-probabilities of the draw's policy.
    corrects_by_pass: bool,
}

/// The sizes of steps and generations.
#[derive(Clone, Copy)]
struct Sizes {
    rows: SampleRows,
    /// Completions of a step, of all ranks.
    of_step: usize,
    /// Prompts of a generation, of all ranks.
    of_generation: usize,
}

/// Completions for later steps.
#[derive(Default, Serialize, Deserialize)]
struct Unfinished {
    /// The completions of the steps to come, of all ranks.
    waiting: VecDeque<Vec<Scored>>,
    /// What is drawn of the completions of the next generation, of all ranks, in the order of their prompts.
    begun: Vec<Drawn>,
}

/// What a generation says of itself.
#[derive(Default)]
struct Report {
    metrics: Metrics,
    /// Completions for a reader.
    examples: Vec<Value>,
}

/// In place of the place in the data, for draws of an evaluation, which have the same seeds each time.
const EVALUATION: u64 = 0x6576_616c;

impl RolloutRows {
    /// Opens the data, starts what scores completions, and goes on where the last checkpoint was saved.
    ///
    /// Errors as [`Objective::open`](crate::objective::Objective::open), and with [`Error::Config`] when a reward cannot be made, or ranks and steps do not divide a generation.
    pub(super) fn open(opening: &Opening) -> Result<RolloutRows> {
        let Opening { config: run, data, state, share, ranks, step, unfinished, .. } = *opening;
        let ShardPlace { rank, ranks: world } = ranks.place_of_draws();
        let draws = RowShare { rank, world };
        let config = run.reinforcement.clone();
        let sets = run.prompt_sets(data)?;
        for sentence in sets.iter().filter_map(PromptSet::describe_left_out).filter(|_| share.rank == 0) {
            tracing::warn!("{sentence}");
        }
        let unfinished = match unfinished {
            Some(unfinished) => serde_json::from_value(unfinished.clone()).map_err(|error| {
                Error::Checkpoint(format!("the completions that the checkpoint holds cannot be read: {error}"))
            })?,
            None => Unfinished::default(),
        };
        let of_step = run.micro_batch_rows() * run.training.gradient_accumulation_steps * share.world;
        let of_generation = config.prompts(of_step);
        let completions = of_generation * config.num_generations;
        if completions == 0 || !completions.is_multiple_of(of_step) || !of_generation.is_multiple_of(draws.world) {
            return Err(Error::Config(format!(
                "a generation has {completions} completions of {of_generation} prompts, a step {of_step} completions, and {} ranks divide the prompts; \
                 change `reinforcement.prompts_per_generation` so that steps and ranks divide a generation evenly",
                draws.world
            )));
        }
        let (steps, most) = ((completions * config.num_iterations / of_step) as u64, config.sampling.max_staleness);
        if most > 0 && most < steps {
            return Err(Error::Config(format!(
                "`reinforcement.sampling.max_staleness` is {most}, and a completion that is begun ends after the {steps} steps of a generation; set it to 0 \
                 or to at least {steps}"
            )));
        }
        if config.endpoint.is_on() && ranks.size() > 1 {
            return Err(Error::Config(format!(
                "`reinforcement.endpoint.address` is set, and the run has {} ranks; clients return completions to a run of one rank: start one rank, or \
                 remove the endpoint",
                ranks.size()
            )));
        }
        let generator = Generator::new(run, of_generation / draws.world * config.num_generations, ranks)?;
        let rows = SampleRows { rows: run.micro_batch_rows(), max_length: run.data.max_length, end: generator.end() };
        Ok(RolloutRows {
            seed: run.seed,
            sizes: Sizes { rows, of_step, of_generation },
            share,
            draws,
            prompts: PromptLoader::new(sets, state, draws)?,
            generator,
            unfinished,
            step,
            report: Report::default(),
            shown: run.logging.completions,
            evaluation: run.evaluation.clone(),
            has_reference_policy: run.has_reference_policy(),
            corrects_by_pass: Policy::of(run).correction_by_pass.is_some(),
            config,
        })
    }

    /// Draws and scores completions for the next steps, together with all ranks. With dynamic sampling, groups whose rewards are all equal are replaced by
    /// groups of the next prompts.
    ///
    /// Errors with [`Error::Data`] if too few groups have rewards that differ.
    fn generate(
        &mut self,
        model: &mut Decoder,
        others: &OtherModels,
        partition: &Partition,
        precision: StepPrecision,
    ) -> Result<()> {
        let place = self.place();
        // A stop while completions are drawn saves what the generation before has begun.
        let mut begun = self.unfinished.begun.clone();
        let (mut drawn, mut kept, mut names, mut returned) = (Vec::new(), Vec::new(), Vec::new(), BTreeMap::new());
        for _ in 0..self.config.sampling.rounds() {
            let groups;
            let of_round;
            Groups { groups, rewards: names, metrics: of_round } =
                match self.collect_groups(model, partition, precision)? {
                    Some(groups) => groups,
                    None => self.draw_groups(model, others, partition, precision, &mut begun)?,
                };
            for (name, value) in of_round {
                // Seconds are sums over rounds, and other numbers are numbers of the last round.
                let before = returned.get(&name).filter(|_| name.starts_with("timing_s/")).copied().unwrap_or(0.0);
                returned.insert(name, before + value);
            }
            let teaches =
                |group: &&Vec<Completion>| !self.config.sampling.dynamic_sampling || has_different_rewards(group);
            kept.extend(groups.iter().filter(teaches).cloned());
            drawn.extend(groups);
            if kept.len() >= self.sizes.of_generation {
                break;
            }
        }
        if kept.len() < self.sizes.of_generation {
            return Err(Error::Data(format!(
                "of {} groups of completions, {} have rewards that differ, and the steps of a generation need {}: the prompts are too easy or too hard; \
                 change them, or raise `reinforcement.sampling.max_rounds`, or set `reinforcement.sampling.dynamic_sampling = false`",
                drawn.len(),
                kept.len(),
                self.sizes.of_generation
            )));
        }
        kept.truncate(self.sizes.of_generation);
        self.report.metrics = metrics(&drawn, &names).and(self.turns_of(&drawn));
        self.report.metrics.named.extend(returned.into_iter().map(|(name, value)| (name.into(), value)));
        if self.config.sampling.max_staleness > 0 {
            let stale: usize = self.unfinished.begun.iter().map(|begun| begun.tokens.len()).sum();
            let all: usize = drawn.iter().flatten().map(|completion| completion.sample.predictions().count()).sum();
            self.report.metrics.named.push(("sampling/stale_token_ratio".into(), stale as f64 / all.max(1) as f64));
        }
        self.unfinished = Unfinished { waiting: self.steps_of(&kept, place), begun };
        Ok(())
    }

    /// The metrics of turns, if there is an environment.
    fn turns_of(&self, groups: &[Vec<Completion>]) -> Metrics {
        match self.config.environment.is_on() {
            true => metrics_of_turns(groups.iter().flatten()),
            false => Metrics::default(),
        }
    }

    /// A hash of the place in the data, so that the draws after it differ from the draws after any other place.
    fn place(&self) -> u64 {
        let place = serde_json::to_vec(&self.prompts.state()).expect("a place is written without fail");
        u64::from_le_bytes(sha256_of(&[&place])[..8].try_into().expect("eight bytes"))
    }

    /// The groups of completions that clients have drawn, if clients draw. The position in the data moves on as if the run had drawn them, after the
    /// completions have arrived.
    fn collect_groups(
        &mut self,
        model: &mut Decoder,
        partition: &Partition,
        precision: StepPrecision,
    ) -> Result<Option<Groups>> {
        let (groups, of_group) = (self.sizes.of_generation, self.config.num_generations);
        let wanted = Wanted { step: self.step, groups, of_group };
        let Some(groups) = self.generator.collect(model, partition, wanted)? else { return Ok(None) };
        self.prompts.next(self.sizes.of_generation)?;
        let mut all: Vec<Completion> = groups.into_iter().flatten().collect();
        self.run_passes(&mut all, model, partition, precision)?;
        let groups = all.chunks(of_group).map(<[_]>::to_vec).collect();
        Ok(Some(Groups { groups, rewards: Vec::new(), metrics: Vec::new() }))
    }

    /// Draws and scores the completions of the next prompts, as many as a generation has. Each rank draws the completions of its share of the prompts,
    /// alone or together with the ranks that divide its model.
    /// `begun` has the tokens that are known of the completions, and receives the tokens of the completions that were begun.
    fn draw_groups(
        &mut self,
        model: &mut Decoder,
        others: &OtherModels,
        partition: &Partition,
        precision: StepPrecision,
        begun: &mut Vec<Drawn>,
    ) -> Result<Groups> {
        let (RowShare { rank, world }, ranks) = (self.draws, partition.ranks());
        let (group, of_rank) = (self.config.num_generations, self.sizes.of_generation / world);
        let place = self.place();
        let prompts = self.prompts.next(of_rank)?;
        let prompts = self.seeded(prompts, place);
        let ahead = match self.config.sampling.max_staleness {
            0 => Vec::new(),
            _ => self.prompts.peek(of_rank)?,
        };
        let ahead = self.seeded(ahead, self.place());
        let number = |at: usize| (at / group * world + rank) * group + at % group;
        let known: Vec<Drawn> =
            (0..of_rank * group).map(|at| begun.get(number(at)).cloned().unwrap_or_default()).collect();
        let work = Work { prompts: &prompts, begun: &known, ahead: &ahead, step: self.step, is_greedy: false };
        let drawn = self.generator.generate(model, partition, &others.rewards, &work);
        let drawn = ranks.together("drawing completions", drawn)?;
        if ranks.leads() && self.report.examples.is_empty() {
            self.report.examples = drawn.examples(self.shown, |tokens| self.generator.text(tokens))?;
        }
        let Generation { completions: mut mine, rewards, metrics, begun: mut ahead_of_mine, .. } = drawn;
        self.run_passes(&mut mine, model, partition, precision)?;
        ahead_of_mine.resize(if ahead.is_empty() { 0 } else { of_rank * group }, Drawn::default());
        let of_ranks = of_all_ranks(partition, "completions that were begun", &ahead_of_mine)?;
        *begun = in_order(&of_ranks, of_ranks.iter().map(Vec::len).sum::<usize>() / group, group).concat();
        let all = of_all_ranks(partition, "completions", &mine)?;
        let groups = in_order(&all, self.sizes.of_generation, group);
        let metrics = means(&of_all_ranks(partition, "metrics of rewards", &metrics)?);
        Ok(Groups { groups, rewards, metrics })
    }

    /// Gives each completion of `prompts` of this rank its seed, at this `place` in the data.
    fn seeded(&self, prompts: Vec<Prompt>, place: u64) -> Vec<Seeded> {
        let RowShare { rank, world } = self.draws;
        let seeds = |at: usize| -> Vec<u64> {
            let number = (at * world + rank) as u64;
            (0..self.config.num_generations as u64).map(|index| seed_of([self.seed, place, number, index])).collect()
        };
        prompts.into_iter().enumerate().map(|(at, prompt)| (prompt, seeds(at))).collect()
    }

    /// `count` completions of each prompt that is held out, by prompt; and the names of their scores. Each rank draws the completions of its share of
    /// the prompts.
    fn held_out(
        &self,
        model: &mut Decoder,
        step: &TrainStep,
        count: usize,
        is_greedy: bool,
    ) -> Result<(Vec<Vec<Completion>>, Vec<String>)> {
        let (RowShare { rank, world }, partition) = (self.draws, step.partition());
        let (ranks, others) = (partition.ranks(), step.first_loss::<PolicyMicroBatch>().others());
        let prompts = self.prompts.validation_len();
        let seeds = |at: usize| -> Vec<u64> {
            (0..count as u64).map(|index| seed_of([self.seed, EVALUATION, at as u64, index])).collect()
        };
        let mine = (rank..prompts).step_by(world).map(|at| Ok((self.prompts.validation(at)?, seeds(at))));
        // All ranks draw, or none: they gather weights together.
        let mine = ranks.together("reading held-out prompts", mine.collect::<Result<Vec<_>>>())?;
        let work = Work { prompts: &mine, begun: &[], ahead: &[], step: self.step, is_greedy };
        let drawn = self.generator.generate(model, partition, &others.rewards, &work);
        let Generation { completions, rewards, .. } = ranks.together("evaluating completions", drawn)?;
        let all = of_all_ranks(partition, "completions of the evaluation", &completions)?;
        Ok((in_order(&all, prompts, count), rewards))
    }

    /// Runs the passes over `completions` that steps need, by the weights that drew them.
    fn run_passes(
        &self,
        completions: &mut [Completion],
        model: &mut Decoder,
        partition: &Partition,
        precision: StepPrecision,
    ) -> Result<()> {
        if self.corrects_by_pass {
            let losses = |model: &mut Decoder, micro_batch| {
                Ok(token_losses(model, &[micro_batch], Pass::Evaluation, precision, partition)?.remove(0))
            };
            let set = |completion: &mut Completion, losses: Vec<f64>| {
                completion.old = Some(losses.into_iter().map(|loss| -loss as f32).collect());
            };
            self.pass(completions, model, partition, losses, set)?;
        }
        if self.config.value_loss().is_some() {
            let estimated = |model: &mut Decoder, micro_batch| token_values(model, &micro_batch, precision, partition);
            let set = |completion: &mut Completion, values: Vec<f64>| {
                completion.values = Some(values.into_iter().map(|value| value as f32).collect());
            };
            self.pass(completions, model, partition, estimated, set)?;
        }
        Ok(())
    }

    /// Computes a number of each token by passes over micro-batches of `completions`, together with all ranks, and gives each completion the numbers of
    /// its drawn tokens.
    fn pass(
        &self,
        completions: &mut [Completion],
        model: &mut Decoder,
        partition: &Partition,
        compute: impl Fn(&mut Decoder, MicroBatch) -> Result<Tensor>,
        set: impl Fn(&mut Completion, Vec<f64>),
    ) -> Result<()> {
        let ranks = partition.ranks();
        let (rows, place) = (self.sizes.rows, ranks.place(Axis::Context));
        let samples: Vec<&Sample> = completions.iter().map(|completion| &completion.sample).collect();
        let mut packed = rows.pack(&samples, RowShare::ALL);
        // Ranks may gather weights in a pass, so each rank runs as many passes as any other.
        let counts = ranks.gather("micro-batches of completions", [packed.len() as f64])?;
        let passes = counts.iter().map(|[count]| *count as usize).max().unwrap_or(0);
        packed.resize_with(passes, || rows.empty());
        for PackedBatch { batch, places } in packed {
            let all = values(&compute(model, MicroBatch::new(&batch, model.device(), place)?)?)?;
            for Place { sample, start } in places {
                let completion = &mut completions[sample];
                let drawn = completion.sample.predictions().map(|at| all[start + at]).collect();
                set(completion, drawn);
            }
        }
        Ok(())
    }

    /// The completions of each step of a generation, of all ranks: all of them in another order in each iteration.
    fn steps_of(&self, groups: &[Vec<Completion>], place: u64) -> VecDeque<Vec<Scored>> {
        let (scored, each) = (scored(&self.config, groups), self.sizes.of_step);
        let mut steps = VecDeque::new();
        for iteration in 0..self.config.num_iterations as u64 {
            let mut order: Vec<usize> = (0..scored.len()).collect();
            order.sort_by_key(|&at| (seed_of([self.seed, place, u64::MAX - iteration, at as u64]), at));
            steps.extend(order.chunks(each).map(|step| step.iter().map(|&at| scored[at].clone()).collect::<Vec<_>>()));
        }
        steps
    }
}

/// Completions of all ranks.
struct Groups {
    /// The completions of each prompt.
    groups: Vec<Vec<Completion>>,
    /// The names of the rewards.
    rewards: Vec<String>,
    /// The numbers that rewards returned beside scores, by name.
    metrics: Vec<(String, f64)>,
}

/// Gathers `mine` from each rank. Of ranks that draw together, the first rank gives it.
fn of_all_ranks<T: Serialize + DeserializeOwned>(partition: &Partition, what: &str, mine: &T) -> Result<Vec<T>> {
    let ranks = partition.ranks();
    let told = match ranks.leads_draws() {
        true => serde_json::to_vec(mine).expect("plain data are written without fail"),
        false => Vec::new(),
    };
    let read = |of_rank: Vec<u8>| serde_json::from_slice(&of_rank).expect("as it was written");
    Ok(ranks.of_draws(ranks.gather_bytes(what, &told)?).into_iter().map(read).collect())
}

/// Returns the items of all shares of the prompts, by prompt: share r has prompts r, r + world and so on, with `group` items each.
fn in_order<T: Clone>(of_ranks: &[Vec<T>], prompts: usize, group: usize) -> Vec<Vec<T>> {
    let world = of_ranks.len();
    (0..prompts).map(|at| of_ranks[at % world][at / world * group..][..group].to_vec()).collect()
}

/// Returns the mean of each metric over the ranks that have it.
fn means(of_ranks: &[BTreeMap<String, f64>]) -> Vec<(String, f64)> {
    let mut all: BTreeMap<&String, Vec<f64>> = BTreeMap::new();
    of_ranks.iter().flatten().for_each(|(name, value)| all.entry(name).or_default().push(*value));
    let mean = |values: Vec<f64>| values.iter().sum::<f64>() / values.len() as f64;
    all.into_iter().map(|(name, values)| (name.clone(), mean(values))).collect()
}

/// Whether some completions of a group have another reward than others.
fn has_different_rewards(group: &[Completion]) -> bool {
    let mut rewards = group.iter().filter_map(|completion| completion.reward);
    let first = rewards.next();
    rewards.any(|reward| Some(reward) != first)
}

impl Rows for RolloutRows {
    fn examples(&self) -> f64 {
        let prompts: usize = self.prompts.sets().iter().map(PromptSet::train_len).sum();
        (prompts * self.config.num_generations * self.config.num_iterations) as f64
    }

    fn state(&self) -> DataState {
        self.prompts.state()
    }

    fn unfinished(&self) -> Option<Value> {
        let Unfinished { waiting, begun } = &self.unfinished;
        let is_there = !waiting.is_empty() || !begun.is_empty();
        is_there.then(|| serde_json::to_value(&self.unfinished).expect("completions are written without fail"))
    }

    fn forget_unfinished(&mut self) {
        self.unfinished = Unfinished::default();
    }

    fn connect(&mut self, clients: Box<dyn Clients>) {
        self.generator.connect(clients);
    }

    fn load(&mut self, model: &mut Decoder, step: &mut TrainStep, precision: StepPrecision) -> Result<LoadedRows> {
        if self.unfinished.waiting.is_empty() {
            let others = step.first_loss::<PolicyMicroBatch>().others();
            // Draws have the precision of the step that learns from them first.
            model.scaling().set_all_high_precision(precision == StepPrecision::High);
            let generated = self.generate(model, others, step.partition(), precision);
            model.scaling().set_all_high_precision(false);
            generated?;
        }
        let all = self.unfinished.waiting.pop_front().expect("a generation has a step");
        PolicyMicroBatch::load_step(step, self.sizes.rows, &all, self.share)?;
        if self.has_reference_policy {
            step.each_loaded(|loaded, loss: &mut PolicyMicroBatch| loss.read_reference(loaded))?;
        } else if self.config.loss.beta > 0.0 {
            let losses = step.loaded_token_losses(model, Pass::Reference, precision)?;
            for (micro_batch, losses) in losses.iter().enumerate() {
                step.loss_mut::<PolicyMicroBatch>(micro_batch).set_reference(losses)?;
            }
        }
        self.step += 1;
        let Report { metrics, examples } = std::mem::take(&mut self.report);
        Ok(LoadedRows { first: None, metrics, examples })
    }

    /// The mean reward of the most likely completions of the prompts that are held out. The loss is its negative.
    fn evaluate(&self, model: &mut Decoder, step: &TrainStep, _: StepPrecision) -> Result<Option<Validation>> {
        if self.prompts.validation_len() == 0 {
            return Ok(None);
        }
        let (likely, names) = self.held_out(model, step, 1, true)?;
        let draws = match self.evaluation.num_generations {
            0 => Vec::new(),
            count => self.held_out(model, step, count, false)?.0,
        };
        let metrics =
            held_out_metrics(&likely, &draws, self.evaluation.pass_reward, &names).and(self.turns_of(&likely));
        let loss = -metrics.get("reward").unwrap_or(0.0);
        Ok(Some(Validation::of_one(Evaluation { loss, metrics })))
    }
}
