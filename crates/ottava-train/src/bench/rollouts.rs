//! Measures a step of reinforcement learning: draws of completions whose lengths have a long tail, and the optimizer step on them. Weights and prompts
//! are random, and nothing is read from the disk.

use super::model;
use super::shapes::{expect_positive, with_layers};
use crate::objective::rollout::{
    Draw, DrawSizes, Drawer, PolicyMicroBatch, Sample, SampleRows, Scored, sample, seed_of,
};
use crate::plan::ResolvedRun;
use crate::run::Run;
use crate::trainer::log_exceptions;
use ottava_checkpoint::RandomWeights;
use ottava_common::error::{Error, Result};
use ottava_data::RowShare;
use ottava_engine::LogprobsMode;
use ottava_parallel::Ranks;
use ottava_recipe::mode::StepPrecision;
use ottava_recipe::storage::Storage;
use ottava_recipe::{KvCacheDtype, Precision, RecipeName};
use ottava_settings::{DataConfig, OptimizerConfig, ReinforcementConfig, RunConfig, SamplingConfig, TrainingConfig};
use ottava_tensor::Device;
use serde::Serialize;
use std::rc::Rc;
use std::time::Instant;

/// The learning rate of all steps. It does not affect the time.
const LEARNING_RATE: f64 = 1e-6;

/// Tokens of each completion before the timed generation. Drawing them compiles kernels and captures the largest batches.
const WARM_UP: usize = 4;

/// The settings of the benchmark.
#[derive(Clone, Debug)]
pub struct RolloutBench {
    /// A name of [`models`](super::models), or the path of a folder or a `config.json`.
    pub model: String,
    /// The number of blocks; `None` for all blocks of the model.
    pub layers: Option<usize>,
    /// Prompts of a generation.
    pub prompts: usize,
    /// Completions of each prompt.
    pub num_generations: usize,
    /// Tokens of a prompt.
    pub prompt_length: usize,
    /// The mean number of tokens of a completion, before the lengths are cut at `max_length`.
    pub mean_length: usize,
    /// Tokens of a row, and of a prompt with its completion at most.
    pub max_length: usize,
    /// Rows of a micro-batch.
    pub micro_batch: usize,
    /// Tokens of the KV cache; 0 for as many as the completions need and memory has room for.
    pub kv_cache_tokens: usize,
    /// The number of timed generations, each with one step.
    pub steps: usize,
    /// The settings of precision, optimizer, memory and adapters, except recipe and storage.
    pub config: RunConfig,
}

/// The result for one recipe. Times are means over the timed generations.
#[derive(Clone, Debug, Serialize)]
pub struct RolloutRow {
    /// The recipe.
    pub recipe: RecipeName,
    /// The format of the KV cache.
    pub kv_cache_dtype: KvCacheDtype,
    /// The storage of the optimizer.
    pub storage: Storage,
    /// Completions of a generation.
    pub completions: usize,
    /// Tokens of all completions of a generation.
    pub drawn_tokens: usize,
    /// Tokens of the longest completion.
    pub longest: usize,
    /// Completions that are drawn at once, at most.
    pub at_once: usize,
    /// The seconds of the draws of a generation.
    pub draw_seconds: f64,
    /// Drawn tokens per second of draws.
    pub drawn_per_second: f64,
    /// The milliseconds between the end of a step and the first pass of the engine with the new weights.
    pub hand_over_milliseconds: f64,
    /// The seconds of the step: loading, forward, backward and the update.
    pub step_seconds: f64,
    /// The micro-batches of the step.
    pub micro_batches: usize,
    /// Tokens of prompts and completions per second of the step.
    pub step_tokens_per_second: f64,
    /// The seconds of a generation and its step.
    pub seconds: f64,
    /// The planned peak of tensors in bytes.
    pub planned_peak_bytes: u64,
    /// The measured peak of tensors in bytes.
    pub peak_memory_bytes: u64,
}

/// Seconds of the phases of a generation and its step.
#[derive(Clone, Copy, Default)]
struct Phases {
    hand_over: f64,
    draws: f64,
    step: f64,
    micro_batches: usize,
}

