//! Runs forward and backward of one micro-batch twice without an update: once in the recipe's precision and once in the compute type, or both times
//! in the same precision.

use super::check::Places;
use super::passes::SideBySide;
use super::{LossScale, MicroBatch, Program, ProgramInputs, TrainStep, host, total};
use ottava_common::error::Result;
use ottava_data::Batch;
use ottava_models::Decoder;
use ottava_parallel::{Schedule, ScheduleKind, Shared};
use ottava_recipe::mode::StepPrecision;
use ottava_recipe::scaling::{Compared, Comparison, Observer, PrecisionComparison, Quantity, sampling_step};
use ottava_tensor::Tensor;
use ottava_tensor::comm::Axis;
use ottava_tensor::ops::{IGNORE_INDEX, SUMS};

impl TrainStep {
    /// Compares the recipe with the compute type in forward and backward of `batch`, which holds rows of this rank. All ranks call it before a step,
    /// with equal numbers of rows. It changes neither gradients nor the scaling state.
    pub fn compare(&self, model: &mut Decoder, batch: &Batch) -> Result<PrecisionComparison> {
        Ok(self.compare_observed(model, batch, None)?.0)
    }

    /// Compares as [`TrainStep::compare`] does. Also returns the tensors of this rank that `observer` copies, by name.
    pub fn compare_observed(
        &self,
        model: &mut Decoder,
        batch: &Batch,
        observer: Option<Observer>,
    ) -> Result<(PrecisionComparison, Vec<(String, Tensor)>)> {
        let (ranks, schedule) = (self.partition.ranks(), self.schedule_of_comparison());
        let program = Program::gradients_of(&schedule, ranks.pipeline().rank());
        let micro_batch = MicroBatch::new(batch, model.device(), ranks.place(Axis::Context))?;
        let precisions = [StepPrecision::Recipe, StepPrecision::High];
        let passes = self.compare_passes(&program, model, &micro_batch, precisions, observer)?;
        let ComparedPasses { losses, compared: Compared { tensors: own, observed } } = passes;
        let targets = micro_batch.sequences.own(&batch.targets);
        let targets = targets.iter().filter(|&&target| target != IGNORE_INDEX).count() as f64;
        let sum = |losses: &Tensor| total(losses);
        let [by_recipe, high] = match &losses {
            Some([by_recipe, high]) => [sum(by_recipe)?, sum(high)?],
            None => [0.0; 2],
        };
        let tokens = micro_batch.inputs.len();
        let sampled = tokens.div_ceil(sampling_step(tokens)) as f64;
        let all = ranks.gather("losses of a comparison", [by_recipe, high, targets, tokens as f64, sampled])?;
        let sum_of = |at: usize| ranks.of_losses(&all).map(|of_rank| of_rank[at]).sum::<f64>();
        let [by_recipe, high, targets, tokens, sampled] = std::array::from_fn(sum_of);
        let targets = targets.max(1.0);
        // Backward starts from the gradient of the summed loss times this factor.
        let per_unit = self.loss_scale_value / self.units() as f64;
        let loss_per_square = tokens / (sampled * targets * per_unit * per_unit);
        let own: Vec<Bits> = own.into_iter().map(bits).collect();
        let all = ranks.all("comparisons of tensors", Ok(own))?;
        let tensors = Comparison::merge(all.into_iter().flatten().map(comparison));
        let losses = [by_recipe / targets, high / targets];
        Ok((PrecisionComparison { losses, tensors, loss_per_square }, observed))
    }

    /// Runs forward of `batch`, which holds rows of this rank, twice in `precision`. Also runs backward if `deterministic` says that its bits are the
    /// same in every run. All ranks call it before a step, with equal numbers of rows.
    pub fn repeat(
        &self,
        model: &mut Decoder,
        batch: &Batch,
        precision: StepPrecision,
        deterministic: bool,
    ) -> Result<Repeated> {
        let (ranks, schedule) = (self.partition.ranks(), self.schedule_of_comparison());
        let program = match deterministic {
            true => Program::gradients_of(&schedule, ranks.pipeline().rank()),
            false => Program::evaluation_of(&schedule, ranks.pipeline().rank()),
        };
        let micro_batch = MicroBatch::new(batch, model.device(), ranks.place(Axis::Context))?;
        let passes = self.compare_passes(&program, model, &micro_batch, [precision; 2], None)?;
        let ComparedPasses { losses, compared: Compared { tensors: own, .. } } = passes;
        let mut different = own.iter().find(|compared| !compared.is_equal()).map(in_words);
        if let (None, Some([first, second])) = (&different, &losses)
            && first.read_bytes()? != second.read_bytes()?
        {
            different = Some("losses".into());
        }
        let different = ranks.first_named("the first tensor that differs", different)?;
        let own: Vec<Bits> = own.into_iter().map(bits).collect();
        let all = ranks.all("digests of tensors", Ok(own))?;
        let all = Comparison::merge(all.into_iter().flatten().map(comparison));
        let digests = all.iter().map(|compared| (in_words(compared), compared.sums[0].to_bits())).collect();
        Ok(Repeated { different, digests })
    }

