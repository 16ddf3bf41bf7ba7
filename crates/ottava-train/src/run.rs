//! A run: model, optimizer and step. Training, plans and benchmarks use the same type.
//!
//! `ResolvedRun::new` (`plan/resolve.rs`) resolves the `"auto"` settings of a run by dry runs, and rejects a run that does not fit into memory. It
//! returns a `ResolvedConfig`. `Run::new` takes this config, and is the only constructor of model, optimizer and step: the trainer, the plan and
//! `ottava bench train` call it. `Trainer` adds data, metrics, checkpoints and signals.
//!
//! The order in `Run::new` matters. First the model is built without weights. Then `Partition::new` decides the slices of each rank, and
//! `Partition::load` reads only these slices. The optimizer comes last, since its states have the shapes of the slices.

use crate::batch_invariance;
use crate::objective::{self, Objective};
use crate::step::{Repeated, StepResult, TrainStep};
use ottava_common::error::Result;
use ottava_data::Batch;
use ottava_models::{Decoder, DecoderConfig, Span};
use ottava_parallel::optim::Optimizer;
use ottava_parallel::{LayerAxes, Partition, Ranks, divide};
use ottava_recipe::mode::StepPrecision;
use ottava_recipe::param::WeightSource;
use ottava_recipe::scaling::{Observer, PrecisionComparison};
use ottava_sentinel::NormAlarmPolicy;
use ottava_settings::ResolvedConfig;
use ottava_tensor::cuda::BatchInvariance;
use ottava_tensor::{Device, Tensor};
use std::collections::BTreeSet;
use std::rc::Rc;

/// A model, its optimizer and its steps.
pub struct Run {
    /// The model.
    pub model: Decoder,
    /// The optimizer, which updates the weights.
    pub optimizer: Box<dyn Optimizer>,
    /// The step, which runs forward, backward and the update.
    pub step: TrainStep,
    /// What the steps optimise.
    pub objective: Box<dyn Objective>,
    /// A digest of the initial weights. It is equal on all ranks with the same layers.
    pub weights_digest: u64,
    /// The seed of the random numbers that layers draw. `None` if they draw none.
    seed_of_draws: Option<u64>,
    /// Keeps the results of forward independent of the batch, if the run asks for it.
    _batch_invariance: Option<BatchInvariance>,
}

impl Run {
    /// Builds the run of `config` on this rank of `ranks`, for a model of these `sizes`, with weights from `weights`. The weights are not cast before
    /// [`Run::quantize_weights`], since a resumed run restores scales first.
    pub fn new(
        config: &ResolvedConfig,
        sizes: &DecoderConfig,
        device: &Device,
        weights: &mut dyn WeightSource,
        ranks: Rc<Ranks>,
    ) -> Result<Run> {
        let _scope = device.scope("build");
        let run = &config.run;
        if let (Device::Cuda(gpu), true) = (device, run.precision.deterministic) {
            // Algorithms that were chosen by timing, in this process or an earlier one, may differ between runs, and between the hosts of a run.
            gpu.skip_gemm_timing();
        }
        let (t, seq_len) = (&run.training, run.data.max_length);
        let (recipe, purpose) = (run.recipe_on(device), config.purpose());
        let schedule = run.parallel.schedule(t.gradient_accumulation_steps)?;
        let all = match schedule.all_stages() {
            1 => vec![Span::whole(sizes.layers.len())],
            stages => divide(&config.layer_costs(&Decoder::describe(sizes, &recipe)?), stages)?,
        };
        let rank = ranks.pipeline().rank();
        let spans: Vec<_> = (0..schedule.stages).map(|stage| all[schedule.number(rank, stage)].clone()).collect();
        let axes = Rc::new(LayerAxes::new(ranks.clone()));
        let mut model = Decoder::staged(sizes, &recipe, device, purpose, seq_len, &spans, axes)?;
        let batch_invariance = batch_invariance::begin(run, &model, device)?;
        let reduction = run.parallel.communication.reduction(run.optimizer.formats().gradients);
        let values = run.needs_values();
        let partition = Partition::new(&mut model, ranks, run.parallel.zero, reduction, values)?;
        let weights_digest = partition.load(&mut model, weights)?;
        let states = device.scope("optimizer states");
        let optimizer = run.new_optimizer(&model.parameters())?;
        drop(states);
        let step = TrainStep::shared(&model, schedule, run.micro_batch_rows(), seq_len, partition)?;
        let objective = objective::of(run);
        let step = step.with_losses(|rows, device, dtype| objective.loss(rows, device, dtype))?;
        let step = if run.alarms.grad_norm_spike == NormAlarmPolicy::Skip { step.with_norm_limit()? } else { step };
        let seed_of_draws = run.draws().then_some(run.seed);
        Ok(Run {
            model,
            optimizer,
            step,
            objective,
            weights_digest,
            seed_of_draws,
            _batch_invariance: batch_invariance,
        })
    }

    /// Returns the same run for rows with at most `max_documents` documents each, as the data say, unless the objective packs rows. With `None`, each row
    /// is one document.
    pub fn with_documents(self, max_documents: Option<usize>) -> Result<Run> {
        // The padding of a row that an encoder reads is a document.
        let of_encoder = self.model.config().is_encoder().then_some(2);
        let step = match self.objective.max_documents().or(of_encoder).or(max_documents) {
            Some(most) => self.step.with_documents(most)?,
            None => self.step,
        };
        let step = if let Some(seed) = self.seed_of_draws { step.with_draws(seed)? } else { step };
        Ok(Run { step, ..self })
    }

    /// Casts the weights with the current scales. Called before the first step.
    pub fn quantize_weights(&mut self) -> Result<()> {
        self.step.partition().quantize_weights(&mut self.model)
    }

    /// Sets the names of linears whose products read operands in the compute type in later steps. Their casts still measure.
    pub fn set_high_precision(&mut self, linears: &BTreeSet<String>) {
        self.model.scaling().set_high_precision(linears);
        self.step.forget_captures();
    }

    /// Compares the recipe with the compute type on rows of this rank. See [`TrainStep::compare`].
    pub fn compare(&mut self, batch: &Batch) -> Result<PrecisionComparison> {
        self.step.compare(&mut self.model, batch)
    }

    /// Compares as [`Run::compare`] does. Also copies the tensors of this rank whose names match `patterns`.
    pub fn observe(
        &mut self,
        batch: &Batch,
        patterns: &[String],
    ) -> Result<(PrecisionComparison, Vec<(String, Tensor)>)> {
        self.step.compare_observed(&mut self.model, batch, Some(Observer::new(patterns)))
    }

    /// Runs forward and backward of rows of this rank twice. See [`TrainStep::repeat`].
    pub fn repeat(&mut self, batch: &Batch, precision: StepPrecision, deterministic: bool) -> Result<Repeated> {
        self.step.repeat(&mut self.model, batch, precision, deterministic)
    }

    /// Runs a step on the micro-batches that were loaded into [`Run::step`].
    pub fn step(&mut self, learning_rate: f64, precision: StepPrecision) -> Result<StepResult> {
        self.step.run(&mut self.model, &mut *self.optimizer, learning_rate, precision)
    }
}
