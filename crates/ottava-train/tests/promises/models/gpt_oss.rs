//! Folders of gpt-oss have one tensor for all experts of a layer, in BF16 as `transformers` writes it, or in MXFP4 as it was published.

use crate::models::recorded::Recorded;
use crate::runs::resume::{self, write_inputs};
use crate::setup::{config, largest_error, logits, recipe};
use ottava_checkpoint::{FolderWeights, RandomWeights, WeightFiles};
use ottava_convert::export::{Source, export};
use ottava_models::{ConfigFile, Decoder, DecoderConfig, RopeKind, decoder_config};
use ottava_recipe::param::{Purpose, WeightSource};
use ottava_recipe::{Fp8Format, RecipeName};
use ottava_tensor::testing::values;
use ottava_tensor::{Device, Tensor};
use ottava_train::trainer::Start;
use serde_json::{Value, json};
use std::collections::BTreeMap;
use std::path::Path;

/// The type, the shape and the bytes of the tensors of a folder, by name.
type Tensors = BTreeMap<String, (&'static str, Vec<usize>, Vec<u8>)>;

fn keys() -> Value {
    json!({
        "architectures": ["GptOssForCausalLM"], "model_type": "gpt_oss", "vocab_size": 100, "hidden_size": 64,
        "intermediate_size": 32, "num_hidden_layers": 2, "num_attention_heads": 4, "num_key_value_heads": 2, "head_dim": 16,
        "num_local_experts": 3, "num_experts_per_tok": 2, "sliding_window": 7, "max_position_embeddings": 64,
        "rope_scaling": {"rope_type": "yarn", "factor": 4.0, "original_max_position_embeddings": 16, "truncate": false},
        "rope_theta": 150000.0,
    })
}

/// Returns the values of all parameters of a model, by name.
fn weights_of(sizes: &DecoderConfig, weights: &mut dyn WeightSource) -> BTreeMap<String, Vec<f64>> {
    let recipe = recipe(RecipeName::Bf16, Fp8Format::Auto);
    let mut decoder = Decoder::new(sizes, &recipe, &Device::Cpu, Purpose::Infer, 32, weights).unwrap();
    decoder.parameters().iter().map(|p| (p.identity.name().to_string(), values(&p.weights.value().unwrap()))).collect()
}

/// Returns the weights of a folder, and checks that all its tensors are read.
fn of_folder(folder: &Path) -> BTreeMap<String, Vec<f64>> {
    let sizes = decoder_config(&ConfigFile::read(folder).unwrap()).unwrap();
    let mut weights = FolderWeights::open(folder).unwrap();
    let loaded = weights_of(&sizes, &mut weights);
    weights.finish(&sizes).unwrap();
    loaded
}

/// Writes a folder with these tensors.
fn write(folder: &Path, config: &Value, tensors: &Tensors) {
    std::fs::create_dir_all(folder).unwrap();
    std::fs::write(folder.join("config.json"), config.to_string()).unwrap();
    let (mut header, mut data) = (serde_json::Map::new(), Vec::new());
    for (name, (dtype, shape, bytes)) in tensors {
        let offsets = [data.len(), data.len() + bytes.len()];
        header.insert(name.clone(), json!({"dtype": dtype, "shape": shape, "data_offsets": offsets}));
        data.extend(bytes);
    }
    let header = Value::Object(header).to_string();
    let file = [&(header.len() as u64).to_le_bytes()[..], header.as_bytes(), &data].concat();
    std::fs::write(folder.join("model.safetensors"), file).unwrap();
}

/// Makes a checkpoint of a run whose learning rate is zero in F32. Returns its folder, which has the initial weights, and its seed.
fn checkpoint(inputs: &Path) -> (std::path::PathBuf, u64) {
    write_inputs(inputs);
    std::fs::write(inputs.join("config.json"), keys().to_string()).unwrap();
    let mut run = resume::config(inputs, &inputs.join("run"), RecipeName::Bf16);
    (run.training.max_steps, run.optimizer.learning_rate) = (Some(1), 1e-60);
    resume::train(&run, &Device::Cpu, &Start::New, 2).unwrap();
    (inputs.join("run/checkpoints/checkpoint-1"), run.seed)
}

#[test]
fn a_folder_has_the_tensors_of_transformers_and_is_read_again() {
    let inputs = tempfile::tempdir().unwrap();
    let (folder, seed) = checkpoint(inputs.path());
    let bytes = std::fs::read(folder.join("model.safetensors")).unwrap();
    let written = safetensors::SafeTensors::deserialize(&bytes).unwrap();
    let shape = |name: &str| written.tensor(&format!("model.layers.1.{name}")).unwrap().shape().to_vec();
    assert_eq!(shape("mlp.experts.gate_up_proj"), [3, 64, 64]);
    assert_eq!(shape("mlp.experts.gate_up_proj_bias"), [3, 64]);
    assert_eq!(shape("mlp.experts.down_proj"), [3, 32, 64]);
    assert_eq!(shape("mlp.experts.down_proj_bias"), [3, 64]);
    assert_eq!((shape("mlp.router.weight"), shape("mlp.router.bias")), (vec![3, 64], vec![3]));
    assert_eq!(shape("self_attn.sinks"), [4]);
    // `transformers` 5.23 writes 17 tensors for each layer, and the embedding, the norm and the head.
    assert_eq!(written.len(), 2 * 17 + 3);
    let config = ConfigFile::read(&folder).unwrap();
    let initial = weights_of(&decoder_config(&config).unwrap(), &mut RandomWeights { seed, device: Device::Cpu });
    assert!(initial == of_folder(&folder));

    let source = Source::open(&folder).unwrap();
    let exported = inputs.path().join("exported");
    export(&source, None, &BTreeMap::new(), &exported).unwrap();
    assert!(initial == of_folder(&exported));
    let format = ottava_convert::export::Fp8Format::FP8_BLOCK;
    let error = export(&source, Some(format), &BTreeMap::new(), &inputs.path().join("fp8")).unwrap_err().to_string();
    assert!(error.contains("all experts of a layer in one tensor") && error.contains("--format bf16"), "{error}");
}

/// The values of the codes of E2M1, as listed in OCP's specification.
const E2M1: [f32; 16] = [0.0, 0.5, 1.0, 1.5, 2.0, 3.0, 4.0, 6.0, -0.0, -0.5, -1.0, -1.5, -2.0, -3.0, -4.0, -6.0];

/// Returns the tensors of a folder with its experts in MXFP4, and tensors with the same values in BF16.
fn in_mxfp4(folder: &Path) -> [Tensors; 2] {
    let bytes = std::fs::read(folder.join("model.safetensors")).unwrap();
    let (mut quantized, mut plain) = (Tensors::new(), Tensors::new());
    for (at, (name, view)) in safetensors::SafeTensors::deserialize(&bytes).unwrap().tensors().into_iter().enumerate() {
        if !name.ends_with("_proj") {
            let tensor = ("BF16", view.shape().to_vec(), view.data().to_vec());
            quantized.insert(name.clone(), tensor.clone());
            plain.insert(name, tensor);
            continue;
        }
        let [experts, inputs, outputs] = view.shape()[..] else { panic!("a tensor of all experts") };
        let code =
            |expert: usize, output: usize, input: usize| (7 * expert + 5 * output + 3 * input + input / 7 + at) % 16;
        let scale = |expert: usize, output: usize, block: usize| 120 + (expert + 3 * output + 5 * block) % 9;
        let (mut codes, mut scales) = (Vec::new(), Vec::new());
        let mut dequantized = vec![0u8; 2 * experts * inputs * outputs];
        for (expert, output) in (0..experts).flat_map(|e| (0..outputs).map(move |o| (e, o))) {
            for input in (0..inputs).step_by(2) {
                codes.push((code(expert, output, input) | code(expert, output, input + 1) << 4) as u8);
            }
            scales.extend((0..inputs / 32).map(|block| scale(expert, output, block) as u8));
            for input in 0..inputs {
                let exponent = scale(expert, output, input / 32) as i32 - 127;
                let value = half::bf16::from_f32(E2M1[code(expert, output, input)] * 2f32.powi(exponent));
                let place = 2 * ((expert * inputs + input) * outputs + output);
                dequantized[place..place + 2].copy_from_slice(&value.to_le_bytes());
            }
        }
        quantized.insert(format!("{name}_blocks"), ("U8", vec![experts, outputs, inputs / 32, 16], codes));
        quantized.insert(format!("{name}_scales"), ("U8", vec![experts, outputs, inputs / 32], scales));
        plain.insert(name, ("BF16", view.shape().to_vec(), dequantized));
    }
    [quantized, plain]
}

#[test]
fn mxfp4_is_read_as_its_values() {
    let inputs = tempfile::tempdir().unwrap();
    let (folder, _) = checkpoint(inputs.path());
    let [mut quantized, plain] = in_mxfp4(&folder);
    let [mxfp4, bf16] = ["mxfp4", "bf16"].map(|name| inputs.path().join(name));
    let mut config = keys();
    write(&bf16, &config, &plain);
    config["quantization_config"] =
        json!({"quant_method": "mxfp4", "modules_to_not_convert": ["model.layers.*.self_attn", "lm_head"]});
    write(&mxfp4, &config, &quantized);
    let expected = of_folder(&bf16);
    assert!(expected == of_folder(&mxfp4));
    assert!(expected.values().flatten().any(|value| *value == -6.0 * 2f64.powi(-7)), "codes have signs");
    let [of_mxfp4, of_bf16] = [&mxfp4, &bf16].map(|folder| {
        let files = WeightFiles::open(folder).unwrap();
        let infos: BTreeMap<_, _> = files.names().map(|name| (name.to_string(), files.info(name).unwrap())).collect();
        infos
            .into_iter()
            .map(|(name, info)| (name, (info.shape.clone(), files.bytes(&info).unwrap())))
            .collect::<BTreeMap<_, _>>()
    });
    assert!(of_mxfp4 == of_bf16, "names, shapes and bytes");

    let exported = inputs.path().join("exported");
    export(&Source::open(&mxfp4).unwrap(), None, &BTreeMap::new(), &exported).unwrap();
    assert!(!ConfigFile::read(&exported).unwrap().has("quantization_config"));
    assert!(expected == of_folder(&exported));

    let refused = |folder: &Path| {
        let sizes = decoder_config(&ConfigFile::read(folder).unwrap()).unwrap();
        let mut weights = FolderWeights::open(folder).unwrap();
        let recipe = recipe(RecipeName::Bf16, Fp8Format::Auto);
        Decoder::new(&sizes, &recipe, &Device::Cpu, Purpose::Infer, 32, &mut weights).map(drop).unwrap_err().to_string()
    };
    let name = "model.layers.0.mlp.experts.down_proj_scales";
    let whole = quantized[name].clone();
    quantized.get_mut(name).unwrap().2[5] = 255;
    write(&mxfp4, &config, &quantized);
    assert!(refused(&mxfp4).contains("`model.layers.0.mlp.experts.down_proj_scales` has scales that are not finite"));
    quantized.insert(name.into(), ("U8", vec![3, 32, 2], whole.2));
    write(&mxfp4, &config, &quantized);
    let error = refused(&mxfp4);
    assert!(error.contains("have shapes [3, 64, 1, 16] and [3, 32, 2]"), "{error}");
}

/// A loader that swaps gate and up, or experts, would compute other logits.
#[test]
fn the_order_of_interleaved_outputs_is_seen_in_the_logits() {
    struct Swapped(Recorded, [&'static str; 2]);
    impl WeightSource for Swapped {
        fn read(
            &mut self,
            tensor: &ottava_recipe::param::FolderTensor,
            elements: std::ops::Range<usize>,
            init: ottava_recipe::param::Init,
        ) -> ottava_common::Result<Tensor> {
            let [first, second] = self.1;
            let mut tensor = tensor.clone();
            if let ottava_recipe::param::FolderLayout::Stacked(stack) = &mut tensor.layout
                && stack.name == "experts.gate_up_proj"
            {
                match [first, second] {
                    ["gate", "up"] => stack.linear = 1 - stack.linear,
                    _ if stack.expert < 2 => stack.expert = 1 - stack.expert,
                    _ => {}
                }
            }
            self.0.read(&tensor, elements, init)
        }
    }
    let recorded = Recorded::open("referee_gpt_oss", "gpt_oss");
    let logits_of = |weights: &mut dyn WeightSource| {
        let recipe = recipe(RecipeName::Fp32, Fp8Format::Auto);
        let decoder = Decoder::new(&recorded.sizes(), &recipe, &Device::Cpu, Purpose::Infer, 24, weights).unwrap();
        let ids = recorded.ids("inputs");
        values(&logits(&decoder, &Tensor::from_slice(&Device::Cpu, &[5], &ids[..5]).unwrap()))
    };
    let expected = logits_of(&mut recorded.clone());
    for swap in [["gate", "up"], ["0", "1"]] {
        assert!(largest_error(&logits_of(&mut Swapped(recorded.clone(), swap)), &expected) > 1e-2, "{swap:?}");
    }
}

/// These are the defaults of `transformers` 5.23 for a config.json without rotary positions.
#[test]
fn rotary_positions_are_stretched_by_default() {
    let mut keys = keys();
    let all = keys.as_object_mut().unwrap();
    all.remove("rope_scaling");
    all.remove("rope_theta");
    let sizes = config(keys);
    let rope = sizes.rope().unwrap();
    let RopeKind::Yarn(yarn) = &rope.kind else { panic!("{rope:?}") };
    assert_eq!((rope.theta, yarn.factor, yarn.original_max_positions, yarn.truncate), (150_000.0, 32.0, 4096.0, false));
}
