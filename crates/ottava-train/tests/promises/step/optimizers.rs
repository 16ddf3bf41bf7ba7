//! A custom optimizer without knowledge of ranks, casts and checkpoints trains with all of them.

use crate::runs::resume::write_inputs;
use crate::setup::{Seeded, batch, on_ranks, progress, recipe};
use ottava_checkpoint::{FolderTemplate, FolderWeights, Saver, training};
use ottava_common::Result;
use ottava_data::Batch;
use ottava_models::{Decoder, DecoderConfig, decoder_config};
use ottava_parallel::optim::{Optimizer, Per, StateTensor, Updated};
use ottava_parallel::{Partition, Ranks, ReduceFormat, Schedule, Zero};
use ottava_recipe::mode::StepPrecision;
use ottava_recipe::param::{MemoryPolicy, Param, Purpose, WeightSource};
use ottava_recipe::scaling::Casts;
use ottava_recipe::{Fp8Format, RecipeName};
use ottava_tensor::comm::{Group, MeshShape};
use ottava_tensor::ops::{Gradient, UpdatedWeight, WeightCopy, cast};
use ottava_tensor::testing::values;
use ottava_tensor::{DType, Device, Tensor};
use ottava_train::step::TrainStep;
use std::path::Path;
use std::rc::Rc;

/// The number of rows on both ranks. Each rank has one row, since the order of sums of several micro-batches depends on the stage of ZeRO.
const ROWS: usize = 2;
const TOKENS: usize = 13;
const STEPS: u64 = 5;

/// Stochastic gradient descent: `velocity = 0.9 · velocity + gradient`, `weight -= learning rate · velocity`, on the CPU, for F32 weights or master
/// weights.
struct Sgd {
    velocities: Vec<Tensor>,
    steps: u64,
    learning_rate: f64,
    gradient_scale: f64,
}

impl Sgd {
    fn new(params: &[&mut Param]) -> Sgd {
        let zeros =
            |param: &&mut Param| Tensor::zeros(param.weights.device(), &param.update_shape(), DType::F32).unwrap();
        let velocities = params.iter().map(zeros).collect();
        Sgd { velocities, steps: 0, learning_rate: 0.0, gradient_scale: 1.0 }
    }
}

impl Optimizer for Sgd {
    fn steps(&self) -> u64 {
        self.steps
    }

    fn set_steps(&mut self, steps: u64) {
        self.steps = steps;
    }

    fn begin_step(&mut self, learning_rate: f64, gradient_scale: f64) -> Result<()> {
        (self.steps, self.learning_rate, self.gradient_scale) = (self.steps + 1, learning_rate, gradient_scale);
        Ok(())
    }

    fn states(&mut self) -> Vec<Vec<StateTensor<'_>>> {
        let kept = |tensor| vec![StateTensor { kind: "velocity", per: Per::Element, tensor }];
        self.velocities.iter_mut().map(kept).collect()
    }

    fn update(&mut self, group: &mut [Updated], _: &mut Casts, norm: &Tensor) -> Result<()> {
        if !norm.to_vec::<f32>()?[0].is_finite() {
            return Ok(());
        }
        for Updated { param, index, .. } in group {
            let Gradient::Plain(gradient) = param.gradient.read() else { unreachable!("gradients have no scale here") };
            let UpdatedWeight::Master { master, copy } = param.weights.for_update() else {
                unreachable!("masters are F32 here")
            };
            let velocity = &mut self.velocities[*index];
            let [mut weights, mut speeds] = [&*master, &*velocity].map(|tensor| tensor.to_vec::<f32>().unwrap());
            let gradients = gradient.to_vec::<f32>()?;
            for ((weight, speed), gradient) in weights.iter_mut().zip(&mut speeds).zip(gradients) {
                *speed = 0.9 * *speed + gradient / self.gradient_scale as f32;
                *weight -= self.learning_rate as f32 * *speed;
            }
            master.write_bytes(bytemuck::cast_slice(&weights))?;
            velocity.write_bytes(bytemuck::cast_slice(&speeds))?;
            if let WeightCopy::Stored(copy) = copy {
                copy.write_bytes(&cast(master, copy.dtype())?.read_bytes()?)?;
            }
        }
        Ok(())
    }
}

/// A rank that trains with [`Sgd`].
struct Rank {
    ranks: Rc<Ranks>,
    model: Decoder,
    optimizer: Sgd,
    work: TrainStep,
}

impl Rank {
    /// Makes a rank whose weights are not cast yet.
    fn new(sizes: &DecoderConfig, name: RecipeName, zero: Zero, comm: Group, weights: &mut dyn WeightSource) -> Rank {
        let (recipe, device) = (recipe(name, Fp8Format::Auto), Device::Cpu);
        let purpose = Purpose::Train(MemoryPolicy::FULL);
        let mut model = Decoder::unloaded(sizes, &recipe, &device, purpose, TOKENS).unwrap();
        let shape = MeshShape::of_data(comm.size());
        let ranks = Rc::new(Ranks::new(comm, shape, &device).unwrap());
        let partition = Partition::new(&mut model, ranks.clone(), zero, ReduceFormat::Stored, false).unwrap();
        partition.load(&mut model, weights).unwrap();
        let optimizer = Sgd::new(&model.parameters());
        let work = TrainStep::shared(&model, Schedule::of_one_rank(ROWS / ranks.size()), 1, TOKENS, partition).unwrap();
        Rank { ranks, model, optimizer, work }
    }

