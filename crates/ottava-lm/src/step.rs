//! One optimizer step: forward and backward of its micro-batches, clipping, AdamW, scales. On a GPU the second step of each kind is
//! captured as a CUDA graph, and later ones are replayed. Ranks launch each step alike: NCCL wants a collective captured on all of
//! them or on none.

use crate::capture::{Capture, Launch};
use crate::context::Sequences;
use crate::data::Batch;
use crate::error::{Error, Result};
use crate::evaluate::total;
use crate::mode::StepPrecision;
use crate::models::Decoder;
use crate::optim::AdamWOptimizer;
use crate::parallel::{Exchange, Partition};
use ottava_tensor::cuda::Graph;
use ottava_tensor::ops::{IGNORE_INDEX, cast, real_type};
use ottava_tensor::{DType, Device, Tensor};

/// The tensors that all steps of a run share, and the captured steps.
pub struct TrainStep {
    /// How the tokens of each micro-batch lie: one for all where each row is one document.
    sequences: Vec<Sequences>,
    /// Of each micro-batch: I32 `[T]`.
    inputs: Vec<Tensor>,
    targets: Vec<Tensor>,
    /// Of each micro-batch: targets that are not ignored.
    target_tokens: Vec<usize>,
    /// Of each micro-batch: inputs of no document.
    padding: Vec<usize>,
    results: Results,
    /// Of steps by the recipe, and of steps in high precision, so that alternating throws none away.
    captures: [Capture; 2],
    loss_scale: LossScaleOnDevice,
    /// The ranks that share a step, with equal numbers of rows.
    partition: Partition,
}

/// What a step leaves on the device.
struct Results {
    /// `[micro-batches, T]`.
    losses: Tensor,
    /// F32 `[1]`.
    norm: Tensor,
    /// F32 `[1]`, of steps whose gradients ranks send as FP8 codes.
    reduce_error: Option<Tensor>,
}

/// The factor of the loss of a step, whose inverse the update applies, so that gradients do not vanish in FP16.
struct LossScaleOnDevice {
    value: f64,
    /// `value / tokens`, in the real type, `[1]`: backward reads it there, so a captured step never has a stale one.
    per_token: Tensor,
}

impl LossScaleOnDevice {
    fn set(&mut self, value: f64, tokens: usize) -> Result<()> {
        let per_token = Tensor::from_slice(&Device::Cpu, &[1], &[value / tokens as f64])?;
        self.per_token.write_bytes(&cast(&per_token, self.per_token.dtype())?.read_bytes()?)?;
        self.value = value;
        Ok(())
    }
}

/// What a step has come to.
#[derive(Clone, Copy, Debug, PartialEq)]
pub struct StepResult {
    /// Mean loss per target token, before the update.
    pub loss: f64,
    /// Tokens of documents that all ranks have read; padding is none.
    pub tokens: u64,
    /// Global norm of the gradients, before clipping. Where it is not finite, no weight was changed.
    pub grad_norm: f64,
    /// Of the gradients that this rank sent as FP8 codes: the norm of what their casts lost, over their norm.
    pub reduce_error: Option<f64>,
}

impl TrainStep {
    /// Steps of one rank, of `passes` micro-batches of `rows` sequences of `seq_len` tokens.
    pub fn new(model: &Decoder, passes: usize, rows: usize, seq_len: usize) -> Result<TrainStep> {
        TrainStep::shared(model, passes, rows, seq_len, Partition::solo())
    }

    /// Steps that the ranks of `partition` share, each with `passes` micro-batches of `rows` sequences of `seq_len` tokens.
    pub fn shared(
        model: &Decoder,
        passes: usize,
        rows: usize,
        seq_len: usize,
        partition: Partition,
    ) -> Result<TrainStep> {
        let (device, tokens) = (model.device(), rows * seq_len);
        let sequences = vec![Sequences::new(device, rows, seq_len)?];
        let ids = || (0..passes).map(|_| Ok(Tensor::zeros(device, &[tokens], DType::I32)?)).collect::<Result<Vec<_>>>();
        let real = real_type(model.recipe().compute);
        let losses = Tensor::empty(device, &[passes, tokens], real)?;
        let (inputs, targets) = (ids()?, ids()?);
        let scalar = || Tensor::empty(device, &[1], DType::F32);
        let reduce_error = partition.sends_codes().then(scalar).transpose()?;
        let results = Results { losses, norm: scalar()?, reduce_error };
        let capture = || match device {
            Device::Cpu | Device::DryCpu(_) => Capture::Never,
            Device::Cuda(_) => Capture::AfterThisStep,
        };
        let mut loss_scale = LossScaleOnDevice { value: 1.0, per_token: Tensor::empty(device, &[1], real)? };
        loss_scale.set(1.0, passes * tokens * partition.ranks().size())?;
        let (target_tokens, padding) = (vec![tokens; passes], vec![0; passes]);
        Ok(TrainStep {
            sequences,
            inputs,
            targets,
            target_tokens,
            padding,
            results,
            captures: [capture(), capture()],
            loss_scale,
            partition,
        })
    }

