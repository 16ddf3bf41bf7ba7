//! Experts in the layouts of published folders: a tensor for each matrix, or stacks of all experts of a layer in two orders. A model trains the same from
//! each layout, and is written as it was read.

use crate::folders::layouts::in_memory;
use crate::runs::resume::{self, metrics, train, write_inputs};
use ottava_checkpoint::{FolderWeights, ModelFiles, write_file};
use ottava_convert::export::Source;
use ottava_models::{ConfigFile, decoder_config};
use ottava_recipe::RecipeName;
use ottava_recipe::param::StackOrder;
use ottava_settings::{RunConfig, WeightInit};
use ottava_tensor::{Device, Tensor};
use ottava_train::trainer::Start;
use serde_json::{Value, json};
use std::collections::{BTreeMap, BTreeSet};
use std::path::Path;

/// The shapes and values of the tensors of a folder, by name.
pub type Tensors = BTreeMap<String, (Vec<usize>, Vec<f32>)>;

/// The number of experts, the width of the residual stream and the width of an expert. Gate and up together are a square matrix.
const EXPERTS: usize = 3;
const CHANNELS: usize = 32;
const HIDDEN: usize = 16;

/// The layout of experts in a folder.
#[derive(Clone, Copy, Debug, PartialEq)]
enum Form {
    Each,
    OutputsFirst,
    InputsFirst,
}

const FORMS: [Form; 3] = [Form::Each, Form::OutputsFirst, Form::InputsFirst];

pub fn read(folder: &Path) -> Tensors {
    let files = ModelFiles::open(folder).unwrap();
    let of = |name: &str| (files.info(name).unwrap().shape, files.values(name).unwrap().to_vec::<f32>().unwrap());
    files.names().map(|name| (name.to_string(), of(name))).collect()
}

fn transposed(values: &[f32], [rows, columns]: [usize; 2]) -> Vec<f32> {
    (0..columns).flat_map(|column| (0..rows).map(move |row| values[row * columns + column])).collect()
}

/// Returns `tensors` of any layout with a tensor for each matrix, if the stacks of `tensors` have outputs first.
fn each(tensors: &Tensors) -> Tensors {
    let mut all = Tensors::new();
    for (name, (shape, values)) in tensors {
        let Some((mixture, stack)) = name.split_once(".experts.").filter(|_| shape.len() == 3) else {
            all.insert(name.clone(), (shape.clone(), values.clone()));
            continue;
        };
        let linears: &[&str] = if stack == "down_proj" { &["down_proj"] } else { &["gate_proj", "up_proj"] };
        let shape = vec![shape[1] / linears.len(), shape[2]];
        for (at, matrix) in values.chunks_exact(shape[0] * shape[1]).enumerate() {
            let (expert, linear) = (at / linears.len(), linears[at % linears.len()]);
            all.insert(format!("{mixture}.experts.{expert}.{linear}.weight"), (shape.clone(), matrix.to_vec()));
        }
    }
    all
}

/// Returns `tensors`, which have a tensor for each matrix, in another layout.
fn in_form(tensors: &Tensors, form: Form) -> Tensors {
    let is_expert = |name: &str| name.contains(".experts.");
    let mixtures: BTreeSet<_> = tensors.keys().filter_map(|name| Some(name.split_once(".experts.")?.0)).collect();
    let mut all = tensors.clone();
    for mixture in mixtures.into_iter().filter(|_| form != Form::Each) {
        all.retain(|name, _| !name.starts_with(&format!("{mixture}.experts.")));
        for (stack, linears, [outputs, inputs]) in [
            ("gate_up_proj", &["gate_proj", "up_proj"][..], [2 * HIDDEN, CHANNELS]),
            ("down_proj", &["down_proj"], [CHANNELS, HIDDEN]),
        ] {
            let mut values = Vec::new();
            for expert in 0..EXPERTS {
                let of = |linear: &&str| tensors[&format!("{mixture}.experts.{expert}.{linear}.weight")].1.clone();
                let rows: Vec<f32> = linears.iter().flat_map(of).collect();
                values.extend(if form == Form::InputsFirst { transposed(&rows, [outputs, inputs]) } else { rows });
            }
            let [first, second] = if form == Form::InputsFirst { [inputs, outputs] } else { [outputs, inputs] };
            all.insert(format!("{mixture}.experts.{stack}"), (vec![EXPERTS, first, second], values));
        }
    }
    assert!(all.keys().any(|name| is_expert(name)));
    all
}

