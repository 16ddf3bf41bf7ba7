//! One optimizer step: a [`Program`] over the loaded micro-batches. On a GPU, the second step of each precision is captured as a CUDA graph, which
//! later steps replay. All ranks launch a step in the same way, since NCCL requires that a collective is captured on all ranks or on none.
//!
//! `Program::step_of` builds the actions from the `Schedule` of the pipeline and from `Reductions`, the micro-batches that reduce gradients over
//! ranks. `Program::check` rejects an order that cannot run. `Program::run` then enqueues the actions in order. `run_passes` runs them for one pass,
//! or for the two passes of a comparison side by side (`passes.rs`). Each micro-batch has a slot for its saved activations, so several micro-batches
//! may be in flight.
//!
//! Between `TrainStep::load` and the end of a step, the host neither waits for the device nor reads from it. The first step is not captured, since it
//! compiles kernels and measures the speed of products. Capturing a step does not change its bits. `TrainStep` keeps one graph per `StepPrecision`.
//!
//! A captured graph contains no constant that changes between steps, and no constant mask. The learning rate, the step number, the loss scale and
//! `positions` are in device memory. With packed rows, the boundaries of documents are a tensor of fixed capacity (`cu_seqlens` of `Sequences`),
//! which RoPE and attention read.
//!
//! Target tokens are counted on the host, in `TrainStep::load`, and reach the update with its other scalars. Backward divides the loss by all tokens
//! of the step. The update multiplies by the ratio of all tokens to target tokens, which is exactly 1 without a mask. So amaxes of gradients do not
//! depend on the mask, and no kernel counts target tokens.
//!
//! `Program::gradients_of` has no update, and `Program::evaluation_of` has no backward. `ottava plan --program` prints the programs of a step and
//! of an evaluation.

mod action;
mod check;
mod compare;
mod forward;
pub mod host;
mod loss;
mod micro_batch;
mod passes;
mod program;
mod run;
#[cfg(test)]
mod tests;

pub use action::Action;
pub use check::Places;
pub use compare::Repeated;
pub use forward::{token_losses, token_values};
pub use loss::{Loss, Metrics, NextTokenLoss};
pub use micro_batch::{Loaded, LossScale, MicroBatch};
pub use program::{Program, Reductions};
pub use run::{ProgramInputs, Results, StepEnd};

use ottava_common::error::{Error, Result};
use ottava_common::hash::mix;
use ottava_data::Batch;
use ottava_models::Decoder;
use ottava_parallel::optim::Optimizer;
use ottava_parallel::{Partition, Schedule, Shared};
use ottava_recipe::capture::{Capture, Launch};
use ottava_recipe::context::Sequences;
use ottava_recipe::mode::StepPrecision;
use ottava_tensor::comm::Axis;
use ottava_tensor::cuda::Graph;
use ottava_tensor::ops::{cast, real_type};
use ottava_tensor::{DType, Device, Tensor};
use std::any::Any;

/// The program of a step, the tensors that all steps of a run share, and the captured steps.
pub struct TrainStep {
    program: Program,
    /// The schedule of the micro-batches that steps run: the first of `micro_batches`.
    schedule: Schedule,
    micro_batches: Vec<MicroBatch>,
    /// The number of counted losses of each micro-batch ([`Loss::counted`]).
    counted: Vec<usize>,
    /// The number of padding tokens of each micro-batch.
    padding: Vec<usize>,
    results: Results,
    /// The maximum norm of gradients. Above it, a step changes no weight.
    norm_limit: f64,
    /// The capture of steps by the recipe, and the capture of steps in high precision, for each number of micro-batches. Alternating between them discards
    /// none.
    captures: Vec<[Capture; 2]>,
    /// The factor of the loss of a step, which keeps gradients from underflow in FP16. The update divides by it.
    loss_scale_value: f64,
    loss_scale: LossScale,
    /// The value of [`LossScale::per_micro_batch`].
    per_micro_batch: f64,
    /// The ranks that run a step together, with equal numbers of rows, and how they divide the model.
    partition: Partition,
    /// The seed of random numbers.
    seed: u64,
}

/// The numbers of micro-batches, for each precision, whose steps are captured: a graph takes memory outside of the pool. Steps of further numbers are launched
/// call by call.
const MOST_GRAPHS: usize = 8;

