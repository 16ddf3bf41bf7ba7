//! Measures how fast a model trains: whole optimizer steps on random tokens. Nothing is read from the disk.

use super::families::{FamilyTime, by_family};
use super::model;
use super::shapes::with_layers;
use crate::plan::ResolvedRun;
use crate::run::Run;
use crate::trainer::log_exceptions;
use ottava_checkpoint::RandomWeights;
use ottava_common::error::{Error, Result};
use ottava_data::Batch;
use ottava_models::DecoderConfig;
use ottava_parallel::Ranks;
use ottava_recipe::mode::StepPrecision;
use ottava_recipe::storage::Storage;
use ottava_recipe::{Precision, RecipeName};
use ottava_settings::{DataConfig, OptimizerConfig, RunConfig, TrainingConfig};
use ottava_tensor::Device;
use ottava_tensor::cuda::MemoryStats;
use serde::Serialize;
use std::rc::Rc;
use std::time::Instant;

/// The learning rate of all steps. It does not affect the time.
const LEARNING_RATE: f64 = 1e-4;

/// The settings of the benchmark.
#[derive(Clone, Debug)]
pub struct TrainBench {
    /// A name of [`models`](super::models), or the path of a folder or a `config.json`.
    pub model: String,
    /// The number of blocks; `None` for all blocks of the model.
    pub layers: Option<usize>,
    /// The number of tokens per sequence.
    pub seq_len: usize,
    /// The number of tokens of the documents in each sequence, which attention keeps apart; `None` if a sequence is one document.
    pub document_len: Option<usize>,
    /// The number of sequences of a micro-batch.
    pub micro_batch: usize,
    /// The number of micro-batches of a step.
    pub micro_batches: usize,
    /// The number of timed steps. Their median is reported.
    pub steps: usize,
    /// The settings of precision, optimizer, memory and adapters, except recipe and storage.
    pub config: RunConfig,
}

/// The result for one recipe.
#[derive(Clone, Debug, Serialize)]
pub struct TrainRow {
    /// The recipe.
    pub recipe: RecipeName,
    /// The storage of the optimizer.
    pub storage: Storage,
    /// The number of tokens per second on which each rank trains.
    pub tokens_per_second: f64,
    /// The median milliseconds of a step: forward, backward, clipping and the update.
    pub step_milliseconds: f64,
    /// The milliseconds by which a comparison of the sentinel lengthens a step; `None` if `sentinel_steps` is not set.
    pub comparison_milliseconds: Option<f64>,
    /// The mean power of this GPU over the measured steps; `None` if it is not measured, as on a CPU.
    pub watts: Option<f64>,
    /// Model FLOP/s: six operations per weight and token, and causal attention.
    pub model_flops_per_second: f64,
    /// The planned peak of tensors in bytes.
    pub planned_peak_bytes: u64,
    /// The measured peak of tensors in bytes.
    pub peak_memory_bytes: u64,
    /// The memory taken from the driver at the end, including gaps between tensors.
    pub reserved_memory_bytes: u64,
    /// The memory of each rank.
    pub ranks: Vec<RankMemory>,
    /// The seconds from a finished model to the end of its first step, including the compilation of kernels and the tuning of products.
    pub first_step_seconds: f64,
    /// The loss of the last step, to check the computation.
    pub loss: f64,
    /// The time on the device by use, measured in one more step without a graph. Empty on the CPU.
    pub families: Vec<FamilyTime>,
}

/// The device memory of a rank.
#[derive(Clone, Copy, Debug, Serialize)]
pub struct RankMemory {
    /// The measured peak of tensors in bytes.
    pub peak_bytes: u64,
    /// The memory of the GPU at the end that is in use outside the pool: context, kernels, libraries, graphs, and other processes.
    pub outside_bytes: u64,
}

impl RankMemory {
    fn of_all(ranks: &Ranks, device: &Device) -> Result<Vec<RankMemory>> {
        let own = match device {
            Device::Cuda(gpu) => {
                let (free, total) = gpu.memory_info()?;
                let pool = gpu.memory();
                [pool.peak as f64, (total - free).saturating_sub(pool.reserved) as f64]
            }
            Device::Cpu | Device::DryCpu(_) => [0.0; 2],
        };
        let all = ranks.gather("memory", own)?;
        Ok(all
            .into_iter()
            .map(|[peak, outside]| RankMemory { peak_bytes: peak as u64, outside_bytes: outside as u64 })
            .collect())
    }
}