    /// The same, with rows that hold several documents, at most `max_documents` each.
    pub fn with_documents(self, max_documents: usize) -> Result<TrainStep> {
        let Sequences { batch, seq_len, positions, .. } = &self.sequences[0];
        let packed = |_| Sequences::packed(positions.device(), *batch, *seq_len, batch * max_documents);
        let sequences = self.inputs.iter().map(packed).collect::<Result<_>>()?;
        Ok(TrainStep { sequences, ..self })
    }

    /// How the ranks of its steps divide the model.
    pub fn partition(&self) -> &Partition {
        &self.partition
    }

    /// The same, always launched call by call.
    pub fn eager(self) -> TrainStep {
        TrainStep { captures: [Capture::Never, Capture::Never], ..self }
    }

    /// Multiplies the loss of the coming steps, before its gradients are computed.
    pub fn set_loss_scale(&mut self, loss_scale: f64) -> Result<()> {
        match loss_scale == self.loss_scale.value {
            true => Ok(()),
            false => self.loss_scale.set(loss_scale, self.tokens()),
        }
    }

    /// Puts a micro-batch in its place for the coming step.
    pub fn load(&mut self, pass: usize, batch: &Batch) -> Result<()> {
        self.inputs[pass].write_bytes(bytemuck::cast_slice(&batch.inputs))?;
        self.targets[pass].write_bytes(bytemuck::cast_slice(&batch.targets))?;
        match (&batch.documents, self.sequences[0].cu_seqlens.is_some()) {
            (Some(lengths), true) => self.sequences[pass].set_documents(lengths)?,
            (None, false) => {}
            _ => unreachable!("batches have documents if and only if the step was made for them"),
        }
        self.target_tokens[pass] = batch.targets.iter().filter(|&&target| target != IGNORE_INDEX).count();
        self.padding[pass] = batch.padding;
        Ok(())
    }

    /// Runs the step on the loaded micro-batches, and waits for it.
    ///
    /// Backward divides the loss by all tokens of the step, and the update multiplies by tokens over target tokens. So the gradients that
    /// casts measure do not depend on how many targets are ignored, and without ignored targets the factor is exactly 1.
    ///
    /// Errors with [`Error::NoTargets`] on all ranks when all targets are ignored; nothing has changed then.
    pub fn run(
        &mut self,
        model: &mut Decoder,
        optimizer: &mut AdamWOptimizer,
        learning_rate: f64,
        precision: StepPrecision,
    ) -> Result<StepResult> {
        let [mine, padding]: [usize; 2] = [&self.target_tokens, &self.padding].map(|counts| counts.iter().sum());
        let ready = self.capture(precision).ready_for();
        let mine = [mine as f64, padding as f64, f64::from(ready as u8)];
        let all = self.partition.ranks().gather("tokens and launch", mine)?;
        let [target_tokens, padding] = [0, 1].map(|count| all.iter().map(|of_rank| of_rank[count]).sum::<f64>());
        let launch = Launch::agreed(all.iter().map(|&[_, _, ready]| ready));
        if target_tokens == 0.0 {
            let text = "a step has no target token: the loss mask of all its sequences is empty";
            return Err(Error::NoTargets(text.into()));
        }
        let gradient_scale = self.loss_scale.value * (target_tokens / self.tokens() as f64);
        optimizer.begin_step(learning_rate, gradient_scale)?;
        self.partition.begin_step()?;
        match launch {
            Launch::Eager => {
                *self.capture(precision) = Capture::Never;
                self.enqueue(model, optimizer, precision)?;
            }
            Launch::WarmUp => {
                self.enqueue(model, optimizer, precision)?;
                *self.capture(precision) = Capture::Due;
            }
            Launch::Capture => self.record(model, optimizer, precision)?,
            Launch::Replay => {
                let Capture::Done(graph) = self.capture(precision) else { unreachable!("all ranks are ready") };
                graph.replay()?;
                model.scaling().count_replayed_update();
            }
        }
        self.partition.ranks().compare_gpu_calls("a step")?;
        let Results { losses, norm, reduce_error } = &self.results;
        let grad_norm = f64::from(norm.to_vec::<f32>()?[0]) / gradient_scale;
        let all = self.partition.ranks().gather("loss and gradient norm", [total(losses)?, grad_norm])?;
        // All ranks make the same update from the same sums.
        if let Some(rank) =
            all.iter().position(|&[_, norm]| norm != grad_norm && !(norm.is_nan() && grad_norm.is_nan()))
        {
            let (name, here, there) = ("gradient norm", grad_norm, all[rank][1]);
            return Err(Error::NonFinite(format!(
                "ranks have come apart: the {name} is {here} on rank {} and {there} on rank {rank}; resume from the last checkpoint",
                self.partition.ranks().rank()
            )));
        }
        let read = |error: &Tensor| Ok::<_, Error>(f64::from(error.to_vec::<f32>()?[0]));
        let reduce_error = reduce_error.as_ref().map(read).transpose()?;
        let loss = all.iter().map(|[loss, _]| loss).sum::<f64>() / target_tokens;
        Ok(StepResult { loss, tokens: self.tokens() as u64 - padding as u64, grad_norm, reduce_error })
    }