/// The result of a step.
#[derive(Clone, Debug, Default, PartialEq)]
pub struct StepResult {
    /// The mean of the counted losses before the update.
    pub loss: f64,
    /// The number of tokens that all ranks have read, without padding.
    pub tokens: u64,
    /// The global norm of the gradients before clipping. If it is not finite, no weight was changed.
    pub grad_norm: f64,
    /// Whether the norm was finite but above the limit. If so, no weight was changed.
    pub is_skipped: bool,
    /// The norm of the cast errors of the gradients that this rank sent as FP8 codes, relative to the norm of these gradients.
    pub reduce_error: Option<f64>,
    /// The sums of the loss over all micro-batches and ranks. [`TrainStep::metrics`] converts them to metrics.
    pub sums: Vec<f64>,
}

impl StepResult {
    /// Returns whether the loss and the gradient norm are finite.
    pub fn is_finite(&self) -> bool {
        self.loss.is_finite() && self.grad_norm.is_finite()
    }
}

impl TrainStep {
    /// Makes the step of one rank, with `micro_batches` micro-batches of `rows` sequences of `seq_len` tokens.
    pub fn new(model: &Decoder, micro_batches: usize, rows: usize, seq_len: usize) -> Result<TrainStep> {
        TrainStep::shared(model, Schedule::of_one_rank(micro_batches), rows, seq_len, Partition::solo())
    }

    /// Makes the step of the ranks of `partition`. Their pipelines run `schedule` with micro-batches of `rows` sequences of `seq_len` tokens.
    pub fn shared(
        model: &Decoder,
        schedule: Schedule,
        rows: usize,
        seq_len: usize,
        partition: Partition,
    ) -> Result<TrainStep> {
        let (device, micro_batches) = (model.device(), schedule.micro_batches);
        let place = partition.ranks().place(Axis::Context);
        let sequences = || Sequences::divided(device, rows, seq_len, place);
        let tokens = sequences()?.positions.len();
        let ids = || {
            (0..micro_batches).map(|_| Ok(Tensor::zeros(device, &[tokens], DType::I32)?)).collect::<Result<Vec<_>>>()
        };
        let real = real_type(model.recipe().compute);
        let losses = Tensor::empty(device, &[micro_batches, tokens], real)?;
        let (inputs, targets) = (ids()?, ids()?);
        let scalar = || Tensor::empty(device, &[1], DType::F32);
        let reduce_error = partition.sends_codes().then(scalar).transpose()?;
        let results = Results { losses, norm: scalar()?, limit: None, reduce_error };
        let scalar_of_sums = || Tensor::empty(device, &[1], real);
        let loss_scale = LossScale { per_unit: scalar_of_sums()?, per_micro_batch: scalar_of_sums()? };
        let micro_batch = |(inputs, targets)| {
            Ok(MicroBatch { inputs, targets, sequences: sequences()?, loss: Box::new(NextTokenLoss) })
        };
        let reductions = Reductions::for_step(partition.ranks().reducing(), partition.zero());
        let (rank, is_tied) = (partition.ranks().pipeline().rank(), model.is_tied());
        let mut step = TrainStep {
            program: Program::step_of(&schedule, rank, reductions, is_tied),
            schedule,
            micro_batches: inputs.into_iter().zip(targets).map(micro_batch).collect::<Result<_>>()?,
            counted: vec![tokens; micro_batches],
            padding: vec![0; micro_batches],
            results,
            norm_limit: f64::INFINITY,
            captures: (0..micro_batches).map(|_| [Capture::on(device), Capture::on(device)]).collect(),
            loss_scale_value: 1.0,
            loss_scale,
            per_micro_batch: f64::NAN,
            partition,
            seed: 0,
        };
        step.write_loss_scale()?;
        // The value in a step without ignored targets.
        step.set_per_micro_batch(1.0 / step.micro_batches_of_all() as f64)?;
        Ok(step)
    }

    /// Returns the same step for rows of at most `max_documents` documents each.
    pub fn with_documents(mut self, max_documents: usize) -> Result<TrainStep> {
        for MicroBatch { sequences, .. } in &mut self.micro_batches {
            let Sequences { batch, seq_len, place, positions, .. } = &*sequences;
            let own = Sequences::divided(positions.device(), *batch, *seq_len, *place)?;
            *sequences = own.with_documents(batch * max_documents)?;
        }
        Ok(self)
    }

