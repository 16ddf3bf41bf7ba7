//! Folders of vision-language models: the text model trains as in a folder of its own, and all other tensors and keys are written as they were read.

use crate::peft::lora::{adapter_run, folder_losses};
use crate::runs::resume::{self, metrics, train, write_inputs};
use crate::setup::config;
use ottava_checkpoint::{AdapterFolder, FolderTemplate, FolderWeights, ModelFiles, merge};
use ottava_convert::export::{Source, export};
use ottava_models::{ConfigFile, decoder_config};
use ottava_recipe::RecipeName;
use ottava_settings::{RunConfig, WeightInit};
use ottava_tensor::Device;
use ottava_train::trainer::Start;
use serde_json::{Value, json};
use std::collections::{BTreeMap, BTreeSet};
use std::path::{Path, PathBuf};

/// The type, the shape and the bytes of the tensors of a folder, by name.
type Tensors = BTreeMap<String, (&'static str, Vec<usize>, Vec<u8>)>;

/// The prefixes in place of `model.` and `lm_head.`, and the prefix of a tower in the same folder.
const FORMS: [[&str; 3]; 3] = [
    ["model.language_model.", "lm_head.", "model.visual."],
    ["language_model.model.", "language_model.lm_head.", "vision_tower."],
    ["model.", "lm_head.", "visual."],
];
/// Keys that a written folder may add at the top.
const ADDED: [&str; 4] = ["dtype", "torch_dtype", "tie_word_embeddings", "quantization_config"];

fn text_keys() -> Value {
    json!({
        "model_type": "qwen2", "hidden_size": 32, "intermediate_size": 48, "num_hidden_layers": 2, "num_attention_heads": 4,
        "num_key_value_heads": 2, "vocab_size": 100, "max_position_embeddings": 64, "rms_norm_eps": 1e-5, "rope_theta": 10000.0,
    })
}

/// Returns `config.json` of the larger model, whose text model has [`text_keys`].
fn wrapper_keys() -> Value {
    let mut text = text_keys();
    text["model_type"] = json!("qwen2_5_vl_text");
    text["tie_word_embeddings"] = json!(false);
    text["rope_scaling"] = json!({"type": "mrope", "mrope_section": [1, 2, 1]});
    json!({
        "architectures": ["Qwen2_5_VLForConditionalGeneration"], "model_type": "qwen2_5_vl", "text_config": text,
        "vision_config": {"depth": 1, "hidden_size": 8, "rope": {"__float__": "Infinity"}}, "image_token_id": 99, "unknown": [1, null, 1e-5],
    })
}

/// Returns tensors of a tower, of types and shapes that the text model does not have.
fn tower(prefix: &str) -> Tensors {
    let bytes = |count: u8| (0..count).map(|i| i.wrapping_mul(37).wrapping_add(count)).collect();
    Tensors::from([
        (format!("{prefix}patch_embed.proj.weight"), ("BF16", vec![2, 3, 1, 2], bytes(24))),
        (format!("{prefix}blocks.0.norm1.weight"), ("F32", vec![3], bytes(12))),
        (format!("{prefix}steps"), ("I64", vec![], bytes(8))),
        ("mtp.fc.weight".to_string(), ("BF16", vec![1, 2], bytes(4))),
    ])
}

fn read(folder: &Path) -> Tensors {
    let files = ModelFiles::open(folder).unwrap();
    let names: Vec<_> = files.names().map(String::from).collect();
    let of = |name: String| {
        let info = files.info(&name).unwrap();
        let dtype = match info.dtype.name() {
            "bfloat16" => "BF16",
            "float32" => "F32",
            "float8_e4m3fn" => "F8_E4M3",
            _ => "I64",
        };
        let bytes = files.read(&name).unwrap();
        (name, (dtype, info.shape, bytes))
    };
    names.into_iter().map(of).collect()
}

/// Writes a folder with these keys and tensors, and the tokenizer of `inputs`.
fn write(folder: &Path, inputs: &Path, keys: &Value, tensors: &Tensors) {
    std::fs::create_dir_all(folder).unwrap();
    std::fs::copy(inputs.join("tokenizer.json"), folder.join("tokenizer.json")).unwrap();
    std::fs::write(folder.join("config.json"), keys.to_string()).unwrap();
    let (mut header, mut data) = (serde_json::Map::new(), Vec::new());
    for (name, (dtype, shape, bytes)) in tensors {
        let offsets = [data.len(), data.len() + bytes.len()];
        header.insert(name.clone(), json!({"dtype": dtype, "shape": shape, "data_offsets": offsets}));
        data.extend(bytes);
    }
    let header = Value::Object(header).to_string();
    std::fs::write(
        folder.join("model.safetensors"),
        [&(header.len() as u64).to_le_bytes()[..], header.as_bytes(), &data].concat(),
    )
    .unwrap();
}

/// Writes `inputs` and a Qwen2 with random weights, and returns the folder of the Qwen2.
fn plain_model(inputs: &Path) -> PathBuf {
    write_inputs(inputs);
    std::fs::write(inputs.join("config.json"), text_keys().to_string()).unwrap();
    let mut run = resume::config(inputs, &inputs.join("made"), RecipeName::Bf16);
    run.training.max_steps = Some(1);
    train(&run, &Device::Cpu, &Start::New, 2).unwrap();
    inputs.join("made/checkpoints/checkpoint-1")
}

/// Returns the tensors of a text model as a larger model of this form has them.
fn renamed(tensors: &Tensors, [decoder, head, _]: [&str; 3]) -> Tensors {
    let stored = |name: &str| match name.strip_prefix("model.") {
        Some(rest) => format!("{decoder}{rest}"),
        None => name.replacen("lm_head.", head, 1),
    };
    tensors.iter().map(|(name, tensor)| (stored(name), tensor.clone())).collect()
}

/// Writes the larger model of this form around `plain`, and returns its folder.
fn wrapped(inputs: &Path, plain: &Path, form: usize) -> PathBuf {
    let folder = inputs.join(format!("wrapped-{form}"));
    let mut tensors = renamed(&read(plain), FORMS[form]);
    tensors.extend(tower(FORMS[form][2]));
    write(&folder, inputs, &wrapper_keys(), &tensors);
    folder
}

fn run_of(inputs: &Path, model: &Path, output: &str) -> RunConfig {
    let mut run = resume::config(inputs, &inputs.join(output), RecipeName::Bf16);
    (run.model.path, run.model.init) = (model.to_path_buf(), WeightInit::Pretrained);
    run.training.max_steps = Some(2);
    run
}

/// Checks that `folder` has the tensors `text` and the tower of a form, and all keys of [`wrapper_keys`].
fn expect_wrapped(folder: &Path, text: &Tensors, form: usize) {
    let mut expected = renamed(text, FORMS[form]);
    expected.extend(tower(FORMS[form][2]));
    let written = read(folder);
    let names = |tensors: &Tensors| tensors.keys().cloned().collect::<BTreeSet<_>>();
    assert_eq!(names(&written), names(&expected));
    for (name, tensor) in &expected {
        assert!(&written[name] == tensor, "{}: `{name}`", folder.display());
    }
    let mut keys = ConfigFile::read(folder).unwrap().values().clone();
    ADDED.iter().for_each(|key| drop(keys.shift_remove(*key)));
    assert_eq!(Value::Object(keys), wrapper_keys());
}

#[test]
fn a_text_model_trains_as_alone_and_all_else_is_written_as_it_was() {
    let inputs = tempfile::tempdir().unwrap();
    let (inputs, plain) = (inputs.path(), plain_model(inputs.path()));
    let alone = run_of(inputs, &plain, "alone");
    train(&alone, &Device::Cpu, &Start::New, u64::MAX).unwrap();
    let trained = read(&alone.output_dir.join("checkpoints/checkpoint-2"));
    assert!(trained["model.norm.weight"] != read(&plain)["model.norm.weight"]);
    for form in 0..FORMS.len() {
        let folder = wrapped(inputs, &plain, form);
        let run = run_of(inputs, &folder, &format!("run-{form}"));
        train(&run, &Device::Cpu, &Start::New, 1).unwrap_err();
        train(&run, &Device::Cpu, &Start::Resume, u64::MAX).unwrap();
        assert_eq!(metrics(&run.output_dir), metrics(&alone.output_dir));
        let saved = run.output_dir.join("checkpoints/checkpoint-2");
        expect_wrapped(&saved, &trained, form);

        let (source, exported) = (Source::open(&saved).unwrap(), inputs.join(format!("exported-{form}")));
        export(&source, None, &BTreeMap::new(), &exported).unwrap();
        expect_wrapped(&exported, &trained, form);
        let sizes = decoder_config(&ConfigFile::read(&exported).unwrap()).unwrap();
        FolderWeights::check(&exported, &sizes, &source.recipe).unwrap();
    }
}

#[test]
fn adapters_name_the_modules_of_the_larger_model() {
    let inputs = tempfile::tempdir().unwrap();
    let (inputs, plain) = (inputs.path(), plain_model(inputs.path()));
    let trained = |base: &Path, output: &str| {
        let run = adapter_run(inputs, base, &inputs.join(output), RecipeName::Fp32);
        train(&run, &Device::Cpu, &Start::New, u64::MAX).unwrap();
        run.output_dir.join("checkpoints/checkpoint-6")
    };
    let alone = trained(&plain, "alone");
    for form in 0..FORMS.len() {
        let folder = wrapped(inputs, &plain, form);
        let adapter = trained(&folder, &format!("adapter-{form}"));
        let files = ModelFiles::open_file(&adapter.join("adapter_model.safetensors")).unwrap();
        let prefix = "base_model.model.model.language_model.layers.";
        assert!(files.names().all(|name| name.starts_with(prefix)) && files.names().count() == 28);
        let saved = std::fs::read(adapter.join("adapter_config.json")).unwrap();
        let saved: Value = serde_json::from_slice(&saved).unwrap();
        let targets: Vec<_> =
            saved["target_modules"].as_array().unwrap().iter().map(|it| it.as_str().unwrap()).collect();
        assert!(targets.contains(&"model.language_model.layers.1.mlp.down_proj") && targets.len() == 14);

        let lose = |base: &Path, adapter: &Path| folder_losses(base, Some(adapter), RecipeName::Fp32);
        assert_eq!(lose(&folder, &adapter), lose(&plain, &alone));
        assert_eq!(lose(&plain, &adapter), lose(&plain, &alone), "an adapter of the text model alone");
        let merged = |base: &Path, adapter: &Path, name: &str| {
            let output = inputs.join(format!("{name}-{form}"));
            merge(base, &AdapterFolder::open(adapter).unwrap(), None, &output).unwrap();
            output
        };
        let sum = read(&merged(&plain, &alone, "sum"));
        expect_wrapped(&merged(&folder, &adapter, "merged"), &sum, form);
    }
}

#[test]
fn folders_that_cannot_be_written_again_are_refused() {
    let inputs = tempfile::tempdir().unwrap();
    let (inputs, plain) = (inputs.path(), plain_model(inputs.path()));
    let folder = wrapped(inputs, &plain, 1);
    let mut tensors = read(&folder);
    let trains = |keys: &Value, tensors: &Tensors| {
        write(&folder, inputs, keys, tensors);
        let run = run_of(inputs, &folder, "refused");
        let _ = std::fs::remove_dir_all(&run.output_dir);
        train(&run, &Device::Cpu, &Start::New, u64::MAX).unwrap_err().to_string()
    };
    tensors.insert("vision_tower.norm.weight".into(), ("F8_E4M3", vec![2, 2], vec![1; 4]));
    let error = trains(&wrapper_keys(), &tensors);
    assert!(error.contains("`vision_tower.norm.weight` is") && error.contains("dequantize"), "{error}");
    tensors.remove("vision_tower.norm.weight");
    tensors.insert("language_model.model.extra.weight".into(), ("F32", vec![1], vec![0; 4]));
    let error = trains(&wrapper_keys(), &tensors);
    assert!(error.contains("`model.extra.weight` that config.json has no place for"), "{error}");
    let error = trains(&wrapper_keys(), &tower("visual."));
    assert!(error.contains("no embedding of a text model"), "{error}");
    let mut unknown = wrapper_keys();
    unknown["text_config"]["model_type"] = json!("unknown_text");
    let error = trains(&unknown, &tensors);
    assert!(error.contains("text_config: the model type `unknown_text`"), "{error}");

    std::fs::remove_file(folder.join("model.safetensors")).unwrap();
    std::fs::write(folder.join("config.json"), wrapper_keys().to_string()).unwrap();
    let error = FolderTemplate::read(&folder, inputs, &[]).map(drop).unwrap_err().to_string();
    assert!(error.contains("parts beside its text model"), "{error}");
    assert_eq!(config(wrapper_keys()).layers.len(), 2, "sizes need no weights");
}

/// Returns the tensors with the last two dimensions of stacked experts exchanged.
fn exchanged(tensors: &Tensors) -> Tensors {
    let exchange = |(name, (dtype, shape, bytes)): (&String, &(&'static str, Vec<usize>, Vec<u8>))| {
        let ([experts, rows, columns], true) = (&shape[..], name.contains(".experts.")) else {
            return (name.clone(), (*dtype, shape.clone(), bytes.clone()));
        };
        let at = |e: usize, row: usize, column: usize| 2 * ((e * rows + row) * columns + column);
        let each = (0..*experts)
            .flat_map(|e| (0..*columns).flat_map(move |column| (0..*rows).map(move |row| (e, row, column))));
        let moved = each.flat_map(|(e, row, column)| bytes[at(e, row, column)..][..2].to_vec()).collect();
        (name.clone(), (*dtype, vec![*experts, *columns, *rows], moved))
    };
    tensors.iter().map(exchange).collect()
}

#[test]
fn stacked_experts_are_written_in_the_order_in_which_they_were_read() {
    let inputs = tempfile::tempdir().unwrap();
    let inputs = inputs.path();
    write_inputs(inputs);
    let mut keys = wrapper_keys();
    (keys["model_type"], keys["architectures"]) =
        (json!("qwen3_vl_moe"), json!(["Qwen3VLMoeForConditionalGeneration"]));
    let text = json!({
        "model_type": "qwen3_vl_moe_text", "num_experts": 3, "num_experts_per_tok": 2, "moe_intermediate_size": 24, "head_dim": 8,
        "tie_word_embeddings": true,
    });
    keys["text_config"].as_object_mut().unwrap().extend(text.as_object().unwrap().clone());
    // A model with random weights needs the names of a folder.
    let (folder, mut tensors) = (inputs.join("model"), tower("model.visual."));
    tensors.insert("model.language_model.embed_tokens.weight".into(), ("BF16", vec![1], vec![0; 2]));
    write(&folder, inputs, &keys, &tensors);
    let mut made = run_of(inputs, &folder, "made");
    made.model.init = WeightInit::Random;
    train(&made, &Device::Cpu, &Start::New, u64::MAX).unwrap();
    let made = read(&made.output_dir.join("checkpoints/checkpoint-2"));
    assert_eq!(made["model.language_model.layers.0.mlp.experts.gate_up_proj"].1, [3, 48, 32]);
    assert!(made.contains_key("lm_head.weight"), "the larger model does not tie the head");

    let trained = |name: &str, tensors: &Tensors| {
        write(&folder, inputs, &keys, tensors);
        let run = run_of(inputs, &folder, name);
        train(&run, &Device::Cpu, &Start::New, u64::MAX).unwrap();
        let source = Source::open(&run.output_dir.join("checkpoints/checkpoint-2")).unwrap();
        export(&source, None, &BTreeMap::new(), &inputs.join(format!("{name}-exported"))).unwrap();
        let exported = read(&inputs.join(format!("{name}-exported")));
        assert!(exported == read(&source.path));
        (metrics(&run.output_dir), exported)
    };
    let (metrics_of_memory, in_memory) = trained("memory", &made);
    let (metrics_of_hub, in_hub) = trained("hub", &exchanged(&made));
    assert_eq!(metrics_of_hub, metrics_of_memory);
    assert!(in_hub == exchanged(&in_memory) && in_hub != in_memory);
}
