//! What is random in training: dropout of adapters and noise of embeddings. Also the learning rates of LoRA+.

use crate::parallel::divided::{F32, Setup, adapters, apart, llama};
use crate::parallel::mesh::rows;
use crate::setup::{
    Seeded, config, double, gradients, largest_error, losses, losses_and_gradients_of, numbered, on_one_thread, recipe,
    tiny_llama,
};
use crate::step::gradients::{expect_gradient, family};
use ottava_models::{Decoder, DecoderConfig};
use ottava_parallel::Zero;
use ottava_parallel::optim::{
    AdamWConfig, AdamWOptimizer, AdjustLr, LionOptimizer, MomentumConfig, MuonOptimizer, Optimizer,
};
use ottava_recipe::lora::Lora;
use ottava_recipe::mode::StepPrecision;
use ottava_recipe::param::{MemoryPolicy, Param, Purpose};
use ottava_recipe::recompute::Recompute;
use ottava_recipe::{Fp8Format, RecipeName};
use ottava_tensor::Device;
use ottava_tensor::testing::{integers, values};
use ottava_train::step::TrainStep;
use serde_json::json;

/// Returns `sizes` with adapters with dropout, and with noise in the embedding.
fn drawing(sizes: DecoderConfig) -> DecoderConfig {
    let mut sizes = DecoderConfig { lora: Some(Lora { dropout: 0.3, ..adapters(false).expect("adapters") }), ..sizes };
    sizes.embedding.noise = 4.0;
    sizes
}

#[test]
fn backward_with_dropout_and_noise_is_the_gradient() {
    let mut keys = family("LlamaForCausalLM", false);
    keys["num_hidden_layers"] = json!(1);
    let sizes = drawing(config(keys));
    on_one_thread(|| {
        let (purpose, mut weights) = (Purpose::Train(MemoryPolicy::FULL), Seeded { std: 0.5 });
        let mut decoder = Decoder::new(&sizes, &double(), &Device::Cpu, purpose, 5, &mut weights).unwrap();
        let (inputs, targets) = (integers("inputs", 10, 11), integers("targets", 10, 11));
        let loss = |decoder: &mut Decoder| {
            let sequences = numbered(&Device::Cpu, 2, 10);
            values(&losses_and_gradients_of(decoder, &inputs, &targets, sequences, 0.37).unwrap())
        };
        let seen = loss(&mut decoder);
        let once = gradients(&mut decoder);
        let still = values(&losses(&mut decoder, &inputs, &targets, 2).unwrap());
        assert!(largest_error(&seen, &still) > 1e-2, "training draws and evaluation does not: {seen:?}, {still:?}");
        for (i, (name, gradient)) in once.iter().enumerate() {
            let start = decoder.parameters()[i].weights.value().unwrap();
            expect_gradient(name, gradient, &start, |value| {
                decoder.parameters()[i].weights.set_value(value);
                0.37 * loss(&mut decoder).iter().sum::<f64>()
            });
            decoder.parameters()[i].weights.set_value(start);
        }
    });
}

/// Returns the losses and gradients of a step with dropout and noise, in bits.
fn step_bits(recompute: Recompute, use_dora: bool, name: RecipeName) -> Vec<(String, Vec<f64>)> {
    let sizes = drawing(tiny_llama());
    let sizes = DecoderConfig { lora: sizes.lora.map(|lora| Lora { use_dora, ..lora }), ..sizes };
    let purpose = Purpose::Train(MemoryPolicy { recompute, ..MemoryPolicy::FULL });
    let recipe = recipe(name, Fp8Format::Auto);
    let mut model = Decoder::new(&sizes, &recipe, &Device::Cpu, purpose, 16, &mut Seeded { std: 0.1 }).unwrap();
    model.quantize_weights().unwrap();
    let [inputs, targets] = ["inputs", "targets"].map(|name| integers(name, 32, 96));
    let sequences = numbered(&Device::Cpu, 2, 32);
    let seen = losses_and_gradients_of(&mut model, &inputs, &targets, sequences, 1.0 / 32.0).unwrap();
    gradients(&mut model).into_iter().chain([("losses".to_string(), values(&seen))]).collect()
}

#[test]
fn recomputation_draws_the_same_numbers() {
    for name in [RecipeName::Bf16, RecipeName::Fp8Current] {
        for use_dora in [false, true] {
            let all = step_bits(Recompute::None, use_dora, name);
            for recompute in [Recompute::NormSwiglu, Recompute::Attention, Recompute::Full] {
                assert!(step_bits(recompute, use_dora, name) == all, "{} {}", name.as_str(), recompute.as_str());
            }
        }
    }
}

#[test]
fn ranks_draw_the_numbers_of_one_rank() {
    for (mesh, zero) in [
        ([2, 1, 1, 1], Zero::Weights),
        ([1, 2, 1, 1], Zero::Nothing),
        ([1, 1, 2, 1], Zero::Nothing),
        ([1, 1, 1, 2], Zero::OptimizerStates),
        ([2, 1, 1, 2], Zero::OptimizerStates),
    ] {
        let mut alone = Setup::new(llama(json!({})), RecipeName::Fp32);
        let [_, tokens] = alone.mesh.rows;
        (alone.mesh.zero, alone.mesh.rows) = (zero, [1, tokens]);
        alone.mesh.sizes = drawing(alone.mesh.sizes);
        let (apart, tensor_name) = apart(&alone, mesh);
        assert!(apart < F32, "{mesh:?}, {zero:?}: {tensor_name} is {apart:.1e} apart");
    }
}