    /// Returns the same step, whose layers draw random numbers: each token has a number, and each step a seed that follows from `seed`. The numbers of
    /// a row of data do not depend on micro-batches and ranks. Called after [`TrainStep::with_documents`].
    pub fn with_draws(mut self, seed: u64) -> Result<TrainStep> {
        let rank = self.partition.ranks().place(Axis::Data);
        for (number, MicroBatch { sequences, .. }) in self.micro_batches.iter_mut().enumerate() {
            let Sequences { batch, seq_len, .. } = *sequences;
            // The loader deals the rows of a step to the data ranks in turn.
            let row = |sequence| (number * batch + sequence) * rank.ranks + rank.rank;
            sequences.number_tokens(|sequence, position| (row(sequence) * seq_len + position) as i32)?;
        }
        self.seed = seed;
        Ok(self)
    }

    /// Sets the seed of the random numbers of step number `step`.
    fn draw(&mut self, step: u64) -> Result<()> {
        let seed = mix(self.seed ^ mix(step));
        let mut draws = self.micro_batches.iter_mut().filter_map(|of| of.sequences.draws.as_mut());
        draws.try_for_each(|draws| Ok(draws.set_seed(seed)?))
    }

    /// Returns the same step with another loss. `make` makes the loss of a micro-batch from its number of rows, its device and the type of its sums.
    pub fn with_losses(mut self, make: impl Fn(usize, &Device, DType) -> Result<Box<dyn Loss>>) -> Result<TrainStep> {
        let losses = &self.results.losses;
        let (device, dtype, micro_batches) = (losses.device().clone(), losses.dtype(), self.micro_batches.len());
        let (mut units, mut values) = (0, 0);
        for MicroBatch { inputs, sequences, loss, .. } in &mut self.micro_batches {
            *loss = make(sequences.batch, &device, dtype)?;
            (units, values) = (loss.units(inputs.len()), loss.values(inputs.len()));
        }
        if self.results.losses.shape() != [micro_batches, values] {
            self.results.losses = Tensor::empty(&device, &[micro_batches, values], dtype)?;
        }
        self.counted = vec![units; micro_batches];
        self.write_loss_scale()?;
        Ok(self)
    }

    /// Returns the loss of the micro-batch, so that the tensors that it reads besides tokens can be loaded. Panics if [`TrainStep::with_losses`] made
    /// losses of another type.
    pub fn loss_mut<L: Loss>(&mut self, micro_batch: usize) -> &mut L {
        let loss: &mut dyn Any = &mut *self.micro_batches[micro_batch].loss;
        loss.downcast_mut().expect("the step was made for this loss")
    }

    /// Returns the loss of the first micro-batch. Panics if [`TrainStep::with_losses`] made losses of another type.
    pub fn first_loss<L: Loss>(&self) -> &L {
        let loss: &dyn Any = self.loss();
        loss.downcast_ref().expect("the step was made for this loss")
    }

    /// Shows the rows and the loss of each loaded micro-batch to `show`. Panics if [`TrainStep::with_losses`] has made losses of another type.
    pub fn each_loaded<L: Loss>(&mut self, mut show: impl FnMut(Loaded, &mut L) -> Result<()>) -> Result<()> {
        let used = self.schedule.micro_batches;
        self.micro_batches[..used].iter_mut().try_for_each(|MicroBatch { inputs, targets, sequences, loss, .. }| {
            let loss: &mut dyn Any = &mut **loss;
            show(Loaded { inputs, targets, sequences }, loss.downcast_mut().expect("the step was made for this loss"))
        })
    }

    /// Returns the metrics of a step with these [`StepResult::sums`].
    pub fn metrics(&self, sums: &[f64]) -> Metrics {
        self.loss().metrics(sums)
    }

    /// Returns the loss of the first micro-batch. All micro-batches have losses of the same type.
    fn loss(&self) -> &dyn Loss {
        &*self.micro_batches[0].loss
    }

    /// Returns the same step with room for a limit of the norm of gradients.
    pub fn with_norm_limit(mut self) -> Result<TrainStep> {
        self.results.limit = Some(Tensor::empty(self.results.norm.device(), &[1], DType::F32)?);
        Ok(self)
    }

    /// Sets the maximum norm of gradients before clipping, for later steps. If the norm of a step is larger, no weight changes. All ranks set the
    /// same limit. Without [`TrainStep::with_norm_limit`], the limit has no effect.
    pub fn set_norm_limit(&mut self, limit: f64) {
        self.norm_limit = limit;
    }

    /// Returns the schedule of a step.
    pub fn schedule(&self) -> &Schedule {
        &self.schedule
    }

    /// Returns the ranks of a step, and how they divide the model.
    pub fn partition(&self) -> &Partition {
        &self.partition
    }