impl TrainBench {
    /// Returns the lengths of the documents of a sequence. The last document may be shorter.
    fn document_lengths(&self) -> Option<Vec<usize>> {
        let most = self.document_len?;
        Some((0..self.seq_len).step_by(most).map(|start| most.min(self.seq_len - start)).collect())
    }

    /// Times `recipe` on `device`, with the optimizer states of `storage`. All of `ranks` call it, each with its own micro-batch and its own device.
    pub fn run(&self, recipe: RecipeName, storage: Storage, device: &Device, ranks: &Rc<Ranks>) -> Result<TrainRow> {
        let sizes = self.sizes()?;
        ranks.free_symmetric()?;
        if let Device::Cuda(gpu) = device {
            gpu.release_memory()?;
        }
        let mut weights = RandomWeights { seed: 1, device: device.clone() };
        let ResolvedRun { config, memory: planned, .. } = self.resolve(recipe, storage, &sizes, device, ranks)?;
        let (lengths, seen) = (self.document_lengths(), self.document_len.unwrap_or(self.seq_len).min(self.seq_len));
        let run = Run::new(&config, &sizes, device, &mut weights, ranks.clone())?;
        let mut run = run.with_documents(lengths.as_ref().map(Vec::len))?;
        log_exceptions(&run.model, None);
        device.synchronize()?;
        if let Device::Cuda(gpu) = device {
            gpu.reset_peak_memory();
        }
        let begin = Instant::now();
        run.quantize_weights()?;
        // The ranks of one pipeline read the same rows.
        let (row_share, _) = ranks.rows();
        let mut tokens = RandomTokens { state: 7 + row_share as u64, vocabulary: sizes.vocabulary as u64 };
        let mut step = || -> Result<(f64, f64)> {
            let documents = lengths.as_ref().map(|lengths| lengths.repeat(self.micro_batch));
            for micro_batch in 0..self.micro_batches {
                let documents = documents.clone();
                run.step.load(micro_batch, &Batch { documents, ..tokens.draw(self.micro_batch, self.seq_len) })?;
            }
            let begin = Instant::now();
            let done = run.step(LEARNING_RATE, StepPrecision::Recipe)?;
            Ok((begin.elapsed().as_secs_f64(), done.loss))
        };
        step()?;
        let first_step_seconds = begin.elapsed().as_secs_f64();
        step()?;
        let energy = || if let Device::Cuda(gpu) = device { gpu.energy() } else { None };
        let (begin, before) = (Instant::now(), energy());
        let timed = (0..self.steps).map(|_| step()).collect::<Result<Vec<_>>>()?;
        let watts = energy().zip(before).map(|(after, before)| (after - before) / begin.elapsed().as_secs_f64());
        let mut seconds: Vec<f64> = timed.iter().map(|(seconds, _)| *seconds).collect();
        seconds.sort_by(f64::total_cmp);
        let median = seconds[seconds.len() / 2];
        let mut comparison_milliseconds = None;
        if config.run.sentinel.sentinel_steps > 0 && !run.model.scaling().is_empty() {
            // The first comparison compiles kernels and tunes products, so the last of three comparisons counts.
            for _ in 0..3 {
                let documents = lengths.as_ref().map(|lengths| lengths.repeat(self.micro_batch));
                let batch = Batch { documents, ..tokens.draw(self.micro_batch, self.seq_len) };
                let begin = Instant::now();
                run.compare(&batch.first_rows(config.run.sentinel.sentinel_sequences))?;
                run.step(LEARNING_RATE, StepPrecision::Recipe)?;
                comparison_milliseconds = Some((begin.elapsed().as_secs_f64() - median) * 1e3);
            }
        }
        let (run, families) = self.profile(run, device, sizes.vocabulary)?;
        // The number of tokens of each GPU. Ranks of the axes tensor, context and pipeline share the tokens of a micro-batch.
        let tokens = self.micro_batches * self.micro_batch * self.seq_len;
        let sharing = config.run.parallel.tensor * config.run.parallel.context * ranks.pipeline().size();
        let tokens_per_second = tokens as f64 / sharing as f64 / median;
        let memory = match device {
            Device::Cuda(gpu) => gpu.memory(),
            Device::Cpu | Device::DryCpu(_) => MemoryStats::default(),
        };
        Ok(TrainRow {
            recipe,
            storage,
            tokens_per_second,
            step_milliseconds: median * 1e3,
            comparison_milliseconds,
            watts,
            model_flops_per_second: tokens_per_second * run.model.description().flops_per_token(seen),
            planned_peak_bytes: planned.peak_bytes,
            peak_memory_bytes: memory.peak as u64,
            reserved_memory_bytes: memory.reserved as u64,
            ranks: RankMemory::of_all(ranks, device)?,
            first_step_seconds,
            loss: timed.last().map_or(f64::NAN, |(_, loss)| *loss),
            families,
        })
    }