/// Returns the losses of three steps, with `rows` rows in each micro-batch and other masks in each step.
fn step_losses(rows_of_each: usize, seed: u64) -> Vec<f64> {
    const ROWS: usize = 4;
    let sizes = drawing(tiny_llama());
    let (recipe, purpose) = (recipe(RecipeName::Fp32, Fp8Format::Auto), Purpose::Train(MemoryPolicy::FULL));
    let mut model = Decoder::new(&sizes, &recipe, &Device::Cpu, purpose, 16, &mut Seeded { std: 0.1 }).unwrap();
    let mut optimizer = AdamWOptimizer::new(ADAMW, &model.parameters()).unwrap();
    let micro_batches = ROWS / rows_of_each;
    let mut step = TrainStep::new(&model, micro_batches, rows_of_each, 16).unwrap().with_draws(seed).unwrap();
    let all = rows("rows", [ROWS, 16], 0..0, &sizes);
    let losses = (0..3).map(|_| {
        for number in 0..micro_batches {
            let tokens = number * rows_of_each * 16..(number + 1) * rows_of_each * 16;
            let of = |ids: &[i32]| ids[tokens.clone()].to_vec();
            let batch = ottava_data::Batch::whole(of(&all.inputs), of(&all.targets), rows_of_each);
            step.load(number, &batch).unwrap();
        }
        // Without a learning rate, only the random numbers differ between steps.
        step.run(&mut model, &mut optimizer, 0.0, StepPrecision::Recipe).unwrap().loss
    });
    losses.collect()
}

#[test]
fn numbers_follow_from_the_seed_the_step_and_the_row() {
    let losses = step_losses(1, 5);
    assert!(losses[0] != losses[1] && losses[1] != losses[2] && losses[0] != losses[2], "{losses:?}");
    for rows in [2, 4] {
        let other = step_losses(rows, 5);
        assert!(largest_error(&other, &losses) < 1e-6, "{rows} rows in a micro-batch: {other:?} for {losses:?}");
    }
    let other = step_losses(1, 6);
    assert!(largest_error(&other, &losses) > 1e-4, "seeds give other numbers: {other:?}");
}

const ADAMW: AdamWConfig =
    AdamWConfig { beta1: 0.9, beta2: 0.95, epsilon: 1e-8, weight_decay: 0.0, max_grad_norm: 1.0 };

/// Returns the changes of all parameters in the first step, by name.
fn changes(b_rate: f64, optimizer: impl Fn(&[&mut Param]) -> Box<dyn Optimizer>) -> Vec<(String, Vec<f64>)> {
    let sizes = DecoderConfig { lora: Some(Lora { b_rate, ..adapters(false).expect("adapters") }), ..tiny_llama() };
    let (recipe, purpose) = (recipe(RecipeName::Fp32, Fp8Format::Auto), Purpose::Train(MemoryPolicy::FULL));
    let mut model = Decoder::new(&sizes, &recipe, &Device::Cpu, purpose, 16, &mut Seeded { std: 0.1 }).unwrap();
    let read = |model: &mut Decoder| -> Vec<(String, Vec<f64>)> {
        let of = |param: &mut Param| (param.identity.name().to_string(), values(&param.weights.value().unwrap()));
        model.parameters().into_iter().map(of).collect()
    };
    let before = read(&mut model);
    let mut optimizer = optimizer(&model.parameters());
    let mut step = TrainStep::new(&model, 1, 2, 16).unwrap();
    step.load(0, &rows("rows", [2, 16], 0..0, &sizes)).unwrap();
    step.run(&mut model, &mut *optimizer, 1e-2, StepPrecision::Recipe).unwrap();
    let minus = |((name, after), (_, before)): ((String, Vec<f64>), (String, Vec<f64>))| {
        (name, after.iter().zip(&before).map(|(after, before)| after - before).collect())
    };
    read(&mut model).into_iter().zip(before).map(minus).collect()
}

#[test]
fn loraplus_multiplies_the_learning_rate_of_b() {
    let momentum = MomentumConfig { beta1: 0.9, beta2: 0.95, weight_decay: 0.0, max_grad_norm: 1.0 };
    type New = Box<dyn Fn(&[&mut Param]) -> Box<dyn Optimizer>>;
    let optimizers: [New; 3] = [
        Box::new(|params| Box::new(AdamWOptimizer::new(ADAMW, params).unwrap())),
        Box::new(|params| Box::new(MuonOptimizer::new(0.95, AdjustLr::default(), ADAMW, params).unwrap())),
        Box::new(move |params| Box::new(LionOptimizer::new(momentum, params).unwrap())),
    ];
    for optimizer in optimizers {
        let (plain, ratio) = (changes(1.0, &optimizer), changes(4.0, &optimizer));
        let mut compared = [0, 0];
        for ((name, one), (_, four)) in plain.iter().zip(&ratio) {
            let factor = if name.ends_with("lora_B.weight") { 4.0 } else { 1.0 };
            compared[usize::from(factor > 1.0)] += 1;
            let expected: Vec<f64> = one.iter().map(|change| factor * change).collect();
            // Changes of a hundredth are differences of weights in F32.
            assert!(largest_error(four, &expected) < 1e-4, "{name}");
        }
        assert!(compared[0] > 0 && compared[1] > 0, "{compared:?}");
    }
}