    /// Lets later steps run only the first `count` micro-batches, since no other micro-batch has rows. All ranks call it with the same `count`. Panics if
    /// `count` is 0 or above the number of micro-batches.
    pub fn use_micro_batches(&mut self, count: usize) {
        assert!(
            (1..=self.micro_batches.len()).contains(&count),
            "{count} of {} micro-batches",
            self.micro_batches.len()
        );
        if count == self.schedule.micro_batches {
            return;
        }
        self.schedule.micro_batches = count;
        let ranks = self.partition.ranks();
        let reductions = Reductions::for_step(ranks.reducing(), self.partition.zero());
        let is_tied = self.program.actions.contains(&Action::SumTied);
        self.program = Program::step_of(&self.schedule, ranks.pipeline().rank(), reductions, is_tied);
    }

    /// Returns the micro-batches that steps run.
    fn used(&self) -> &[MicroBatch] {
        &self.micro_batches[..self.schedule.micro_batches]
    }

    /// Returns the same step, which is never captured as a CUDA graph.
    pub fn eager(self) -> TrainStep {
        let never = |_| [Capture::Never, Capture::Never];
        TrainStep { captures: self.captures.iter().map(never).collect(), ..self }
    }

    /// Runs `work` with the averages of the weights, which `optimizer` keeps, in the place of the weights of `model`. Afterwards the model has the same
    /// bits as before, and steps are captured again. All ranks call it together.
    pub fn with_averages<T>(
        &mut self,
        model: &mut Decoder,
        optimizer: &mut dyn Optimizer,
        work: impl FnOnce(&mut Decoder, &mut dyn Optimizer, &TrainStep) -> Result<T>,
    ) -> Result<T> {
        let done = self.partition.with_averages(model, optimizer, |model, optimizer| work(model, optimizer, self));
        self.forget_captures();
        done
    }

    /// Discards captured steps. Called after a change of the operands that products read.
    pub fn forget_captures(&mut self) {
        for capture in self.captures.iter_mut().flatten().filter(|capture| !matches!(capture, Capture::Never)) {
            *capture = Capture::AfterThisStep;
        }
    }

    /// Sets the factor of the loss in later steps.
    pub fn set_loss_scale(&mut self, loss_scale: f64) -> Result<()> {
        if loss_scale == self.loss_scale_value {
            return Ok(());
        }
        self.loss_scale_value = loss_scale;
        self.write_loss_scale()
    }

    /// Sets the factor of the losses of layers.
    fn set_per_micro_batch(&mut self, value: f64) -> Result<()> {
        if value == self.per_micro_batch {
            return Ok(());
        }
        self.per_micro_batch = value;
        host::write(&mut self.loss_scale.per_micro_batch, &[value])
    }

    /// Writes the factor of the loss of a unit.
    fn write_loss_scale(&mut self) -> Result<()> {
        let per_unit = self.loss_scale_value / self.units() as f64;
        host::write(&mut self.loss_scale.per_unit, &[per_unit])
    }

    /// Loads a micro-batch for the next step.
    pub fn load(&mut self, micro_batch: usize, batch: &Batch) -> Result<()> {
        let MicroBatch { inputs, targets, sequences, loss } = &mut self.micro_batches[micro_batch];
        let own_targets = sequences.own(&batch.targets);
        inputs.write_bytes(bytemuck::cast_slice(&sequences.own(&batch.inputs)))?;
        targets.write_bytes(bytemuck::cast_slice(&own_targets))?;
        sequences.set_padding(&batch.padding)?;
        match (&batch.documents, sequences.cu_seqlens.is_some()) {
            (Some(lengths), true) => sequences.set_documents(lengths)?,
            (None, false) => {}
            _ => unreachable!("batches have documents if and only if the step was made for them"),
        }
        self.counted[micro_batch] = loss.counted(&own_targets);
        // If ranks divide the sequences, the first of these ranks counts all padding.
        self.padding[micro_batch] = if sequences.place.rank == 0 { batch.padding.iter().sum() } else { 0 };
        Ok(())
    }

