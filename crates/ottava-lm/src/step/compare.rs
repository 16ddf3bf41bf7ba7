//! Runs forward and backward of one micro-batch twice without an update: in the recipe's precision and in the compute type, or both times in
//! the same.

use super::action::Action;
use super::check::Places;
use super::run::name;
use super::{MicroBatch, Program, TrainStep, total};
use crate::data::Batch;
use crate::error::{Error, Result};
use crate::mode::StepPrecision;
use crate::models::{ComparedSaved, Decoder};
use crate::parallel::{Exchange, Message, Schedule, ScheduleKind};
use crate::scaling::{Compared, Comparison, Observer, PrecisionComparison, Quantity, sampling_step};
use ottava_tensor::Tensor;
use ottava_tensor::comm::Axis;
use ottava_tensor::ops::{IGNORE_INDEX, SUMS};

impl TrainStep {
    /// Compares forward and backward of `batch`, rows of this rank, by the recipe and in the compute type. All ranks call it, before a step,
    /// with as many rows. It changes neither gradients nor the scaling state.
    pub fn compare(&self, model: &mut Decoder, batch: &Batch) -> Result<PrecisionComparison> {
        Ok(self.compare_observed(model, batch, None)?.0)
    }

    /// [`TrainStep::compare`], which also copies tensors of this rank to an `observer`, by name.
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
        // Backward starts from this multiple of the gradient of the summed loss.
        let per_unit = self.loss_scale.value / self.units() as f64;
        let loss_per_square = tokens / (sampled * targets * per_unit * per_unit);
        let own: Vec<Bits> = own.into_iter().map(bits).collect();
        let all = ranks.all("comparisons of tensors", Ok(own))?;
        let tensors = Comparison::merge(all.into_iter().flatten().map(comparison));
        let losses = [by_recipe / targets, high / targets];
        Ok((PrecisionComparison { losses, tensors, loss_per_square }, observed))
    }

    /// Runs forward of `batch`, rows of this rank, twice in `precision`, and backward if its bits are the same in every run, as `deterministic`
    /// says. All ranks call it, before a step, with as many rows.
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

    /// The schedule of one micro-batch.
    fn schedule_of_comparison(&self) -> Schedule {
        let kind = match self.schedule.kind {
            ScheduleKind::ZeroBubble => ScheduleKind::default(),
            kind => kind,
        };
        Schedule { kind, micro_batches: 1, ..self.schedule }
    }

    /// Runs both passes.
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
        let ran = self.run_comparison(program, model, micro_batch);
        let compared = model.end_comparison();
        let (losses, compared) = (ran?, compared?);
        self.partition.ranks().compare_gpu_calls("a comparison of two passes")?;
        Ok(ComparedPasses { losses, compared })
    }

    fn run_comparison(
        &self,
        program: &Program,
        model: &mut Decoder,
        micro_batch: &MicroBatch,
    ) -> Result<Option<[Tensor; 2]>> {
        let mut exchange = Exchange::of_weights(&self.partition);
        let mut messages = self.partition.ranks().messages();
        let MicroBatch { inputs, targets, sequences, .. } = micro_batch;
        let (mut x, mut dy): (Option<[Tensor; 2]>, Option<[Tensor; 2]>) = (None, None);
        let (mut saved, mut losses): (Vec<ComparedSaved>, _) = (Vec::new(), None);
        for action in &program.actions {
            match *action {
                Action::Forward { stage, .. } => {
                    let before = x.take().unwrap_or_else(|| [inputs.clone(), inputs.clone()]);
                    let (y, of_stage) = model.compare_forward(stage, &before, sequences, &mut exchange)?;
                    x = Some(y);
                    saved.push(of_stage);
                }
                Action::Loss { .. } => {
                    let normed = x.take().expect(CHECKED);
                    let scale = &self.loss_scale.per_unit;
                    let (of_tokens, gradients) = model.compare_losses(&normed, targets, scale, &mut exchange)?;
                    (losses, dy) = (Some(of_tokens), Some(gradients));
                }
                Action::Backward { stage, .. } => {
                    let (gradients, of_stage) = (dy.take().expect(CHECKED), saved.pop().expect(CHECKED));
                    dy = Some(model.compare_backward(stage, gradients, of_stage, sequences, &mut exchange)?);
                }
                Action::Send { message, .. } => {
                    let sent = match message {
                        Message::Activation => x.take(),
                        Message::Gradient => dy.take(),
                    };
                    for tensor in sent.expect(CHECKED) {
                        messages.send(message, &name(message, 0), &tensor)?;
                    }
                }
                Action::Receive { message, .. } => {
                    let place = model.scaling().scales().layer_ranks().place(Axis::Tensor);
                    let shape = [place.share(inputs.len()), model.config().channels];
                    let mut receive = || {
                        let into = Tensor::empty(model.device(), &shape, model.recipe().compute)?;
                        messages.receive(message, &name(message, 0), into)
                    };
                    let received = Some([receive()?, receive()?]);
                    match message {
                        Message::Activation => x = received,
                        Message::Gradient => dy = received,
                    }
                }
                Action::StoreLosses { .. } | Action::Reduce | Action::SumTied | Action::Norm | Action::Update => {
                    return Err(Error::Program(format!("a comparison has no action like: {action}")));
                }
            }
        }
        Ok(losses)
    }
}

/// What two passes gave on this rank.
struct ComparedPasses {
    /// The losses of both, on a rank with the last stage.
    losses: Option<[Tensor; 2]>,
    /// The comparisons of this rank's tensors.
    compared: Compared,
}

/// What two passes of the same precision gave.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct Repeated {
    /// The first tensor that differs between them, with the rank that has it.
    pub different: Option<String>,
    /// The tensors of all ranks in the order of the passes, each with the bits of the sum of the squares of its elements, in F64.
    pub digests: Vec<(String, u64)>,
}

/// A tensor that two passes of the same precision have.
fn in_words(compared: &Comparison) -> String {
    match compared.quantity {
        Quantity::Gradient => format!("gradient of {}", compared.name),
        Quantity::GradInput => format!("gradient by the input of {}", compared.name),
        _ => format!("output of {}", compared.name),
    }
}

/// The bits of a [`Comparison`], since text has no infinities.
type Bits = (String, Quantity, [u64; SUMS]);

fn bits(Comparison { name, quantity, sums }: Comparison) -> Bits {
    (name, quantity, sums.map(f64::to_bits))
}

fn comparison((name, quantity, sums): Bits) -> Comparison {
    Comparison { name, quantity, sums: sums.map(f64::from_bits) }
}

/// Why a tensor that an action takes is there.
const CHECKED: &str = "the program was checked";
