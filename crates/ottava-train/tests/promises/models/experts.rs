//! Mixtures of experts: every recipe trains them. Some changes must not change any bit: the numbering of experts, recomputation, and experts without
//! tokens.

use crate::models::recorded::Recorded;
use crate::runs::resume;
use crate::setup::{
    Seeded, Training, batch, config, decoder, devices, devices_of, eight_bit_names_on, finish_step, gradients,
    largest_error, logits, losses, losses_and_gradients, on_device, recipe, relative_error, sequences,
};
use ottava_checkpoint::FolderWeights;
use ottava_models::layers::RouterLossFactors;
use ottava_models::{BackwardPass, Decoder, DecoderConfig};
use ottava_recipe::lora::{Lora, Targets};
use ottava_recipe::mode::StepPrecision;
use ottava_recipe::param::{FolderTensor, Init, MemoryPolicy, Purpose, Resident, WeightSource};
use ottava_recipe::recompute::Recompute;
use ottava_recipe::scaling::{RouterLoad, RouterMetrics};
use ottava_recipe::{Fp8Format, RecipeName};
use ottava_settings::Interval;
use ottava_tensor::testing::values;
use ottava_tensor::{Device, Tensor};
use ottava_train::trainer::Start;
use safetensors::Dtype;
use safetensors::tensor::TensorView;
use serde_json::{Value, json};
use std::collections::BTreeMap;
use std::ops::Range;

const TOKENS: usize = 13;

/// Returns a model with two blocks of experts in sizes for FP8 products: all sizes are multiples of 128.
fn sizes_with(keys: Value) -> DecoderConfig {
    let mut all = json!({
        "model_type": "qwen3_moe", "vocab_size": 96, "hidden_size": 128, "intermediate_size": 128, "num_hidden_layers": 2,
        "num_attention_heads": 4, "num_key_value_heads": 2, "head_dim": 32, "max_position_embeddings": 64,
        "num_experts": 5, "num_experts_per_tok": 2, "moe_intermediate_size": 64, "norm_topk_prob": true,
    });
    all.as_object_mut().unwrap().extend(keys.as_object().unwrap().clone());
    config(all)
}

pub fn sizes() -> DecoderConfig {
    sizes_with(json!({}))
}

fn built(sizes: &DecoderConfig, name: RecipeName, device: &Device, weights: &mut dyn WeightSource) -> Decoder {
    let (recipe, purpose) = (recipe(name, Fp8Format::Auto), Purpose::Train(MemoryPolicy::FULL));
    let mut decoder = Decoder::new(sizes, &recipe, device, purpose, 64, weights).unwrap();
    decoder.quantize_weights().unwrap();
    decoder
}

/// Returns inputs and targets of three rows on the device of `decoder`.
fn data(decoder: &Decoder) -> [Tensor; 2] {
    batch("experts", 3, TOKENS, 96).map(|ids| ids.to_device(decoder.device()).unwrap())
}

/// Returns the losses and gradients of three rows.
fn pass(decoder: &mut Decoder) -> (Vec<f64>, Vec<(String, Vec<f64>)>) {
    let [inputs, targets] = data(decoder);
    let losses = losses_and_gradients(decoder, &inputs, &targets, 3, 0.01).unwrap();
    let gradients = gradients(decoder);
    decoder.parameters().into_iter().for_each(|param| param.gradient.clear());
    (values(&losses), gradients)
}