    /// Runs the step on the loaded micro-batches, and waits for it.
    ///
    /// Backward divides the loss by the number of all losses of the step. The update multiplies by the number of all losses / the number of counted
    /// losses. So the gradients that casts measure do not depend on the number of ignored targets, and without ignored targets the factor is
    /// exactly 1. The loss of a layer is a mean over the tokens of a micro-batch. Backward multiplies it by counted losses / all losses, so the update sees
    /// the gradient of its mean over all micro-batches.
    ///
    /// Errors with [`Error::NoTargets`] on all ranks if all targets are ignored. Nothing is changed then.
    pub fn run(
        &mut self,
        model: &mut Decoder,
        optimizer: &mut dyn Optimizer,
        learning_rate: f64,
        precision: StepPrecision,
    ) -> Result<StepResult> {
        let used = self.schedule.micro_batches;
        let [mine, padding]: [usize; 2] = [&self.counted, &self.padding].map(|counts| counts[..used].iter().sum());
        let ready = self.capture(precision).ready_for();
        let mine = [mine as f64, padding as f64, f64::from(ready as u8)];
        let all = self.partition.ranks().gather("tokens and launch", mine)?;
        let counted =
            |count: usize| self.partition.ranks().among(Shared::Tokens, &all).map(move |of_rank| of_rank[count]);
        let [targets, padding] = [0, 1].map(|count| counted(count).sum::<f64>());
        let launch = Launch::agreed(all.iter().map(|&[_, _, ready]| ready));
        if targets == 0.0 {
            let text = "a step has no target token: the loss mask of all its sequences is empty";
            return Err(Error::NoTargets(text.into()));
        }
        let gradient_scale = self.loss_scale_value * (targets / self.units() as f64);
        optimizer.begin_step(learning_rate, gradient_scale)?;
        self.draw(optimizer.steps())?;
        self.set_per_micro_batch(gradient_scale / self.micro_batches_of_all() as f64)?;
        let limit = (self.norm_limit * gradient_scale) as f32;
        if let Some(on_device) = &mut self.results.limit {
            on_device.write_bytes(&limit.to_le_bytes())?;
        }
        self.partition.begin_step()?;
        match launch {
            Launch::Eager => {
                *self.capture(precision) = Capture::Never;
                self.enqueue(model, optimizer, precision)?;
            }
            Launch::WarmUp => {
                self.enqueue(model, optimizer, precision)?;
                if self.captured(precision) < MOST_GRAPHS {
                    *self.capture(precision) = Capture::Due;
                }
            }
            Launch::Capture => self.record(model, optimizer, precision)?,
            Launch::Replay => {
                let Capture::Done(graph) = self.capture(precision) else { unreachable!("all ranks are ready") };
                graph.replay()?;
                model.scaling().count_replayed_update();
            }
        }
        self.partition.ranks().compare_gpu_calls("a step")?;
        let Results { norm, reduce_error, limit: on_device, .. } = &self.results;
        let norm = norm.to_vec::<f32>()?[0];
        let is_skipped = on_device.is_some() && norm > limit && norm.is_finite();
        let grad_norm = f64::from(norm) / gradient_scale;
        let told = [vec![grad_norm], self.own_sums()?].concat();
        let all = self.partition.ranks().gather_lists("loss and gradient norm", &told)?;
        // All ranks must compute the same update, so their gradient norms must be equal.
        if let Some(rank) =
            all.iter().position(|told| told[0] != grad_norm && !(told[0].is_nan() && grad_norm.is_nan()))
        {
            let (name, here, there) = ("gradient norm", grad_norm, all[rank][0]);
            return Err(Error::diverged(format!(
                "ranks have diverged: the {name} is {here} on rank {} and {there} on rank {rank}; resume from the last checkpoint",
                self.partition.ranks().rank()
            )));
        }
        let read = |error: &Tensor| Ok::<_, Error>(f64::from(error.to_vec::<f32>()?[0]));
        let reduce_error = reduce_error.as_ref().map(read).transpose()?;
        let of_ranks = self.partition.ranks().of_losses(&all);
        let sums = of_ranks.fold(Vec::new(), |sums, told| self.loss().merge(sums, &told[1..]));
        let tokens = self.tokens() as u64 - padding as u64;
        Ok(StepResult { loss: sums[0] / targets, tokens, grad_norm, is_skipped, reduce_error, sums })
    }

    /// Returns the sums of the losses of this rank, added in the order of its micro-batches.
    fn own_sums(&self) -> Result<Vec<f64>> {
        let values = host::values(&self.results.losses)?;
        let of_each = values.chunks_exact(values.len() / self.micro_batches.len());
        let mut micro_batches = self.used().iter().zip(of_each);
        micro_batches.try_fold(Vec::new(), |sums, (micro_batch, values)| micro_batch.loss.add(sums, values))
    }

    /// Returns the number of tokens of a step over all ranks, including padding.
    fn tokens(&self) -> usize {
        let tokens: usize = self.used().iter().map(|micro_batch| micro_batch.inputs.len()).sum();
        tokens * self.partition.ranks().sharing(Shared::Tokens).size()
    }

