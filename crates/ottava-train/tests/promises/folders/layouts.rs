//! Tensors that a folder stores in another layout than memory: a written folder has the layout of transformers, and is read as it was.

use crate::peft::lora::{adapter_run, folder_losses};
use crate::runs::resume::{self, train, write_inputs};
use crate::setup::recipe;
use ottava_checkpoint::{AdapterFolder, FolderWeights, ModelFiles, RandomWeights, merge, write_file};
use ottava_models::{ConfigFile, Decoder, DecoderConfig, decoder_config};
use ottava_recipe::param::{Purpose, WeightSource};
use ottava_recipe::{Fp8Format, RecipeName};
use ottava_settings::WeightInit;
use ottava_tensor::testing::{normals, values};
use ottava_tensor::{DType, Device, Tensor};
use ottava_train::trainer::Start;
use serde_json::{Value, json};
use std::collections::BTreeMap;
use std::path::{Path, PathBuf};

/// The values of parameters, by name.
pub type Parameters = BTreeMap<String, Vec<f64>>;
/// The shape and the values of a tensor.
type Stored = (Vec<usize>, Vec<f64>);

/// Writes `inputs` and a model with random weights in F32, and returns its folder and its seed.
fn model(inputs: &Path, own: Value) -> (PathBuf, u64) {
    write_inputs(inputs);
    let mut keys = json!({
        "vocab_size": 100, "hidden_size": 32, "intermediate_size": 48, "num_hidden_layers": 2, "num_attention_heads": 4,
        "num_key_value_heads": 4, "max_position_embeddings": 64,
    });
    keys.as_object_mut().unwrap().extend(own.as_object().unwrap().clone());
    std::fs::write(inputs.join("config.json"), keys.to_string()).unwrap();
    let mut run = resume::config(inputs, &inputs.join("made"), RecipeName::Fp32);
    // The learning rate is zero in F32, so the step changes no weight.
    (run.training.max_steps, run.optimizer.learning_rate) = (Some(1), 1e-60);
    train(&run, &Device::Cpu, &Start::New, 2).unwrap();
    (inputs.join("made/checkpoints/checkpoint-1"), run.seed)
}

/// Returns the values of all parameters of a model, by name.
pub fn in_memory(sizes: &DecoderConfig, weights: &mut dyn WeightSource) -> Parameters {
    let recipe = recipe(RecipeName::Fp32, Fp8Format::Auto);
    let mut decoder = Decoder::new(sizes, &recipe, &Device::Cpu, Purpose::Infer, 32, weights).unwrap();
    decoder.parameters().iter().map(|p| (p.identity.name().to_string(), values(&p.weights.value().unwrap()))).collect()
}

/// Checks that the folder of a model holds what a run wrote, and returns the values in memory and the values in the folder.
fn round_trip(inputs: &Path, own: Value) -> (Parameters, impl Fn(&str) -> Stored) {
    let (folder, seed) = model(inputs, own);
    let sizes = decoder_config(&ConfigFile::read(&folder).unwrap()).unwrap();
    let initial = in_memory(&sizes, &mut RandomWeights { seed, device: Device::Cpu });
    let mut weights = FolderWeights::open(&folder).unwrap();
    assert!(initial == in_memory(&sizes, &mut weights), "what was written is read again");
    weights.finish(&sizes).unwrap();
    let files = ModelFiles::open(&folder).unwrap();
    let stored = move |name: &str| (files.info(name).unwrap().shape, values(&files.values(name).unwrap()));
    (initial, stored)
}

#[test]
fn gpt_neox_has_the_rows_of_one_head_after_another() {
    let inputs = tempfile::tempdir().unwrap();
    let (memory, stored) = round_trip(inputs.path(), json!({"model_type": "gpt_neox"}));
    let name = "gpt_neox.layers.1.attention.query_key_value.weight";
    let (shape, values) = stored(name);
    assert_eq!((shape, stored("embed_out.weight").0), (vec![96, 32], vec![100, 32]));
    // 4 heads of 8 rows with 32 columns.
    for (head, part, row) in [(0, 0, 0), (0, 1, 3), (1, 2, 7), (3, 0, 1), (3, 2, 7)] {
        let in_folder = ((head * 3 + part) * 8 + row) * 32;
        let in_memory = ((part * 4 + head) * 8 + row) * 32;
        assert_eq!(values[in_folder..][..32], memory[name][in_memory..][..32], "{head}, {part}, {row}");
    }
}