#[test]
fn every_fp8_recipe_trains_experts() {
    const STEPS: usize = 12;
    for device in devices() {
        let run = |name| -> Vec<f64> {
            let mut training = Training::new(built(&sizes(), name, &device, &mut Seeded { std: 0.08 }));
            let linears = &training.decoder.description().linears;
            let experts = || linears.iter().filter(|(site, _)| site.experts.is_some());
            assert_eq!(experts().count(), 4, "two stacks in each block");
            assert!(name == RecipeName::Bf16 || experts().all(|(_, decision)| decision.fp8.is_some()), "{name:?}");
            (0..STEPS).map(|step| training.step(&batch(&format!("batch {step}"), 8, 32, 96), 8)).collect()
        };
        let reference = run(RecipeName::Bf16);
        let learned = reference[0] - reference[STEPS - 1];
        assert!(learned > 0.1, "{device}: {reference:?}");
        for name in eight_bit_names_on(&device) {
            let seen = run(name);
            let apart = (seen[STEPS - 1] - reference[STEPS - 1]).abs();
            eprintln!("{} on {device}: {apart:.4} from BF16, which learned {learned:.4}", name.as_str());
            // Measured on the CPU, casts to FP8 change the loss by up to 1.7 % of the improvement of twelve steps in BF16. A product that does not
            // learn would lose its share of the improvement.
            assert!(apart < 0.03 * learned, "{} on {device}: {seen:?}, {reference:?}", name.as_str());
        }
    }
}

/// Weights in which all experts are equal, with a random router.
struct OneForAll;

impl WeightSource for OneForAll {
    fn read(&mut self, tensor: &FolderTensor, elements: Range<usize>, init: Init) -> ottava_common::Result<Tensor> {
        let name = match tensor.name.split_once(".experts.") {
            Some((before, after)) => format!("{before}.{}", after.split_once('.').unwrap().1),
            None => tensor.name.clone(),
        };
        Seeded { std: 0.1 }.read(&FolderTensor { name, ..tensor.clone() }, elements, init)
    }
}

/// If all of three equal experts are chosen, with weights that sum to one, they compute the same as one expert alone.
#[test]
fn equal_experts_that_are_all_chosen_are_an_mlp() {
    let routed = sizes_with(json!({"num_experts": 3, "num_experts_per_tok": 3, "moe_intermediate_size": 128}));
    let dense = sizes_with(json!({"mlp_only_layers": [0, 1]}));
    for device in devices() {
        let [mut routed, mut dense] =
            [routed.clone(), dense.clone()].map(|sizes| built(&sizes, RecipeName::Fp32, &device, &mut OneForAll));
        let ((losses, gradients), (expected, of_dense)) = (pass(&mut routed), pass(&mut dense));
        // A sum of three experts, weighted by thirds, has three roundings of 2⁻²⁴ more than an MLP in each block. The gradients below sum 39 tokens.
        assert!(largest_error(&losses, &expected) < 1e-5, "{losses:?}, {expected:?}");
        let of_dense: BTreeMap<_, _> = of_dense.into_iter().collect();
        for (name, gradient) in gradients {
            if name.ends_with(".gate.weight") {
                // The weights of the router do not matter, so their gradients vanish.
                assert!(gradient.iter().all(|g| g.abs() < 1e-5), "{name}");
            } else if let Some((before, after)) = name.split_once(".experts.0.") {
                let expected = &of_dense[&format!("{before}.{after}")];
                let sums: Vec<f64> =
                    (0..expected.len()).map(|i| (0..3).map(|e| gradient[e * expected.len() + i]).sum()).collect();
                assert!(relative_error(&sums, expected) < 1e-4, "{name}");
            } else {
                assert!(relative_error(&gradient, &of_dense[&name]) < 1e-4, "{name}");
            }
        }
    }
}

/// Routers of zeros: all logits are equal, so the first experts get all tokens.
struct EqualLogits;

impl WeightSource for EqualLogits {
    fn read(&mut self, tensor: &FolderTensor, elements: Range<usize>, init: Init) -> ottava_common::Result<Tensor> {
        let std = if tensor.name.ends_with(".gate.weight") { 0.0 } else { 0.1 };
        Seeded { std }.read(tensor, elements, init)
    }
}

fn loads(decoder: &mut Decoder) -> Vec<RouterLoad> {
    decoder.scaling().router_loads().unwrap()
}

