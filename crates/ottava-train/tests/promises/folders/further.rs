//! Tensors that predict further tokens, and indexers of sparse attention, which published folders of some families have beside the tensors of the
//! model: they are not used, and a written folder has them as they were read.

use crate::folders::stacked::{Tensors, read, run_of, write};
use crate::runs::resume::{train, write_inputs};
use ottava_checkpoint::{FolderWeights, write_file};
use ottava_convert::export::{Source, export};
use ottava_models::{ConfigFile, decoder_config};
use ottava_settings::WeightInit;
use ottava_tensor::fp8::E4M3;
use ottava_tensor::{DType, Device, Tensor};
use ottava_train::trainer::Start;
use serde_json::{Value, json};
use std::collections::BTreeMap;
use std::path::Path;

fn keys(own: Value) -> Value {
    let mut keys = json!({
        "hidden_size": 32, "intermediate_size": 48, "num_hidden_layers": 2, "num_attention_heads": 4, "num_key_value_heads": 4, "vocab_size": 100,
        "max_position_embeddings": 64, "moe_intermediate_size": 16, "num_experts_per_tok": 2, "n_routed_experts": 4, "num_experts": 4,
        "n_group": 1, "topk_group": 1, "first_k_dense_replace": 1,
    });
    keys.as_object_mut().unwrap().extend(own.as_object().unwrap().clone());
    keys
}

fn latent(own: Value) -> Value {
    let mut keys = keys(own);
    let latent =
        json!({"q_lora_rank": null, "kv_lora_rank": 8, "qk_nope_head_dim": 8, "qk_rope_head_dim": 4, "v_head_dim": 8});
    keys.as_object_mut().unwrap().extend(latent.as_object().unwrap().clone());
    keys
}

