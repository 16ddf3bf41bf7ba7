//! Runs a program: each action calls the model, its ranks or its optimizer. No function of this file waits for the device or reads from it.

use super::action::Action;
use super::check::Places;
use super::micro_batch::{LossScale, MicroBatch};
use super::passes::{Passes, Single};
use super::program::Program;
use ottava_common::error::{Error, Result};
use ottava_models::Decoder;
use ottava_parallel::optim::Optimizer;
use ottava_parallel::{Exchange, Message, Messages, Part, Partition};
use ottava_recipe::context::DeferredWgrads;
use ottava_recipe::mode::{Pass, StepPrecision};
use ottava_recipe::param::Grad;
use ottava_tensor::Tensor;
use ottava_tensor::comm::Axis;
use ottava_tensor::ops::limit_norm;
use std::collections::HashMap;

/// The inputs of a program, apart from the model.
pub struct ProgramInputs<'a> {
    /// The micro-batches, by number.
    pub micro_batches: &'a [MicroBatch],
    /// The factors of the losses that backward differentiates; `None` for an evaluation.
    pub loss_scale: Option<&'a LossScale>,
    /// The precision of products.
    pub precision: StepPrecision,
    /// The ranks that run the program, and how they divide the model.
    pub partition: &'a Partition,
}

/// The results of a step, on the device.
pub struct Results {
    /// The values of the losses, `[micro-batches, values]`. See [`Loss::losses_and_gradient`](super::Loss::losses_and_gradient).
    pub(super) losses: Tensor,
    /// The norm of the gradients, F32 `[1]`.
    pub(super) norm: Tensor,
    /// The maximum norm with which a step updates, F32 `[1]`; `None` if the step has no limit.
    pub(super) limit: Option<Tensor>,
    /// The relative error of the gradients that ranks send, F32 `[1]`; `None` if ranks do not send gradients as FP8 codes.
    pub(super) reduce_error: Option<Tensor>,
}

/// The objects that the actions at the end of a step read and write.
pub struct StepEnd<'a> {
    /// The optimizer, which updates the weights.
    pub optimizer: &'a mut dyn Optimizer,
    /// The tensors that receive losses and norm.
    pub results: &'a mut Results,
}

impl Program {
    /// Enqueues all actions on `model`, which holds the stages of this process. `end` is required for actions that store losses, reduce or update.
    /// Returns the losses `[T]` that no action stored, in the order of the micro-batches.
    ///
    /// Errors with [`Error::Program`] before anything runs, if [`Program::check`] rejects the program or a required input is missing.
    pub fn run(&self, model: &mut Decoder, inputs: &ProgramInputs, end: Option<StepEnd>) -> Result<Vec<Tensor>> {
        let pipeline = inputs.partition.ranks().pipeline();
        let places = Places::new(pipeline.size(), pipeline.rank(), model.stages());
        self.check(&places, inputs.micro_batches.len())?;
        let is_given = |action: &Action| match action {
            Action::Loss { .. } => self.pass != Pass::Training || inputs.loss_scale.is_some(),
            Action::StoreLosses { .. } | Action::Reduce | Action::Norm | Action::Update => end.is_some(),
            _ => true,
        };
        if let Some(action) = self.actions.iter().find(|action| !is_given(action)) {
            return Err(Error::Program(format!(
                "the program has an action ({action}) that needs a loss scale, an optimizer or results which were not given"
            )));
        }
        let ProgramInputs { loss_scale, precision, .. } = *inputs;
        let losses = self.run_passes(&Single { pass: self.pass, precision, loss_scale }, model, inputs, end)?;
        Ok(losses.into_iter().map(|[losses]| losses).collect())
    }