#[test]
fn experts_without_tokens_have_no_gradient_and_break_nothing() {
    for device in devices() {
        for name in [RecipeName::Bf16].into_iter().chain(eight_bit_names_on(&device)) {
            let mut decoder = built(&sizes(), name, &device, &mut EqualLogits);
            let (losses, gradients) = pass(&mut decoder);
            assert!(losses.iter().all(|loss| loss.is_finite()));
            for load in loads(&mut decoder) {
                assert_eq!(load.counts, [3 * TOKENS as i64, 3 * TOKENS as i64, 0, 0, 0], "the first of equal experts");
                // A sum of 39 entropies in F32 has a relative error of at most 39 units of 2⁻²⁴, 2.3e-6. An entropy is 1.6.
                assert!((load.entropy / (3 * TOKENS) as f64 - 5f64.ln()).abs() < 1e-5, "{load:?}");
            }
            for (name, gradient) in gradients.iter().filter(|(name, _)| name.contains(".experts.0.")) {
                let (with, without) = gradient.split_at(gradient.len() / 5 * 2);
                assert!(with.iter().any(|&g| g != 0.0) && without.iter().all(|&g| g == 0.0), "{name}");
            }
            let mut training = Training::new(decoder);
            let losses: Vec<f64> =
                (0..4).map(|step| training.step(&batch(&format!("batch {step}"), 4, 16, 96), 4)).collect();
            assert!(losses.iter().all(|loss| loss.is_finite()), "{name:?}: {losses:?}");
            for param in training.decoder.parameters() {
                assert!(
                    values(&param.weights.value().unwrap()).iter().all(|w| w.is_finite()),
                    "{}",
                    param.identity.name()
                );
            }
        }
    }
}

/// Weights with the experts, and the rows of routers, in another order.
struct Permuted([usize; 5]);

impl WeightSource for Permuted {
    fn read(&mut self, tensor: &FolderTensor, elements: Range<usize>, init: Init) -> ottava_common::Result<Tensor> {
        let mut source = Seeded { std: 0.1 };
        if tensor.name.ends_with(".gate.weight") {
            let all = source.read(tensor, 0..tensor.elements(), init)?.to_vec::<f32>()?;
            let width = tensor.shape[1];
            let rows: Vec<f32> = self.0.iter().flat_map(|&e| &all[e * width..(e + 1) * width]).copied().collect();
            return Ok(Tensor::from_slice(&Device::Cpu, &[elements.len()], &rows[elements])?);
        }
        let name = match tensor.name.split_once(".experts.") {
            Some((before, after)) => {
                let (expert, linear) = after.split_once('.').unwrap();
                format!("{before}.experts.{}.{linear}", self.0[expert.parse::<usize>().unwrap()])
            }
            None => tensor.name.clone(),
        };
        source.read(&FolderTensor { name, ..tensor.clone() }, elements, init)
    }
}

#[test]
fn numbers_of_experts_do_not_matter() {
    for device in devices() {
        for name in [RecipeName::Bf16].into_iter().chain(eight_bit_names_on(&device)) {
            let run = |order| {
                let mut decoder = built(&sizes(), name, &device, &mut Permuted(order));
                let (losses, gradients) = pass(&mut decoder);
                (losses, gradients.into_iter().filter(|(name, _)| !name.contains(".mlp.")).collect::<Vec<_>>())
            };
            let (losses, gradients) = run([0, 1, 2, 3, 4]);
            let (others, _) = run([0, 1, 2, 4, 3]);
            let (permuted, of_permuted) = run([3, 0, 4, 2, 1]);
            assert!(losses == permuted && losses == others, "{name:?} on {device}");
            // The gradient by the input of a router is a sum over experts, whose order changes.
            for ((name, a), (_, b)) in gradients.iter().zip(&of_permuted) {
                assert!(relative_error(a, b) < 0.02, "{name}");
            }
        }
    }
}