/// Adapters of PEFT multiply rows in the order of the folder. The base is F32, so only the order of additions differs.
#[test]
fn a_merged_gpt_neox_is_the_base_plus_its_adapter() {
    let inputs = tempfile::tempdir().unwrap();
    let (base, _) = model(inputs.path(), json!({"model_type": "gpt_neox"}));
    let run = adapter_run(inputs.path(), &base, &inputs.path().join("run"), RecipeName::Fp32);
    train(&run, &Device::Cpu, &Start::New, u64::MAX).unwrap();
    let (folder, merged) = (run.output_dir.join("checkpoints/checkpoint-6"), inputs.path().join("merged"));
    assert!(merge(&base, &AdapterFolder::open(&folder).unwrap(), None, &merged).unwrap() > 0);
    let [plain, with, sum] = [(&base, None), (&base, Some(&*folder)), (&merged, None)]
        .map(|(model, adapter)| folder_losses(model, adapter, RecipeName::Fp32));
    assert!((with / sum - 1.0).abs() < 1e-6, "base and adapter lose {with}, the merged model {sum}");
    assert!((with / plain - 1.0).abs() > 1e-4, "the adapter changes the loss of {plain} to {with}");
}

/// New norms are all one, so the folder gets other values first.
#[test]
fn stablelm_has_a_tensor_for_the_norm_of_each_head() {
    let inputs = tempfile::tempdir().unwrap();
    let keys = json!({"model_type": "stablelm", "qk_layernorm": true, "num_key_value_heads": 2});
    let (folder, _) = model(inputs.path(), keys);
    let tensors = |folder: &Path| -> Vec<(String, Tensor)> {
        let files = ModelFiles::open(folder).unwrap();
        files.names().map(|name| (name.to_string(), files.values(name).unwrap())).collect()
    };
    let mut written = tensors(&folder);
    for (name, norm) in written.iter_mut().filter(|(name, _)| name.contains("layernorm.norms.")) {
        *norm = normals(name, norm.shape(), DType::F32);
    }
    write_file(&folder.join("model.safetensors"), &written).unwrap();
    std::fs::remove_file(folder.join("manifest.json")).unwrap();
    let mut run = resume::config(inputs.path(), &inputs.path().join("again"), RecipeName::Fp32);
    (run.model.path, run.model.init) = (folder.clone(), WeightInit::Pretrained);
    (run.training.max_steps, run.optimizer.learning_rate) = (Some(1), 1e-60);
    train(&run, &Device::Cpu, &Start::New, 2).unwrap();
    let again = tensors(&inputs.path().join("again/checkpoints/checkpoint-1"));
    let of = |tensors: &[(String, Tensor)]| -> Vec<_> {
        tensors.iter().map(|(name, tensor)| (name.clone(), tensor.shape().to_vec(), values(tensor))).collect()
    };
    assert!(of(&again) == of(&written), "what was read is written again");

    let sizes = decoder_config(&ConfigFile::read(&folder).unwrap()).unwrap();
    let memory = in_memory(&sizes, &mut FolderWeights::open(&folder).unwrap());
    let stored = |name: &str| values(&written.iter().find(|(own, _)| own == name).unwrap().1);
    let all = &memory["model.layers.0.self_attn.q_layernorm.norms.{}.weight"];
    for head in 0..4 {
        let own = stored(&format!("model.layers.0.self_attn.q_layernorm.norms.{head}.weight"));
        assert_eq!(own, all[8 * head..][..8], "{head}");
    }
}

#[test]
fn granite_stacks_the_rows_of_experts() {
    let inputs = tempfile::tempdir().unwrap();
    let keys = json!({
        "model_type": "granitemoeshared", "num_local_experts": 3, "num_experts_per_tok": 2, "shared_intermediate_size": 24,
    });
    let (memory, stored) = round_trip(inputs.path(), keys);
    let (shape, values) = stored("model.layers.1.block_sparse_moe.input_linear.weight");
    assert_eq!(shape, [3, 96, 32]);
    assert!(memory.values().any(|of_experts| *of_experts == values), "memory has the same order");
    assert_eq!(stored("model.layers.1.block_sparse_moe.output_linear.weight").0, [3, 32, 48]);
    assert_eq!(stored("model.layers.1.shared_mlp.input_linear.weight").0, [48, 32]);
}