    /// Enqueues all actions of `passes`. Returns the losses that no action stored, in the order of the micro-batches.
    pub(super) fn run_passes<const N: usize, P: Passes<N>>(
        &self,
        passes: &P,
        model: &mut Decoder,
        inputs: &ProgramInputs,
        mut end: Option<StepEnd>,
    ) -> Result<Vec<[Tensor; N]>> {
        let exchange = match self.reduces() {
            true => Exchange::of_step(inputs.partition),
            false => Exchange::of_weights(inputs.partition),
        };
        let slots = inputs.micro_batches.iter().map(|_| Slot::default()).collect();
        let messages = inputs.partition.ranks().messages();
        let mut execution = Execution { passes, model, inputs, exchange, messages, slots };
        for action in &self.actions {
            match (action, &mut end) {
                (Action::Forward { stage, micro_batch }, _) => execution.forward(*stage, *micro_batch)?,
                (Action::Loss { micro_batch }, _) => execution.loss(*micro_batch)?,
                (Action::Backward { stage, micro_batch, part, reduces }, _) => {
                    let is_last = *micro_batch + 1 == inputs.micro_batches.len();
                    execution.exchange.reduce_after_backward(*reduces, is_last);
                    execution.backward(*stage, *micro_batch, *part)?;
                }
                (Action::Send { message, micro_batch, .. }, _) => execution.send(*message, *micro_batch)?,
                (Action::Receive { message, micro_batch, .. }, _) => execution.receive(*message, *micro_batch)?,
                (Action::SumTied, _) => execution.sum_tied()?,
                (Action::StoreLosses { micro_batch }, Some(StepEnd { results, .. })) => {
                    for losses in execution.slots[*micro_batch].losses.take().expect(CHECKED) {
                        results.losses.copy_from(*micro_batch, &losses)?;
                    }
                }
                (Action::Reduce, Some(end)) => execution.reduce(end.results)?,
                (Action::Norm, Some(end)) => execution.norm(end.results)?,
                (Action::Update, Some(end)) => execution.update(end)?,
                (action, None) => {
                    return Err(Error::Program(format!(
                        "the program ends without an update, and has an action: {action}"
                    )));
                }
            }
        }
        Ok(execution.slots.into_iter().filter_map(|slot| slot.losses).collect())
    }
}

/// The reason why a slot contains the tensor that an action takes.
const CHECKED: &str = "the program was checked";

/// The tensors of a micro-batch in flight between actions, one for each of `N` passes.
struct Slot<const N: usize, S> {
    /// The output of the last forward, for the next stage or the loss.
    activation: Option<[Tensor; N]>,
    /// The activations that forward of each stage saved for its backward.
    saved: Vec<S>,
    /// The gradient from which the next backward starts.
    gradient: Option<[Tensor; N]>,
    /// The products that backward has deferred, by stage.
    deferred: HashMap<usize, DeferredWgrads>,
    losses: Option<[Tensor; N]>,
}

impl<const N: usize, S> Default for Slot<N, S> {
    fn default() -> Slot<N, S> {
        Slot { activation: None, saved: Vec::new(), gradient: None, deferred: HashMap::new(), losses: None }
    }
}

/// The state of a running program.
struct Execution<'a, const N: usize, P: Passes<N>> {
    passes: &'a P,
    model: &'a mut Decoder,
    inputs: &'a ProgramInputs<'a>,
    exchange: Exchange<'a>,
    messages: Messages<'a>,
    /// One slot for each micro-batch.
    slots: Vec<Slot<N, P::Saved>>,
}