#[test]
fn recomputed_routers_choose_alike_and_count_once() {
    for name in [RecipeName::Bf16, RecipeName::Fp8Delayed, RecipeName::Fp8Row, RecipeName::Fp8Block] {
        let recipe = recipe(name, Fp8Format::Auto);
        let shared = sizes_with(json!({
            "model_type": "qwen2_moe", "shared_expert_intermediate_size": 64, "num_key_value_heads": 4,
        }));
        for (sizes, device) in
            [&sizes(), &shared].into_iter().flat_map(|s| devices_of(&recipe).into_iter().map(move |d| (s, d)))
        {
            let run = |recompute, weight_codes| {
                let kept = Purpose::Train(MemoryPolicy { recompute, weight_codes, ..MemoryPolicy::FULL });
                let mut decoder = Decoder::new(sizes, &recipe, &device, kept, 64, &mut Seeded { std: 0.1 }).unwrap();
                decoder.quantize_weights().unwrap();
                let first = pass(&mut decoder);
                finish_step(&mut decoder);
                (first, pass(&mut decoder), loads(&mut decoder))
            };
            let expected = run(Recompute::None, true);
            assert!(expected.2.iter().all(|load| load.counts.iter().sum::<i64>() == 2 * 3 * 2 * TOKENS as i64));
            for recompute in Recompute::ALL {
                for weight_codes in [true, false] {
                    let what = format!("{name:?} on {device}, {}, codes kept: {weight_codes}", recompute.as_str());
                    assert!(run(recompute, weight_codes) == expected, "{what}");
                }
            }
        }
    }
}

#[test]
fn evaluation_counts_nothing() {
    let mut decoder = decoder(&sizes(), &recipe(RecipeName::Bf16, Fp8Format::Auto), &Device::Cpu, 0.1);
    let [inputs, targets] = data(&decoder);
    losses(&mut decoder, &inputs, &targets, 3).unwrap();
    assert_eq!(RouterMetrics::of(&loads(&mut decoder)), None);
    pass(&mut decoder);
    let metrics = RouterMetrics::of(&loads(&mut decoder)).unwrap();
    // There are 78 rows of tokens, in five groups of at most 128 rows.
    assert!(metrics.imbalance >= 1.0 && metrics.entropy > 0.0 && (0.7..0.9).contains(&metrics.padding), "{metrics:?}");
    assert_eq!(RouterMetrics::of(&loads(&mut decoder)), None, "sums are cleared");
}

#[test]
fn the_loss_of_balance_spreads_tokens() {
    let imbalance = |balance| {
        let mut sizes = sizes();
        sizes.experts_mut().for_each(|experts| experts.losses = RouterLossFactors { balance, z: 0.0 });
        let mut training = Training::new(built(&sizes, RecipeName::Fp8Row, &Device::Cpu, &mut Seeded { std: 0.1 }));
        for step in 0..40 {
            // The choices of the last steps count.
            if step == 20 {
                loads(&mut training.decoder);
            }
            let loss = training.step(&batch(&format!("batch {step}"), 8, 16, 96), 8);
            assert!(loss.is_finite());
        }
        RouterMetrics::of(&loads(&mut training.decoder)).unwrap().imbalance
    };
    let (without, with) = (imbalance(0.0), imbalance(1.0));
    eprintln!("the fullest expert has {without:.3} times the mean, and {with:.3} with the loss of balance");
    // Measured: the excess over the mean falls from 0.39 to 0.08.
    assert!(with - 1.0 < 0.7 * (without - 1.0), "{with} and {without}");
}