impl RolloutBench {
    /// Times `recipe` on `device`, with the optimizer states of `storage`, and with a KV cache in `kv_cache_dtype`.
    ///
    /// Errors with [`Error::Config`] if a size is 0 or the lengths do not fit a row, and as the run errors that has these settings.
    pub fn run(
        &self,
        recipe: RecipeName,
        storage: Storage,
        kv_cache_dtype: KvCacheDtype,
        device: &Device,
    ) -> Result<RolloutRow> {
        expect_positive(&[self.prompts, self.num_generations, self.prompt_length, self.mean_length])?;
        expect_positive(&[self.max_length, self.micro_batch, self.steps, self.layers.unwrap_or(1)])?;
        if self.prompt_length >= self.max_length {
            return Err(Error::Config(format!(
                "a prompt of {} tokens leaves no room for a completion in {} tokens; raise --max-length or lower --prompt-length",
                self.prompt_length, self.max_length
            )));
        }
        let mut sizes = with_layers(model(&self.model)?, self.layers);
        sizes.lora = self.config.lora.adapters();
        sizes.head.wide_logits = true;
        if let Device::Cuda(gpu) = device {
            gpu.release_memory()?;
        }
        let mut config = self.settings(recipe, storage)?;
        config.reinforcement.sampling.kv_cache_dtype = kv_cache_dtype;
        config.share(1)?;
        let ResolvedRun { config, memory: planned, .. } = ResolvedRun::new(&config, &sizes, device)?;
        let ranks = Rc::new(Ranks::solo());
        let mut weights = RandomWeights { seed: 1, device: device.clone() };
        let mut run = Run::new(&config, &sizes, device, &mut weights, ranks)?.with_documents(None)?;
        log_exceptions(&run.model, None);
        run.quantize_weights()?;
        let mut drawer = Drawer::new(DrawSizes {
            completions: self.completions(),
            max_length: self.max_length,
            kv_cache_tokens: self.kv_cache_tokens,
            kv_cache_dtype,
            logprobs_mode: LogprobsMode::Loss,
        });
        let lengths = self.lengths();
        self.generation(&mut run, &mut drawer, &vec![WARM_UP; lengths.len()])?;
        if let Device::Cuda(gpu) = device {
            gpu.reset_peak_memory();
        }
        let timed =
            (0..self.steps).map(|_| self.generation(&mut run, &mut drawer, &lengths)).collect::<Result<Vec<_>>>()?;
        let mean = |of: fn(&Phases) -> f64| timed.iter().map(of).sum::<f64>() / timed.len() as f64;
        let (draws, step, hand_over) = (mean(|of| of.draws), mean(|of| of.step), mean(|of| of.hand_over));
        let drawn: usize = lengths.iter().sum();
        let read = drawn + self.completions() * self.prompt_length;
        Ok(RolloutRow {
            recipe,
            kv_cache_dtype,
            storage,
            completions: self.completions(),
            drawn_tokens: drawn,
            longest: lengths.iter().copied().max().unwrap_or(0),
            at_once: drawer.lend(&mut run.model, run.step.partition(), |engine| Ok(engine.options().max_batch))?,
            draw_seconds: draws,
            drawn_per_second: drawn as f64 / draws,
            hand_over_milliseconds: hand_over * 1e3,
            step_seconds: step,
            micro_batches: timed.last().map_or(0, |of| of.micro_batches),
            step_tokens_per_second: read as f64 / step,
            seconds: draws + step + hand_over,
            planned_peak_bytes: planned.peak_bytes,
            peak_memory_bytes: if let Device::Cuda(gpu) = device { gpu.memory().peak as u64 } else { 0 },
        })
    }

    fn completions(&self) -> usize {
        self.prompts * self.num_generations
    }

    /// The lengths of the completions: quantiles of a log-logistic distribution of shape 4, in an order without a pattern. The distribution has a long tail:
    /// one completion of a hundred is three times as long as the mean.
    fn lengths(&self) -> Vec<usize> {
        let (count, most) = (self.completions(), self.max_length - self.prompt_length);
        let quarter = std::f64::consts::FRAC_PI_4;
        let scale = self.mean_length as f64 * quarter.sin() / quarter;
        let quantile = |i: usize| {
            let share = (i as f64 + 0.5) / count as f64;
            scale * (share / (1.0 - share)).powf(0.25)
        };
        let mut order: Vec<usize> = (0..count).collect();
        order.sort_by_key(|&i| seed_of([0, 0, 0, i as u64]));
        order.into_iter().map(|i| (quantile(i).round() as usize).clamp(1, most)).collect()
    }