pub fn write(folder: &Path, inputs: &Path, keys: &Value, tensors: &Tensors) {
    std::fs::create_dir_all(folder).unwrap();
    std::fs::copy(inputs.join("tokenizer.json"), folder.join("tokenizer.json")).unwrap();
    std::fs::write(folder.join("config.json"), keys.to_string()).unwrap();
    let tensor = |(name, (shape, values)): (&String, &(Vec<usize>, Vec<f32>))| {
        (name.clone(), Tensor::from_slice(&Device::Cpu, shape, values).unwrap())
    };
    write_file(&folder.join("model.safetensors"), &tensors.iter().map(tensor).collect::<Vec<_>>()).unwrap();
}

pub fn run_of(inputs: &Path, model: &Path, output: &str) -> RunConfig {
    let mut run = resume::config(inputs, &inputs.join(output), RecipeName::Fp32);
    (run.model.path, run.training.max_steps) = (model.to_path_buf(), Some(2));
    run
}

fn keys(own: Value) -> Value {
    let mut keys = json!({
        "hidden_size": CHANNELS, "intermediate_size": 48, "num_hidden_layers": 2, "num_attention_heads": 4, "num_key_value_heads": 2,
        "head_dim": 8, "vocab_size": 100, "max_position_embeddings": 64, "num_experts": EXPERTS, "num_experts_per_tok": 2,
        "moe_intermediate_size": HIDDEN,
    });
    keys.as_object_mut().unwrap().extend(own.as_object().unwrap().clone());
    keys
}

#[test]
fn experts_train_from_every_layout_and_are_written_in_the_same_layout() {
    let delta = json!({
        "model_type": "qwen3_5_moe_text", "shared_expert_intermediate_size": 24, "full_attention_interval": 2, "linear_key_head_dim": 4,
        "linear_num_key_heads": 2, "linear_num_value_heads": 2, "linear_value_head_dim": 4,
    });
    for (own, new) in [(json!({"model_type": "qwen3_vl_moe_text"}), Form::OutputsFirst), (delta, Form::Each)] {
        let (folder, keys) = (tempfile::tempdir().unwrap(), keys(own));
        let inputs = folder.path();
        write_inputs(inputs);
        std::fs::write(inputs.join("config.json"), keys.to_string()).unwrap();
        let made = run_of(inputs, inputs, "made");
        train(&made, &Device::Cpu, &Start::New, u64::MAX).unwrap();
        let new_folder = read(&made.output_dir.join("checkpoints/checkpoint-2"));
        let start = each(&new_folder);
        assert!(new_folder == in_form(&start, new), "the layout of new folders of {keys}");
        let (mut first, mut in_each) = (None, None);
        for form in FORMS {
            let model = inputs.join(format!("{form:?}"));
            write(&model, inputs, &keys, &in_form(&start, form));
            // Inference reads the same weights without the layout of the folder.
            let sizes = decoder_config(&ConfigFile::read(&model).unwrap()).unwrap();
            let memory = in_memory(&sizes, &mut FolderWeights::open(&model).unwrap());
            assert!(*in_each.get_or_insert_with(|| memory.clone()) == memory, "{form:?}");
            let mut run = run_of(inputs, &model, &format!("run-{form:?}"));
            run.model.init = WeightInit::Pretrained;
            train(&run, &Device::Cpu, &Start::New, 1).unwrap_err();
            train(&run, &Device::Cpu, &Start::Resume, u64::MAX).unwrap();
            let saved = run.output_dir.join("checkpoints/checkpoint-2");
            let (of_first, all) = first.get_or_insert_with(|| (metrics(&run.output_dir), read(&saved)));
            assert_eq!(*of_first, metrics(&run.output_dir), "{form:?}");
            assert!(read(&saved) == in_form(all, form) && *all != start, "{form:?}: written as read");
            let sizes = decoder_config(&ConfigFile::read(&saved).unwrap()).unwrap();
            let source = Source::open(&saved).unwrap();
            FolderWeights::check(&saved, &sizes, &source.recipe).unwrap();
            let order = source.sizes.experts().unwrap().stacks.map(|stacks| stacks.order);
            let [outputs_first, inputs_first] = [Some(StackOrder::OutputsFirst), Some(StackOrder::InputsFirst)];
            assert_eq!(order, [None, outputs_first, inputs_first][form as usize]);
        }
    }
}