    /// Returns the factors of losses for one micro-batch on each rank. The factor of a unit is the same as in a step. The factor of the losses of
    /// layers is the factor in a step whose micro-batches all equal this one.
    fn loss_scale_of(&self, micro_batch: &MicroBatch) -> Result<LossScale> {
        let ranks = self.partition.ranks();
        let own = micro_batch.targets.to_vec::<i32>()?.into_iter().filter(|&target| target != IGNORE_INDEX).count();
        let all = ranks.gather("targets of a comparison", [own as f64])?;
        let targets = ranks.among(Shared::Tokens, &all).map(|[targets]| targets).sum::<f64>();
        let micro_batches = self.micro_batches_of_all() / self.schedule.micro_batches;
        let per_unit = self.loss_scale_value / self.units() as f64;
        let LossScale { per_unit: of_unit, per_micro_batch } = &self.loss_scale;
        let mut per_micro_batch = per_micro_batch.empty_like()?;
        host::write(&mut per_micro_batch, &[per_unit * targets / micro_batches as f64])?;
        Ok(LossScale { per_unit: of_unit.clone(), per_micro_batch })
    }

    /// Returns the schedule of one micro-batch.
    fn schedule_of_comparison(&self) -> Schedule {
        let kind = match self.schedule.kind {
            ScheduleKind::ZeroBubble => ScheduleKind::default(),
            kind => kind,
        };
        Schedule { kind, micro_batches: 1, ..self.schedule }
    }

    /// Runs both passes in `precisions`.
    fn compare_passes(
        &self,
        program: &Program,
        model: &mut Decoder,
        micro_batch: &MicroBatch,
        precisions: [StepPrecision; 2],
        observer: Option<Observer>,
    ) -> Result<ComparedPasses> {
        let pipeline = self.partition.ranks().pipeline();
        program.check(&Places::new(pipeline.size(), pipeline.rank(), model.stages()), 1)?;
        model.begin_comparison(precisions, observer);
        let loss_scale = self.loss_scale_of(micro_batch)?;
        let (micro_batches, precision) = (std::slice::from_ref(micro_batch), precisions[0]);
        let inputs =
            ProgramInputs { micro_batches, loss_scale: Some(&loss_scale), precision, partition: &self.partition };
        let ran = program.run_passes(&SideBySide { loss_scale: &loss_scale }, model, &inputs, None);
        let compared = model.end_comparison();
        let (losses, compared) = (ran?.pop(), compared?);
        self.partition.ranks().compare_gpu_calls("a comparison of two passes")?;
        Ok(ComparedPasses { losses, compared })
    }
}

/// The results of two passes on this rank.
struct ComparedPasses {
    /// The losses of both passes, on a rank with the last stage.
    losses: Option<[Tensor; 2]>,
    /// The comparisons of this rank's tensors.
    compared: Compared,
}

/// The results of two passes of the same precision.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct Repeated {
    /// The first tensor that differs between the passes, and the rank that has it.
    pub different: Option<String>,
    /// The tensors of all ranks in the order of the passes. Each has the bits of the sum of the squares of its elements, in F64.
    pub digests: Vec<(String, u64)>,
}

/// Returns in words which tensor of two passes was compared.
fn in_words(compared: &Comparison) -> String {
    match compared.quantity {
        Quantity::Gradient => format!("gradient of {}", compared.name),
        Quantity::GradInput => format!("gradient by the input of {}", compared.name),
        _ => format!("output of {}", compared.name),
    }
}

/// A [`Comparison`] with its sums as bits, since text cannot represent infinities.
type Bits = (String, Quantity, [u64; SUMS]);

fn bits(Comparison { name, quantity, sums }: Comparison) -> Bits {
    (name, quantity, sums.map(f64::to_bits))
}

fn comparison((name, quantity, sums): Bits) -> Comparison {
    Comparison { name, quantity, sums: sums.map(f64::from_bits) }
}