    /// Returns the sizes of the model. Errors with [`Error::Config`] if a size of the benchmark is 0.
    fn sizes(&self) -> Result<DecoderConfig> {
        let sizes = model(&self.model)?;
        let given = [self.steps, self.seq_len, self.micro_batch, self.micro_batches].map(Some);
        if given.into_iter().chain([self.layers, self.document_len]).any(|given| given == Some(0)) {
            return Err(Error::Config("steps, lengths, micro-batches and layers must be at least 1".into()));
        }
        Ok(DecoderConfig { lora: self.config.lora.adapters(), ..with_layers(sizes, self.layers) })
    }

    /// Resolves the settings of the timed run, and prepares the device. Errors if the run does not fit the device.
    fn resolve(
        &self,
        recipe: RecipeName,
        storage: Storage,
        sizes: &DecoderConfig,
        device: &Device,
        ranks: &Ranks,
    ) -> Result<ResolvedRun> {
        let mut config = RunConfig {
            precision: Precision { recipe, ..self.config.precision.clone() },
            optimizer: OptimizerConfig { storage, ..self.config.optimizer.clone() },
            data: DataConfig {
                max_length: self.seq_len,
                val_set_size: 0.0,
                document_mask: Some(self.document_len.is_some()),
                ..DataConfig::default()
            },
            training: TrainingConfig {
                per_device_train_batch_size: self.micro_batch,
                gradient_accumulation_steps: self.micro_batches,
                ..TrainingConfig::default()
            },
            ..self.config.clone()
        };
        config.expect_formats()?;
        config.expect_new_adapters()?;
        config.share(ranks.size())?;
        let resolved = ResolvedRun::new(&config, sizes, device)?;
        resolved.expect_fit()?;
        resolved.prepare_device();
        Ok(resolved)
    }

    /// Returns the times of the families of kernels in a step on a GPU; none on other devices. Without a graph, each call can be timed. The first step
    /// without a graph warms up the memory pool.
    fn profile(&self, mut run: Run, device: &Device, vocabulary: usize) -> Result<(Run, Vec<FamilyTime>)> {
        let Device::Cuda(gpu) = device else { return Ok((run, Vec::new())) };
        run.step = run.step.eager();
        run.step(LEARNING_RATE, StepPrecision::Recipe)?;
        gpu.start_profile();
        let begin = Instant::now();
        run.step(LEARNING_RATE, StepPrecision::Recipe)?;
        let milliseconds = begin.elapsed().as_secs_f64() * 1e3;
        let families = by_family(&gpu.take_profile()?, milliseconds, self.micro_batch * self.seq_len, vocabulary);
        Ok((run, families))
    }
}

/// Token ids without a pattern: the upper bits of a linear congruential generator.
struct RandomTokens {
    state: u64,
    vocabulary: u64,
}

impl RandomTokens {
    fn draw(&mut self, rows: usize, seq_len: usize) -> Batch {
        let mut ids = || (0..rows * seq_len).map(|_| self.next()).collect();
        Batch::whole(ids(), ids(), rows)
    }

    fn next(&mut self) -> i32 {
        self.state = self.state.wrapping_mul(6_364_136_223_846_793_005).wrapping_add(1_442_695_040_888_963_407);
        ((self.state >> 33) % self.vocabulary) as i32
    }
}