    /// Tokens of a step, of all ranks.
    fn tokens(&self) -> usize {
        self.results.losses.len() * self.partition.ranks().size()
    }

    fn capture(&mut self, precision: StepPrecision) -> &mut Capture {
        &mut self.captures[usize::from(precision == StepPrecision::High)]
    }

    /// Captures the step and replays it. Nothing else is in flight: a step holds all its micro-batches from forward to update. Where a rank
    /// cannot capture, all launch this step and later ones call by call.
    fn record(&mut self, model: &mut Decoder, optimizer: &mut AdamWOptimizer, precision: StepPrecision) -> Result<()> {
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
            captured => {
                let reason = captured.err().map_or("another rank could not".into(), |error| error.to_string());
                tracing::warn!("steps are not captured as CUDA graphs, each kernel is launched by itself: {reason}");
                *self.capture(precision) = Capture::Never;
                model.parameters().into_iter().for_each(|param| param.clear_grad());
                self.partition.begin_step()?;
                self.enqueue(model, optimizer, precision)
            }
        }
    }

    /// All work of a step; nothing in here waits for the device or reads from it.
    fn enqueue(&mut self, model: &mut Decoder, optimizer: &mut AdamWOptimizer, precision: StepPrecision) -> Result<()> {
        let Results { losses, norm, reduce_error } = &mut self.results;
        let (scale, mut exchange) = (&self.loss_scale.per_token, Exchange::of_step(&self.partition));
        for (pass, (inputs, targets)) in self.inputs.iter().zip(&self.targets).enumerate() {
            if pass + 1 == self.inputs.len() {
                exchange.expect_last();
            }
            let sequences = sequences_of(&self.sequences, pass);
            let of_pass = model.losses_and_gradients(inputs, targets, sequences, scale, precision, &mut exchange)?;
            losses.copy_from(pass, &of_pass)?;
        }
        let _update = model.device().scope("update");
        let (params, scaling) = model.parameters_and_scaling();
        let error = exchange.finish(params, scaling)?;
        if let (Some(place), Some(error)) = (reduce_error, error) {
            place.copy_from(0, &error)?;
        }
        norm.copy_from(0, &self.partition.grad_norm(&model.parameters())?)?;
        self.partition.update(model, optimizer, norm)?;
        model.parameters().into_iter().for_each(|param| param.clear_grad());
        Ok(())
    }

    /// The first parameter whose gradient is not finite, after a step whose gradients were not: the step's micro-batches are run
    /// once more, since an update leaves no gradients behind.
    pub fn first_bad_gradient(&self, model: &mut Decoder, precision: StepPrecision) -> Result<Option<String>> {
        let scale = &self.loss_scale.per_token;
        for (pass, (inputs, targets)) in self.inputs.iter().zip(&self.targets).enumerate() {
            model.losses_and_gradients(
                inputs,
                targets,
                sequences_of(&self.sequences, pass),
                scale,
                precision,
                &mut Exchange::of_weights(&self.partition),
            )?;
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

/// How the tokens of a micro-batch lie.
fn sequences_of(sequences: &[Sequences], pass: usize) -> &Sequences {
    sequences.get(pass).unwrap_or(&sequences[0])
}