    fn cast_weights(&mut self) {
        self.work.partition().quantize_weights(&mut self.model).unwrap();
    }

    /// Runs one step on rows that follow from its number. Returns the loss.
    fn step(&mut self, step: u64) -> f64 {
        let Rank { ranks, model, optimizer, work } = self;
        let ids = batch(&format!("sgd {step}"), ROWS, TOKENS, model.config().vocabulary);
        let [inputs, targets] = ids.map(|ids| ids.to_vec::<i32>().unwrap());
        for micro_batch in 0..ROWS / ranks.size() {
            let row = micro_batch * ranks.size() + ranks.rank();
            let [inputs, targets] = [&inputs, &targets].map(|ids| ids[row * TOKENS..(row + 1) * TOKENS].to_vec());
            let batch = Batch::whole(inputs, targets, 1);
            work.load(micro_batch, &batch).unwrap();
        }
        work.run(model, optimizer, 0.05, StepPrecision::Recipe).unwrap().loss
    }

    /// Returns all weights, by name.
    fn weights(&mut self) -> Vec<(String, Vec<f64>)> {
        let whole = |param: &mut Param| values(&self.work.partition().value(param).unwrap());
        self.model.parameters().into_iter().map(|param| (param.identity.name().to_string(), whole(param))).collect()
    }
}

/// Runs `work` on `ranks` ranks, and checks that all results are equal. Returns the result.
fn alike_on_ranks<T: PartialEq + Send + 'static>(
    ranks: usize,
    work: impl Fn(Group) -> T + Clone + Send + 'static,
) -> T {
    let mut seen = on_ranks(ranks, work).into_iter();
    let first = seen.next().unwrap();
    assert!(seen.all(|other| other == first), "ranks differ");
    first
}

/// Returns the sizes of the small model of [`write_inputs`].
fn sizes(folder: &Path) -> DecoderConfig {
    let template = FolderTemplate::read(folder, folder, &[0]).unwrap();
    decoder_config(&template.config).unwrap()
}

/// Bits do not depend on what ranks divide. Casts after the update read the new weights, so casting once more changes nothing.
#[test]
fn an_optimizer_without_casts_trains_alike_in_every_stage_of_zero() {
    let folder = tempfile::tempdir().unwrap();
    write_inputs(folder.path());
    let sizes = sizes(folder.path());
    for recipe in RecipeName::ALL.into_iter().filter(|recipe| *recipe != RecipeName::Fp16) {
        let train = |zero, casts_again| {
            let sizes = sizes.clone();
            alike_on_ranks(2, move |comm| {
                let mut rank = Rank::new(&sizes, recipe, zero, comm, &mut Seeded { std: 0.1 });
                rank.cast_weights();
                let losses: Vec<f64> = (0..STEPS)
                    .map(|step| {
                        if casts_again {
                            rank.cast_weights();
                        }
                        rank.step(step)
                    })
                    .collect();
                (losses, rank.weights())
            })
        };
        let whole = train(Zero::Nothing, false);
        let (name, losses) = (recipe.as_str(), &whole.0);
        assert!(losses[STEPS as usize - 1] < losses[0], "{name}: the loss falls: {losses:?}");
        for zero in Zero::ALL {
            for casts_again in [false, true] {
                assert!(train(zero, casts_again) == whole, "{name}, {zero:?}, cast once more: {casts_again}");
            }
        }
    }
}

#[test]
fn an_optimizer_of_any_kind_resumes_from_a_checkpoint() {
    for zero in [Zero::Nothing, Zero::Weights] {
        let folder = tempfile::tempdir().unwrap();
        write_inputs(folder.path());
        let (sizes, inputs) = (sizes(folder.path()), folder.path().to_path_buf());
        let (halfway, recipe) = (2, RecipeName::Fp8Delayed);
        let (checkpoints, its_sizes) = (inputs.join("checkpoints"), sizes.clone());
        let expected = alike_on_ranks(2, move |comm| {
            let mut rank = Rank::new(&its_sizes, recipe, zero, comm, &mut Seeded { std: 0.1 });
            rank.cast_weights();
            (0..halfway).for_each(|step| _ = rank.step(step));
            let template = FolderTemplate::read(&inputs, &inputs, &[0]).unwrap();
            let mut saver = Saver::new(checkpoints.clone(), 0);
            let Rank { ranks, model, optimizer, work } = &mut rank;
            let progress = progress(halfway, model);
            let nothing = || Ok(Vec::new());
            saver.begin(&progress, &template, model, optimizer, work.partition(), nothing).unwrap();
            saver.finish(ranks).unwrap();
            (halfway..STEPS).for_each(|step| _ = rank.step(step));
            rank.weights()
        });
        let checkpoint = folder.path().join(format!("checkpoints/checkpoint-{halfway}"));
        let resumed = alike_on_ranks(2, move |comm| {
            let weights = &mut FolderWeights::open(&checkpoint).unwrap();
            let mut rank = Rank::new(&sizes, recipe, zero, comm, weights);
            let progress = progress(halfway, &mut rank.model);
            training::restore(&checkpoint, &progress, &mut rank.model, &mut rank.optimizer).unwrap();
            assert_eq!(rank.optimizer.steps(), halfway);
            rank.cast_weights();
            (halfway..STEPS).for_each(|step| _ = rank.step(step));
            rank.weights()
        });
        assert!(resumed == expected, "{zero:?}");
    }
}