impl<const N: usize, P: Passes<N>> Execution<'_, N, P> {
    fn forward(&mut self, stage: usize, micro_batch: usize) -> Result<()> {
        let Execution { passes, model, inputs, exchange, slots, .. } = self;
        let slot = &mut slots[micro_batch];
        let before = slot.activation.take();
        let (y, saved) = passes.forward(model, stage, before, &inputs.micro_batches[micro_batch], exchange)?;
        slot.activation = Some(y);
        slot.saved.extend(saved);
        Ok(())
    }

    fn loss(&mut self, micro_batch: usize) -> Result<()> {
        let Execution { passes, model, inputs, exchange, slots, .. } = self;
        let slot = &mut slots[micro_batch];
        let normed = slot.activation.take().expect(CHECKED);
        let (losses, gradient) = passes.losses(model, normed, &inputs.micro_batches[micro_batch], exchange)?;
        (slot.losses, slot.gradient) = (Some(losses), gradient);
        Ok(())
    }

    fn backward(&mut self, stage: usize, micro_batch: usize, part: Part) -> Result<()> {
        let Execution { passes, model, inputs, exchange, slots, .. } = self;
        let (micro_batch, slot) = (&inputs.micro_batches[micro_batch], &mut slots[micro_batch]);
        if part == Part::Wgrad {
            return model.wgrads(stage, slot.deferred.remove(&stage).expect(CHECKED), exchange);
        }
        let before = (slot.gradient.take().expect(CHECKED), slot.saved.pop().expect(CHECKED));
        slot.gradient = match part {
            Part::Dgrad => {
                let (dx, deferred) = passes.dgrads(model, stage, before, micro_batch, exchange)?;
                slot.deferred.insert(stage, deferred);
                dx
            }
            Part::Both | Part::Wgrad => passes.backward(model, stage, before, micro_batch, exchange)?,
        };
        Ok(())
    }

    fn send(&mut self, message: Message, micro_batch: usize) -> Result<()> {
        let slot = &mut self.slots[micro_batch];
        let tensors = match message {
            Message::Activation => slot.activation.take(),
            Message::Gradient => slot.gradient.take(),
        };
        let name = name(message, micro_batch);
        tensors.expect(CHECKED).iter().try_for_each(|tensor| self.messages.send(message, &name, tensor))
    }

    /// Outputs of stages and their gradients have the compute type. If ranks divide tokens, they hold the tokens of this rank.
    fn receive(&mut self, message: Message, micro_batch: usize) -> Result<()> {
        let place = self.model.ranks().place(Axis::Tensor);
        let tokens = place.share(self.inputs.micro_batches[micro_batch].inputs.len());
        let shape = [tokens, self.model.config().stream.channels];
        let name = name(message, micro_batch);
        let mut received = Vec::with_capacity(N);
        for _ in 0..N {
            let into = Tensor::empty(self.model.device(), &shape, self.model.recipe().compute)?;
            received.push(self.messages.receive(message, &name, into)?);
        }
        let received: Option<[Tensor; N]> = received.try_into().ok();
        let slot = &mut self.slots[micro_batch];
        match message {
            Message::Activation => slot.activation = received,
            Message::Gradient => slot.gradient = received,
        }
        Ok(())
    }

    fn reduce(&mut self, results: &mut Results) -> Result<()> {
        let _update = self.model.device().scope("update");
        let (params, scaling) = self.model.parameters_and_scaling();
        let error = self.exchange.finish(params, scaling)?;
        if let (Some(place), Some(error)) = (&mut results.reduce_error, error) {
            place.copy_from(0, &error)?;
        }
        Ok(())
    }

    fn sum_tied(&mut self) -> Result<()> {
        let _update = self.model.device().scope("update");
        let pipeline = self.inputs.partition.ranks().pipeline();
        let Some(weight) = self.model.tied_weight() else { return Ok(()) };
        match weight.gradient.take() {
            Some(Grad::Plain(gradient)) => {
                let name = format!("gradient of {}", weight.identity.name());
                weight.gradient.set(Grad::Plain(pipeline.sum_of_ends(&name, gradient)?));
            }
            // With ZeRO, the slice of this rank can have no elements of the weight. Then the slice of the other rank has none either.
            None => {}
            Some(Grad::Scaled(_)) => unreachable!("only gradients of the matrices of blocks have scales"),
        }
        Ok(())
    }

    fn norm(&mut self, results: &mut Results) -> Result<()> {
        let partition = self.inputs.partition;
        let _update = self.model.device().scope("update");
        Ok(results.norm.copy_from(0, &partition.grad_norm(self.model)?)?)
    }

    fn update(&mut self, StepEnd { optimizer, results }: &mut StepEnd) -> Result<()> {
        let partition = self.inputs.partition;
        let _update = self.model.device().scope("update");
        let limited = results.limit.as_ref().map(|limit| limit_norm(&results.norm, limit)).transpose()?;
        partition.update(self.model, *optimizer, limited.as_ref().unwrap_or(&results.norm))?;
        self.model.parameters().into_iter().for_each(|param| param.gradient.clear());
        Ok(())
    }
}

/// Returns the name of a message. Both ranks compare it.
fn name(message: Message, micro_batch: usize) -> String {
    format!("{} of micro-batch {micro_batch}", message.as_str())
}