    /// Draws completions of these lengths, and runs a step on them.
    fn generation(&self, run: &mut Run, drawer: &mut Drawer, lengths: &[usize]) -> Result<Phases> {
        let device = run.model.device().clone();
        let vocabulary = run.model.config().vocabulary as u64;
        let prompt = |of: usize| {
            (0..self.prompt_length).map(move |t| (seed_of([1, of as u64, t as u64, 0]) % vocabulary) as u32)
        };
        let draw = |(i, &max_tokens): (usize, &usize)| Draw {
            prompt: prompt(i / self.num_generations).collect(),
            seed: i as u64,
            max_tokens,
        };
        let wanted: Vec<Draw> = lengths.iter().enumerate().map(draw).collect();
        device.synchronize()?;
        let begin = Instant::now();
        let mut lent = begin;
        let samples = drawer.lend(&mut run.model, run.step.partition(), |engine| {
            device.synchronize()?;
            lent = Instant::now();
            sample(engine, &wanted, &[], 1.0)
        })?;
        let drawn = Instant::now();
        let scored: Vec<Scored> = samples.into_iter().enumerate().map(|(i, sample)| scored(sample, i)).collect();
        let rows = SampleRows { rows: self.micro_batch, max_length: self.max_length, end: 0 };
        PolicyMicroBatch::load_step(&mut run.step, rows, &scored, RowShare::ALL)?;
        run.step(LEARNING_RATE, StepPrecision::Recipe)?;
        let seconds = |from: Instant, to: Instant| (to - from).as_secs_f64();
        Ok(Phases {
            hand_over: seconds(begin, lent),
            draws: seconds(lent, drawn),
            step: drawn.elapsed().as_secs_f64(),
            micro_batches: run.step.schedule().micro_batches,
        })
    }

    /// The settings of the timed run.
    fn settings(&self, recipe: RecipeName, storage: Storage) -> Result<RunConfig> {
        let reward = serde_json::from_value(serde_json::json!({"type": "exact"}))
            .map_err(|error| Error::Config(format!("the reward of the benchmark: {error}")))?;
        let of_step = self.completions().div_ceil(self.micro_batch);
        Ok(RunConfig {
            precision: Precision { recipe, ..self.config.precision.clone() },
            optimizer: OptimizerConfig { storage, ..self.config.optimizer.clone() },
            data: DataConfig { max_length: self.max_length, val_set_size: 0.0, ..DataConfig::default() },
            reinforcement: ReinforcementConfig {
                num_generations: self.num_generations,
                max_completion_length: self.max_length - self.prompt_length,
                sampling: SamplingConfig { kv_cache_tokens: self.kv_cache_tokens, ..SamplingConfig::default() },
                rewards: vec![reward],
                ..ReinforcementConfig::default()
            },
            training: TrainingConfig {
                per_device_train_batch_size: self.micro_batch,
                gradient_accumulation_steps: of_step,
                ..TrainingConfig::default()
            },
            ..self.config.clone()
        })
    }
}

/// A completion with an advantage that is positive for every second one.
fn scored(sample: Sample, number: usize) -> Scored {
    let advantage = if number.is_multiple_of(2) { 1.0 } else { -1.0 };
    Scored { old: None, advantages: vec![advantage; sample.drawn()], estimates: None, counts: true, sample }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn lengths_have_a_long_tail_and_the_stated_mean() {
        let bench = RolloutBench {
            model: "gpt2".into(),
            layers: None,
            prompts: 64,
            num_generations: 8,
            prompt_length: 512,
            mean_length: 1024,
            max_length: 1 << 20,
            micro_batch: 2,
            kv_cache_tokens: 0,
            steps: 1,
            config: RunConfig::default(),
        };
        let mut lengths = bench.lengths();
        let mean = lengths.iter().sum::<usize>() as f64 / 512.0;
        assert!((mean - 1024.0).abs() < 16.0, "{mean}");
        assert!(!lengths.is_sorted());
        lengths.sort_unstable();
        assert!((900..940).contains(&lengths[256]) && lengths[506] > 2800, "{} {}", lengths[256], lengths[506]);
        assert!(RolloutBench { max_length: 2000, ..bench }.lengths().iter().all(|&length| length <= 1488));
    }
}