/// Returns `config.json` of each family, and the names of two of its tensors that predict further tokens.
fn models() -> Vec<(Value, [&'static str; 2])> {
    let of_layer = ["model.layers.2.eh_proj.weight", "model.layers.2.shared_head.norm.weight"];
    let delta = json!({
        "model_type": "qwen3_5_text", "head_dim": 8, "full_attention_interval": 2, "linear_key_head_dim": 4, "linear_num_key_heads": 2,
        "linear_num_value_heads": 2, "linear_value_head_dim": 4,
    });
    let next = json!({
        "model_type": "qwen3_next", "head_dim": 8, "full_attention_interval": 2, "linear_key_head_dim": 4, "linear_num_key_heads": 2,
        "linear_num_value_heads": 2, "linear_value_head_dim": 4, "shared_expert_intermediate_size": 16,
    });
    let of_indexer = ["model.layers.1.self_attn.indexer.k_norm.bias", "model.layers.2.eh_proj.weight"];
    let indexed = |name: &str| {
        let mut keys = latent(json!({"model_type": name, "index_topk": 32}));
        keys["q_lora_rank"] = json!(8);
        keys
    };
    let of_model = ["mtp.fc.weight", "mtp.layers.0.mlp.experts.0.up_proj.weight"];
    let ernie = json!({"model_type": "ernie4_5_moe", "moe_num_experts": 4, "moe_k": 2, "moe_layer_start_index": 1});
    vec![
        (keys(json!({"model_type": "glm4_moe"})), of_layer),
        (latent(json!({"model_type": "deepseek_v3"})), of_layer),
        (indexed("deepseek_v32"), of_indexer),
        (indexed("glm_moe_dsa"), of_indexer),
        (latent(json!({"model_type": "glm4_moe_lite"})), of_layer),
        (keys(delta), of_model),
        (keys(next), of_model),
        (keys(json!({"model_type": "exaone_moe"})), of_model),
        (keys(ernie), ["model.mtp_block.0.norm.weight", "model.mtp_linear_proj.0.weight"]),
    ]
}

#[test]
fn predictions_of_further_tokens_are_written_as_they_were_read() {
    for (keys, names) in models() {
        let folder = tempfile::tempdir().unwrap();
        let inputs = folder.path();
        write_inputs(inputs);
        std::fs::write(inputs.join("config.json"), keys.to_string()).unwrap();
        let mut made = run_of(inputs, inputs, "made");
        made.training.max_steps = Some(1);
        train(&made, &Device::Cpu, &Start::New, u64::MAX).unwrap();
        let plain = read(&made.output_dir.join("checkpoints/checkpoint-1"));
        assert!(names.iter().all(|name| !plain.contains_key(*name)), "new folders of {keys} have no predictions");

        let further = Tensors::from(names.map(|name| (name.to_string(), (vec![2, 3], vec![1.5; 6]))));
        let (model, mut all) = (inputs.join("model"), plain.clone());
        all.extend(further.clone());
        write(&model, inputs, &keys, &all);
        let mut run = run_of(inputs, &model, "run");
        (run.model.init, run.training.max_steps) = (WeightInit::Pretrained, Some(1));
        train(&run, &Device::Cpu, &Start::New, u64::MAX).unwrap();
        let saved = run.output_dir.join("checkpoints/checkpoint-1");
        let source = Source::open(&saved).unwrap();
        let exported = inputs.join("exported");
        export(&source, None, &BTreeMap::new(), &exported).unwrap();
        for folder in [&saved, &exported] {
            let written = read(folder);
            assert_eq!(written.len(), plain.len() + names.len(), "{keys}");
            assert!(names.iter().all(|name| written[*name] == further[*name]) && written != all, "{keys}");
            let sizes = decoder_config(&ConfigFile::read(folder).unwrap()).unwrap();
            FolderWeights::check(folder, &sizes, &source.recipe).unwrap();
        }

        all.insert("model.layers.3.eh_proj.weight".into(), (vec![1], vec![0.0]));
        write(&model, inputs, &keys, &all);
        let sizes = decoder_config(&ConfigFile::read(&model).unwrap()).unwrap();
        let error = FolderWeights::check(&model, &sizes, &source.recipe).unwrap_err().to_string();
        assert!(error.contains("`model.layers.3.eh_proj.weight` that config.json has no place for"), "{error}");
    }
}

/// Published folders of DeepSeek-V3 have all linears in FP8, and a written folder has none.
#[test]
fn predictions_in_fp8_are_dequantized() {
    let (folder, mut keys) = (tempfile::tempdir().unwrap(), latent(json!({"model_type": "deepseek_v3"})));
    let inputs = folder.path();
    write_inputs(inputs);
    std::fs::write(inputs.join("config.json"), keys.to_string()).unwrap();
    let mut made = run_of(inputs, inputs, "made");
    made.training.max_steps = Some(1);
    train(&made, &Device::Cpu, &Start::New, u64::MAX).unwrap();
    let mut all: Vec<(String, Tensor)> = read(&made.output_dir.join("checkpoints/checkpoint-1"))
        .into_iter()
        .map(|(name, (shape, values))| (name, Tensor::from_slice::<f32>(&Device::Cpu, &shape, &values).unwrap()))
        .collect();
    let codes: Vec<u8> = [1.0, -2.0, 0.5, 4.0].map(|value| E4M3::from_f32(value).0).to_vec();
    let name = "model.layers.2.eh_proj.weight";
    all.push((name.into(), Tensor::from_bytes(&Device::Cpu, &[2, 2], DType::E4M3, &codes).unwrap()));
    all.push((format!("{name}_scale_inv"), Tensor::from_slice(&Device::Cpu, &[1, 1], &[0.25f32]).unwrap()));
    let model = inputs.join("model");
    keys["quantization_config"] =
        json!({"quant_method": "fp8", "weight_block_size": [128, 128], "activation_scheme": "dynamic"});
    write(&model, inputs, &keys, &Tensors::new());
    write_file(&model.join("model.safetensors"), &all).unwrap();
    let mut run = run_of(inputs, &model, "run");
    (run.model.init, run.training.max_steps) = (WeightInit::Pretrained, Some(1));
    train(&run, &Device::Cpu, &Start::New, u64::MAX).unwrap();
    let written = read(&run.output_dir.join("checkpoints/checkpoint-1"));
    assert_eq!(written[name], (vec![2, 2], vec![0.25, -0.5, 0.125, 1.0]));
    assert!(!written.contains_key(&format!("{name}_scale_inv")));
}

/// transformers stores the constants of xIELU, and leaves them unset if a folder lacks them.
#[test]
fn folders_of_apertus_have_the_constants_of_their_activation() {
    let folder = tempfile::tempdir().unwrap();
    let (inputs, keys) = (folder.path(), keys(json!({"model_type": "apertus", "max_position_embeddings": 16_384})));
    write_inputs(inputs);
    std::fs::write(inputs.join("config.json"), keys.to_string()).unwrap();
    let trained = |model: &Path, output: &str, init| {
        let mut run = run_of(inputs, model, output);
        (run.model.init, run.training.max_steps) = (init, Some(1));
        train(&run, &Device::Cpu, &Start::New, u64::MAX).map(|_| run.output_dir.join("checkpoints/checkpoint-1"))
    };
    let made = trained(inputs, "made", WeightInit::Random).unwrap();
    let written = read(&made);
    let of = |name: &str| written[&format!("model.layers.1.mlp.act_fn.{name}")].clone();
    assert_eq!([of("beta"), of("eps")], [(vec![], vec![0.5]), (vec![], vec![-1e-6])]);
    assert_eq!(of("alpha_p").0, [1]);
    let again = read(&trained(&made, "again", WeightInit::Pretrained).unwrap());
    assert_eq!(again.keys().collect::<Vec<_>>(), written.keys().collect::<Vec<_>>());
    assert_eq!(again["model.layers.1.mlp.act_fn.beta"], of("beta"));
    assert!(again["model.layers.1.mlp.act_fn.alpha_n"] != of("alpha_n"), "alphas are trained");

    let (model, mut other) = (inputs.join("other"), written.clone());
    other.insert("model.layers.0.mlp.act_fn.beta".into(), (vec![], vec![0.7]));
    write(&model, inputs, &keys, &other);
    let error = trained(&model, "refused", WeightInit::Pretrained).unwrap_err().to_string();
    assert!(error.contains("`model.layers.0.mlp.act_fn.beta` is [0.7]; 0.5 is implemented"), "{error}");
}

/// Each block has a number that training leaves alone, and published folders have projections of layers that read the keys of earlier layers.
#[test]
fn numbers_of_blocks_and_projections_without_readers_are_written_as_they_were_read() {
    let folder = tempfile::tempdir().unwrap();
    let keys = keys(json!({
        "model_type": "gemma4_text", "num_hidden_layers": 3, "layer_types": ["full_attention", "sliding_attention", "full_attention"],
        "head_dim": 8, "global_head_dim": 16, "num_kv_shared_layers": 1, "hidden_size_per_layer_input": 8, "vocab_size_per_layer_input": 100,
        "enable_moe_block": true, "top_k_experts": 2,
    }));
    let inputs = folder.path();
    write_inputs(inputs);
    std::fs::write(inputs.join("config.json"), keys.to_string()).unwrap();
    let trained = |model: &Path, output: &str, init| {
        let mut run = run_of(inputs, model, output);
        (run.model.init, run.training.max_steps) = (init, Some(2));
        train(&run, &Device::Cpu, &Start::New, u64::MAX).unwrap();
        read(&run.output_dir.join("checkpoints/checkpoint-2"))
    };
    let made = trained(inputs, "made", WeightInit::Random);
    let number = "model.layers.1.layer_scalar";
    assert_eq!(made[number], (vec![1], vec![1.0]), "a new model has neutral numbers");
    assert!(!made.contains_key("model.layers.2.self_attn.k_proj.weight"));
    let (model, mut all) = (inputs.join("model"), made.clone());
    all.insert(number.into(), (vec![1], vec![0.75]));
    all.insert("model.layers.2.self_attn.k_proj.weight".into(), (vec![2, 2], vec![1.0, 2.0, 3.0, 4.0]));
    write(&model, inputs, &keys, &all);
    let written = trained(&model, "run", WeightInit::Pretrained);
    assert_eq!(written.keys().collect::<Vec<_>>(), all.keys().collect::<Vec<_>>());
    for name in [number, "model.layers.2.self_attn.k_proj.weight"] {
        assert_eq!(written[name], all[name], "{name}");
    }
    let of_layers =
        ["per_layer_input_gate.weight", "router.per_expert_scale", "router.scale", "self_attn.q_norm.weight"];
    let names = of_layers.iter().map(|name| format!("model.layers.2.{name}"));
    for name in
        names.chain(["model.embed_tokens_per_layer.weight".into(), "model.per_layer_projection_norm.weight".into()])
    {
        assert!(written[&name] != all[&name], "`{name}` is trained");
    }
}