/// A recorded model in which the names of two linears of experts are swapped, as by a faulty loader.
struct Swapped(Recorded, [&'static str; 2]);

impl WeightSource for Swapped {
    fn read(&mut self, tensor: &FolderTensor, elements: Range<usize>, init: Init) -> ottava_common::Result<Tensor> {
        let [a, b] = self.1;
        let name = match &tensor.name {
            name if name.contains(a) => name.replace(a, b),
            name => name.replace(b, a),
        };
        self.0.read(&FolderTensor { name, ..tensor.clone() }, elements, init)
    }
}

#[test]
fn a_swap_of_gate_and_up_or_of_experts_is_seen_in_the_logits() {
    for (name, swap) in [
        ("mixtral", [".w1.", ".w3."]),
        ("olmoe", [".gate_proj.", ".up_proj."]),
        ("qwen3_moe", [".experts.0.", ".experts.1."]),
    ] {
        let recorded = Recorded::open(&format!("referee_{name}"), name);
        let logits_of = |weights: &mut dyn WeightSource| {
            let decoder = built(&recorded.sizes(), RecipeName::Fp32, &Device::Cpu, weights);
            let ids = recorded.ids("inputs");
            values(&logits(&decoder, &Tensor::from_slice(&Device::Cpu, &[24], &ids[..24]).unwrap()))
        };
        let expected = recorded.values("logits");
        let expected = &expected[..24 * 40];
        // Sums in F32 have another order than in transformers: differences of up to 2.5e-6 of the largest logit are seen. A swap changes logits by
        // more than 1e-3.
        assert!(largest_error(&logits_of(&mut recorded.clone()), expected) < 1e-5, "{name}");
        assert!(largest_error(&logits_of(&mut Swapped(recorded.clone(), swap)), expected) > 1e-3, "{name}");
    }
}

/// Some writers store all experts of a layer in one tensor, as transformers does in memory.
#[test]
fn folders_with_fused_experts_are_read() {
    let name = "qwen3_moe";
    let recorded = Recorded::open(&format!("referee_{name}"), name);
    let tensors = Decoder::folder_tensors(&recorded.sizes(), &recipe(RecipeName::Fp32, Fp8Format::Auto)).unwrap();
    let mut stored: BTreeMap<String, (Vec<usize>, Vec<u8>)> = BTreeMap::new();
    let mut source = recorded.clone();
    for tensor in tensors {
        let bytes = source.read(&tensor, 0..tensor.elements(), Init::Zeros).unwrap().read_bytes().unwrap();
        // Names are in the order of experts, with gate before up.
        let (name, mut shape) = match tensor.name.split_once(".experts.") {
            Some((before, after)) if after.contains("down_proj") => {
                (format!("{before}.experts.down_proj"), [vec![1], tensor.shape.clone()].concat())
            }
            Some((before, _)) => {
                let [rows, columns] = tensor.shape[..] else { panic!("a matrix") };
                (format!("{before}.experts.gate_up_proj"), vec![1, 2 * rows, columns])
            }
            None => (tensor.name.clone(), tensor.shape.clone()),
        };
        let of_stack = stored.entry(name).or_insert_with(|| (shape.clone(), Vec::new()));
        of_stack.1.extend(bytes);
        if shape.len() == 3 {
            shape[0] = of_stack.1.len() / 4 / shape[1] / shape[2];
            of_stack.0 = shape;
        }
    }
    let folder = tempfile::tempdir().unwrap();
    let views =
        stored.iter().map(|(name, (shape, bytes))| (name, TensorView::new(Dtype::F32, shape.clone(), bytes).unwrap()));
    let write = |views: Vec<_>| {
        std::fs::write(folder.path().join("model.safetensors"), safetensors::serialize(views, None).unwrap())
    };
    write(views.collect::<Vec<_>>()).unwrap();
    let mut weights = FolderWeights::open(folder.path()).unwrap();
    let mut fused = built(&recorded.sizes(), RecipeName::Fp32, &Device::Cpu, &mut weights);
    weights.finish(&recorded.sizes()).unwrap();
    let mut alone = built(&recorded.sizes(), RecipeName::Fp32, &Device::Cpu, &mut recorded.clone());
    let bits = |decoder: &mut Decoder| -> Vec<Vec<f64>> {
        decoder.parameters().iter().map(|param| values(&param.weights.value().unwrap())).collect()
    };
    assert!(bits(&mut fused) == bits(&mut alone));
}

/// The schedule `zero-bubble` of pipelines defers these gradients.
#[test]
fn deferred_gradients_of_experts_have_the_same_bits() {
    for name in [RecipeName::Bf16, RecipeName::Fp8Block] {
        let mut decoder = built(&sizes(), name, &Device::Cpu, &mut Seeded { std: 0.1 });
        let (expected_losses, expected) = pass(&mut decoder);
        let [inputs, targets] = data(&decoder);
        let (sequences, scale) =
            (sequences(&Device::Cpu, 3, inputs.len()), on_device(decoder.recipe(), &Device::Cpu, 0.01));
        let (precision, units) = (StepPrecision::Recipe, &mut Resident);
        let (normed, saved) = decoder.forward(0, &inputs, &sequences, precision, units).unwrap();
        let (losses, dy) = decoder.losses_and_gradient(&normed, &targets, &scale, units).unwrap();
        let of_pass = BackwardPass { sequences: &sequences, precision, layer_loss_scale: &scale };
        let (_, deferred) = decoder.dgrads(0, dy, saved, of_pass, units).unwrap();
        decoder.wgrads(0, deferred, units).unwrap();
        assert!(values(&losses) == expected_losses && gradients(&mut decoder) == expected, "{name:?}");
    }
}

#[test]
fn adapters_of_attention_leave_experts_and_routers_frozen() {
    let with = |targets| {
        let lora = Some(Lora { r: 4, alpha: 8.0, use_rslora: false, use_dora: false, targets, ..Lora::default() });
        DecoderConfig { lora, ..sizes() }
    };
    for name in [RecipeName::Bf16, RecipeName::Fp8Delayed, RecipeName::Fp8Row, RecipeName::Fp8Block] {
        let attention = ["q_proj", "k_proj", "v_proj", "o_proj"].map(String::from).to_vec();
        let mut decoder = built(&with(Targets::Names(attention)), name, &Device::Cpu, &mut Seeded { std: 0.1 });
        let (losses, gradients) = pass(&mut decoder);
        assert!(losses.iter().all(|loss| loss.is_finite()));
        let of_attention = |name: &str| name.contains(".self_attn.") && name.contains(".lora_");
        assert!(gradients.len() > 8 && gradients.iter().all(|(name, _)| of_attention(name)), "{gradients:?}");
        assert!(gradients.iter().any(|(_, gradient)| gradient.iter().any(|&g| g != 0.0)));
    }
    let sizes = with(Targets::Names(vec!["wo".into()]));
    let error = Decoder::describe(&sizes, &recipe(RecipeName::Bf16, Fp8Format::Auto)).unwrap_err().to_string();
    assert!(
        error.contains("`wo` is no linear of this model's blocks, which are `down_proj`, `gate`, `gate_proj`"),
        "{error}"
    );
}

/// Compares the last lines of metrics, and the tensors of the last checkpoint, of a run that was interrupted and resumed.
#[test]
fn a_run_reports_routers_and_writes_a_tensor_for_each_expert() {
    let inputs = tempfile::tempdir().unwrap();
    resume::write_inputs(inputs.path());
    let keys = json!({
        "architectures": ["Qwen2MoeForCausalLM"], "model_type": "qwen2_moe", "vocab_size": 100, "hidden_size": 32,
        "intermediate_size": 48, "num_hidden_layers": 2, "num_attention_heads": 4, "num_key_value_heads": 2,
        "num_experts": 4, "num_experts_per_tok": 2, "moe_intermediate_size": 16, "shared_expert_intermediate_size": 16,
        "mlp_only_layers": [0], "max_position_embeddings": 64,
    });
    std::fs::write(inputs.path().join("config.json"), keys.to_string()).unwrap();
    let mut run = resume::config(inputs.path(), &inputs.path().join("run"), RecipeName::Fp8Row);
    run.training.max_steps = Some(4);
    (run.router.balance_loss, run.router.z_loss) = (0.01, 0.001);
    // Two of four experts always have at least half of the choices.
    (run.logging.cast_statistics_steps, run.alarms.collapsed_share) = (2, 0.49);
    let stopped = resume::train(&run, &Device::Cpu, &Start::New, 3).unwrap_err().to_string();
    assert!(stopped.starts_with("stopped by a signal after step 3"), "{stopped}");
    resume::train(&run, &Device::Cpu, &Start::Resume, u64::MAX).unwrap();
    let metrics = std::fs::read_to_string(inputs.path().join("run/metrics.jsonl")).unwrap();
    let last: Value = serde_json::from_str(metrics.lines().last().unwrap()).unwrap();
    let number = |key: &str| last[key].as_f64().unwrap_or_else(|| panic!("{key} in {last}"));
    assert!(number("router_imbalance") >= 1.0 && number("router_idle_experts") >= 0.0);
    assert!((0.0..=4f64.ln()).contains(&number("router_entropy")) && (0.0..1.0).contains(&number("router_padding")));

    let alarms = std::fs::read_to_string(inputs.path().join("run/alarms.jsonl")).unwrap();
    let alarms: Vec<Value> = alarms.lines().map(|line| serde_json::from_str(line).unwrap()).collect();
    let collapsed: Vec<_> = alarms.iter().filter(|alarm| alarm["alarm"] == "router_collapse").collect();
    assert_eq!(collapsed.iter().map(|alarm| alarm["step"].as_u64().unwrap()).collect::<Vec<_>>(), [2, 4]);
    assert!(collapsed.iter().all(|alarm| alarm["tensors"] == json!(["model.layers.1.mlp.gate"])), "{collapsed:?}");

    let folder = inputs.path().join("run/checkpoints/checkpoint-4");
    let bytes = std::fs::read(folder.join("model.safetensors")).unwrap();
    let written = safetensors::SafeTensors::deserialize(&bytes).unwrap();
    let shape = |name: &str| written.tensor(name).unwrap().shape().to_vec();
    assert_eq!(shape("model.layers.1.mlp.gate.weight"), [4, 32]);
    assert_eq!(shape("model.layers.1.mlp.experts.3.up_proj.weight"), [16, 32]);
    assert_eq!(shape("model.layers.1.mlp.experts.0.down_proj.weight"), [32, 16]);
    assert_eq!(shape("model.layers.1.mlp.shared_expert.gate_proj.weight"), [16, 32]);
    assert_eq!(shape("model.layers.1.mlp.shared_expert_gate.weight"), [1, 32]);
    assert_eq!(shape("model.layers.0.mlp.down_proj.weight"), [32, 48]);

    std::fs::write(
        inputs.path().join("config.json"),
        json!({
            "architectures": ["LlamaForCausalLM"], "vocab_size": 100, "hidden_size": 32, "intermediate_size": 48,
            "num_hidden_layers": 1, "num_attention_heads": 4, "max_position_embeddings": 64,
        })
        .to_string(),
    )
    .unwrap();
    let error = run.decoder_config().unwrap_err().to_string();
    assert!(error.starts_with("`router` is set, and the model of"), "{error}");
}

/// The bias of the choice is F32 in every recipe, and updates by gradients do not change it.
#[test]
fn biases_of_choices_are_kept_as_they_are() {
    let sizes = sizes_with(json!({
        "model_type": "deepseek_v3", "num_key_value_heads": 4, "kv_lora_rank": 32, "qk_nope_head_dim": 16, "qk_rope_head_dim": 16,
        "v_head_dim": 16, "n_routed_experts": 8, "n_group": 4, "topk_group": 2, "n_shared_experts": 1, "num_experts": null, "first_k_dense_replace": 0,
    }));
    for name in [RecipeName::Bf16, RecipeName::Fp8Row] {
        let mut training = Training::new(built(&sizes, name, &Device::Cpu, &mut Seeded { std: 0.1 }));
        let biases = |training: &mut Training| -> Vec<Vec<f32>> {
            let all = training.decoder.parameters().into_iter();
            let all = all.filter(|param| param.identity.name().ends_with(".e_score_correction_bias"));
            all.map(|param| param.weights.value().unwrap().to_vec::<f32>().unwrap()).collect()
        };
        let before = biases(&mut training);
        assert!(
            before.len() == 2 && before.iter().flatten().any(|&b| half::bf16::from_f32(b).to_f32() != b),
            "{before:?}"
        );
        let losses: Vec<f64> =
            (0..6).map(|step| training.step(&batch(&format!("batch {step}"), 8, 32, 96), 8)).collect();
        assert!(losses[5] < losses[0], "{losses:?}");
        assert!(biases(&mut training) == before, "{name:?}");
    }
}

#[test]
fn biases_follow_the_load_of_experts() {
    let inputs = tempfile::tempdir().unwrap();
    resume::write_inputs(inputs.path());
    let keys = json!({
        "architectures": ["DeepseekV3ForCausalLM"], "model_type": "deepseek_v3", "vocab_size": 100, "hidden_size": 32,
        "intermediate_size": 48, "moe_intermediate_size": 16, "num_hidden_layers": 3, "num_attention_heads": 2,
        "num_key_value_heads": 2, "kv_lora_rank": 16, "q_lora_rank": null, "qk_nope_head_dim": 16, "qk_rope_head_dim": 16,
        "v_head_dim": 16, "n_routed_experts": 8, "num_experts_per_tok": 2, "n_shared_experts": 1, "first_k_dense_replace": 1,
        "n_group": 1, "topk_group": 1, "norm_topk_prob": true, "routed_scaling_factor": 1.0, "scoring_func": "sigmoid",
        "topk_method": "noaux_tc", "max_position_embeddings": 64,
    });
    std::fs::write(inputs.path().join("config.json"), keys.to_string()).unwrap();
    // Returns the biases in the last checkpoint, and the mean imbalance of the last ten steps.
    let run = |name: &str, rate: f64, stop: u64| {
        let folder = inputs.path().join(name);
        let mut run = resume::config(inputs.path(), &folder, RecipeName::Fp8Row);
        (run.training.max_steps, run.evaluation.eval_steps, run.router.bias_update_rate) =
            (Some(40), Interval::Every(40), rate);
        if stop < 40 {
            resume::train(&run, &Device::Cpu, &Start::New, stop).unwrap_err();
            resume::train(&run, &Device::Cpu, &Start::Resume, u64::MAX).unwrap();
        } else {
            resume::train(&run, &Device::Cpu, &Start::New, u64::MAX).unwrap();
        }
        let bytes = std::fs::read(folder.join("checkpoints/checkpoint-40/model.safetensors")).unwrap();
        let written = safetensors::SafeTensors::deserialize(&bytes).unwrap();
        let bias = |layer: usize| {
            let tensor = written.tensor(&format!("model.layers.{layer}.mlp.gate.e_score_correction_bias")).unwrap();
            assert_eq!((tensor.dtype(), tensor.shape()), (Dtype::F32, &[8][..]));
            tensor.data().chunks(4).map(|b| f32::from_le_bytes(b.try_into().unwrap())).collect::<Vec<_>>()
        };
        let steps: Vec<f64> =
            resume::metrics(&folder).iter().filter_map(|line| line["router_imbalance"].as_f64()).collect();
        let imbalance = steps[steps.len() - 10..].iter().sum::<f64>() / 10.0;
        ([bias(1), bias(2)].concat(), imbalance)
    };
    let (still, without) = run("without", 0.0, 40);
    assert!(still.iter().all(|&bias| bias == 0.0), "{still:?}");
    let (biases, with) = run("with", 0.01, 40);
    eprintln!("the fullest expert has {without:.3} times the mean, and {with:.3} with biases {biases:?}");
    // A bias moves by at most forty updates at the rate of 0.01, plus their rounding in F32. At least one bias moves by more than two updates.
    assert!(
        biases.iter().all(|bias| bias.abs() <= 0.4001) && biases.iter().any(|bias| bias.abs() > 0.02),
        "{biases:?}"
    );
    // Measured: the excess over the mean falls from 1.75 to 0.34.
    assert!(with - 1.0 < 0.7 * (without - 1.0), "{with} and {without}");
    assert_eq!(run("resumed", 0.01, 17), (biases, with));

    let no_bias = json!({"architectures": ["OlmoeForCausalLM"], "model_type": "olmoe", "vocab_size": 100, "hidden_size": 32,
        "intermediate_size": 16, "num_hidden_layers": 1, "num_attention_heads": 2, "num_experts": 4, "num_experts_per_tok": 2,
        "max_position_embeddings": 64});
    std::fs::write(inputs.path().join("config.json"), no_bias.to_string()).unwrap();
    let mut run = resume::config(inputs.path(), &inputs.path().join("none"), RecipeName::Fp8Row);
    run.router.bias_update_rate = 0.001;
    let error = run.decoder_config().unwrap_err().to_string();
    assert!(error.starts_with("`router.bias_update_rate` is 0.001, and the routers of the model of"), "{error}");
}
