//! One optimizer step: forward and backward of its micro-batches, clipping, AdamW, scales. On a GPU the second step is recorded and
//! all later ones are replayed.

use crate::data::Batch;
use crate::error::Result;
use crate::evaluate::total;
use crate::models::Decoder;
use crate::optim::AdamWOptimizer;
use ottava_tensor::cuda::Graph;
use ottava_tensor::ops::{cast, real_type};
use ottava_tensor::{DType, Device, Tensor};

/// The tensors that all steps of a run share, and the recorded step.
pub struct TrainStep {
    /// Sequences of a micro-batch.
    rows: usize,
    /// Of each micro-batch: I32 `[T]`.
    inputs: Vec<Tensor>,
    targets: Vec<Tensor>,
    results: Results,
    recording: Recording,
    /// Whether the recorded step has all products in high precision.
    high_precision: bool,
    /// What the loss is multiplied by, so that its gradients do not vanish in FP16.
    loss_scale: f64,
}

/// What a step leaves on the device.
struct Results {
    /// `[micro-batches, T]`.
    losses: Tensor,
    /// F32 `[1]`.
    norm: Tensor,
}

/// How far the recording is.
enum Recording {
    /// Nothing is recorded: there is no GPU, or it was not possible.
    Never,
    /// Kernels are to be compiled and products to be timed first, by one step that runs.
    AfterThisStep,
    Due,
    Done(Graph),
}

/// What a step has come to.
#[derive(Clone, Copy, Debug, PartialEq)]
pub struct StepResult {
    /// Mean loss per token, before the update.
    pub loss: f64,
    /// Global norm of the gradients, before clipping. Where it is not finite, no weight was changed.
    pub grad_norm: f64,
}

impl TrainStep {
    /// Steps of `passes` micro-batches of `rows` sequences of `seq_len` tokens.
    pub fn new(model: &Decoder, passes: usize, rows: usize, seq_len: usize) -> Result<TrainStep> {
        let (device, tokens) = (model.device(), rows * seq_len);
        let ids = || (0..passes).map(|_| Ok(Tensor::zeros(device, &[tokens], DType::I32)?)).collect::<Result<Vec<_>>>();
        let losses = Tensor::empty(device, &[passes, tokens], real_type(model.recipe().compute))?;
        Ok(TrainStep {
            rows,
            inputs: ids()?,
            targets: ids()?,
            results: Results { losses, norm: Tensor::empty(device, &[1], DType::F32)? },
            recording: match device {
                Device::Cpu | Device::DryCpu(_) => Recording::Never,
                Device::Cuda(_) => Recording::AfterThisStep,
            },
            high_precision: false,
            loss_scale: 1.0,
        })
    }

    /// The same, always launched call by call.
    pub fn eager(self) -> TrainStep {
        TrainStep { recording: Recording::Never, ..self }
    }

    /// Multiplies the loss of the coming steps, before its gradients are computed.
    pub fn set_loss_scale(&mut self, loss_scale: f64) {
        if loss_scale != std::mem::replace(&mut self.loss_scale, loss_scale)
            && let Recording::Done(_) = self.recording
        {
            self.recording = Recording::Due;
        }
    }

    /// Puts a micro-batch in its place for the coming step.
    pub fn load(&mut self, pass: usize, batch: &Batch) -> Result<()> {
        self.inputs[pass].write_bytes(bytemuck::cast_slice(&batch.inputs))?;
        self.targets[pass].write_bytes(bytemuck::cast_slice(&batch.targets))?;
        Ok(())
    }

    /// Runs the step on what was loaded, and waits for it.
    pub fn run(
        &mut self,
        model: &mut Decoder,
        optimizer: &mut AdamWOptimizer,
        learning_rate: f64,
    ) -> Result<StepResult> {
        optimizer.begin_step(learning_rate, self.loss_scale)?;
        let high_precision = model.scaling().is_high_precision();
        if high_precision != std::mem::replace(&mut self.high_precision, high_precision)
            && !matches!(self.recording, Recording::Never)
        {
            self.recording = Recording::AfterThisStep;
        }
        // Memory is given to others between steps, as for an evaluation; where it has not come back, the step is recorded anew.
        if let Recording::Done(graph) = &mut self.recording
            && !graph.is_valid()
        {
            self.recording = Recording::Due;
        }
        match &mut self.recording {
            Recording::Never => self.enqueue(model, optimizer)?,
            Recording::AfterThisStep => {
                self.enqueue(model, optimizer)?;
                self.recording = Recording::Due;
            }
            Recording::Due => self.record(model, optimizer)?,
            Recording::Done(graph) => {
                graph.replay()?;
                model.scaling().count_replayed_update();
            }
        }
        let Results { losses, norm } = &self.results;
        let grad_norm = f64::from(norm.to_vec::<f32>()?[0]) / self.loss_scale;
        Ok(StepResult { loss: total(losses)? / losses.len() as f64, grad_norm })
    }

    fn record(&mut self, model: &mut Decoder, optimizer: &mut AdamWOptimizer) -> Result<()> {
        let Device::Cuda(gpu) = model.device().clone() else { unreachable!("only work of a GPU is recorded") };
        match Graph::capture(&gpu, || self.enqueue(model, optimizer)) {
            Ok(mut graph) => {
                graph.replay()?;
                self.recording = Recording::Done(graph);
                Ok(())
            }
            Err(error) => {
                tracing::warn!("steps are not recorded, each kernel is launched by itself: {error}");
                self.recording = Recording::Never;
                model.parameters().into_iter().for_each(|param| param.clear_grad());
                self.enqueue(model, optimizer)
            }
        }
    }

    /// All work of a step; nothing in here waits for the device or reads from it.
    fn enqueue(&mut self, model: &mut Decoder, optimizer: &mut AdamWOptimizer) -> Result<()> {
        let Results { losses, norm } = &mut self.results;
        let scale = self.loss_scale / losses.len() as f64;
        for (pass, (inputs, targets)) in self.inputs.iter().zip(&self.targets).enumerate() {
            losses.copy_from(pass, &model.losses_and_gradients(inputs, targets, self.rows, scale)?)?;
        }
        let _update = model.device().scope("update");
        norm.copy_from(0, &AdamWOptimizer::grad_norm(&model.parameters())?)?;
        update(model, optimizer, norm)
    }

    /// The first parameter whose gradient is not finite, after a step whose gradients were not: the step's micro-batches are run
    /// once more, since an update leaves no gradients behind.
    pub fn first_bad_gradient(&self, model: &mut Decoder) -> Result<Option<String>> {
        for (inputs, targets) in self.inputs.iter().zip(&self.targets) {
            model.losses_and_gradients(inputs, targets, self.rows, 1.0 / self.results.losses.len() as f64)?;
        }
        let mut bad = None;
        for param in model.parameters() {
            let grad = param.grad.take().expect("backward has run");
            let finite = || -> Result<bool> {
                Ok(cast(&grad.values()?, DType::F32)?.to_vec::<f32>()?.iter().all(|g| g.is_finite()))
            };
            if bad.is_none() && !finite()? {
                bad = Some(param.name().to_string());
            }
        }
        Ok(bad)
    }
}

/// Ends a step whose gradients are there: scales move on first, so that the optimizer's pass can cast the new weights by them.
fn update(model: &mut Decoder, optimizer: &mut AdamWOptimizer, norm: &Tensor) -> Result<()> {
    let (mut params, scaling) = model.parameters_and_scaling();
    scaling.update()?;
    optimizer.step(&mut params, scaling, norm)?;
    params.into_iter().for_each(|param| param.clear_grad());
    Ok(())
}