    /// Returns the number of losses of all micro-batches over all ranks, including losses of ignored targets.
    fn units(&self) -> usize {
        let units: usize = self.micro_batches.iter().map(|of| of.loss.units(of.inputs.len())).sum();
        units * self.partition.ranks().sharing(Shared::Tokens).size()
    }

    /// Returns the number of micro-batches that a step runs over all ranks.
    fn micro_batches_of_all(&self) -> usize {
        let ranks = self.partition.ranks();
        self.schedule.micro_batches * ranks.sharing(Shared::Tokens).size() / ranks.place(Axis::Context).ranks
    }

    /// Returns the number of graphs of this precision that are captured or due.
    fn captured(&self, precision: StepPrecision) -> usize {
        let of_precision = |captures: &[Capture; 2]| match captures[usize::from(precision == StepPrecision::High)] {
            Capture::Never | Capture::AfterThisStep => 0,
            Capture::Due | Capture::Done(_) => 1,
        };
        self.captures.iter().map(of_precision).sum()
    }

    fn capture(&mut self, precision: StepPrecision) -> &mut Capture {
        &mut self.captures[self.schedule.micro_batches - 1][usize::from(precision == StepPrecision::High)]
    }

    /// Captures the step and replays it. No other work is in flight, since a step contains all its micro-batches from forward to update. If a rank
    /// cannot capture the step, all ranks launch this step and all later steps without graphs.
    fn record(&mut self, model: &mut Decoder, optimizer: &mut dyn Optimizer, precision: StepPrecision) -> Result<()> {
        let Device::Cuda(gpu) = model.device().clone() else { unreachable!("only work of a GPU is captured") };
        // Frees an earlier graph.
        *self.capture(precision) = Capture::Due;
        let captured = Graph::capture(&gpu, || self.enqueue(model, optimizer, precision));
        let failed = self.partition.ranks().any("a failed capture", captured.is_err())?;
        match captured {
            Ok(mut graph) if !failed => {
                graph.replay()?;
                *self.capture(precision) = Capture::Done(graph);
                Ok(())
            }
            // A plan assumes captured steps: after a failed capture, a GPU has less memory than a dry run expects.
            Err(error) if gpu.tracker().is_some() => Err(error),
            captured => {
                let reason = captured.err().map_or("another rank could not".into(), |error| error.to_string());
                tracing::warn!("steps are not captured as CUDA graphs, kernels are launched one by one: {reason}");
                *self.capture(precision) = Capture::Never;
                model.parameters().into_iter().for_each(|param| param.gradient.clear());
                self.partition.begin_step()?;
                self.enqueue(model, optimizer, precision)
            }
        }
    }

    fn enqueue(&mut self, model: &mut Decoder, optimizer: &mut dyn Optimizer, precision: StepPrecision) -> Result<()> {
        let TrainStep { program, schedule, micro_batches, results, loss_scale, partition, .. } = self;
        let (loss_scale, micro_batches) = (Some(&*loss_scale), &micro_batches[..schedule.micro_batches]);
        let inputs = ProgramInputs { micro_batches, loss_scale, precision, partition };
        program.run(model, &inputs, Some(StepEnd { optimizer, results })).map(drop)
    }

    /// Returns the first parameter whose gradient is not finite, after a step whose norm was not finite. Runs forward and backward of the step's
    /// micro-batches again, since an update drops the gradients.
    pub fn first_bad_gradient(&self, model: &mut Decoder, precision: StepPrecision) -> Result<Option<String>> {
        let TrainStep { schedule, loss_scale, partition, .. } = self;
        let inputs = ProgramInputs { micro_batches: self.used(), loss_scale: Some(loss_scale), precision, partition };
        Program::gradients_of(schedule, partition.ranks().pipeline().rank()).run(model, &inputs, None)?;
        let mut bad = None;
        for param in model.parameters() {
            let grad = param.gradient.take().expect("backward has run");
            let finite = || -> Result<bool> {
                Ok(cast(&grad.values()?, DType::F32)?.to_vec::<f32>()?.iter().all(|g| g.is_finite()))
            };
            if bad.is_none() && !finite()? {
                bad = Some(param.identity.name().to_string());
            }
        }
        Ok(bad)
    }
}

/// Returns the sum of all losses, added in the order of the tokens.
pub fn total(losses: &Tensor) -> Result<f64> {
    Ok(host::values(losses)?.iter().sum())
}
