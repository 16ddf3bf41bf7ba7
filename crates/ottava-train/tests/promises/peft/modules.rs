//! Modules that are trained whole beside adapters: compared with PEFT and with training of all weights, saved, resumed, merged, and on ranks.

use crate::models::families::all_families;
use crate::parallel::divided::{F32, Setup, adapters, apart, llama};
use crate::peft::lora::{adapter_run, base, batch, folder_losses, peft, recorded};
use crate::runs::resume::{metrics, train, write_inputs};
use crate::setup::{Seeded, gradients, largest_error, losses_and_gradients, recipe};
use ottava_checkpoint::{AdapterFolder, merge};
use ottava_common::Result;
use ottava_models::{ConfigFile, Decoder, DecoderConfig, decoder_config};
use ottava_parallel::Zero;
use ottava_recipe::lora::{Lora, PEFT_PREFIX, is_of_adapter, module_of};
use ottava_recipe::param::{FolderTensor, Init, MemoryPolicy, Param, Purpose, WeightSource};
use ottava_recipe::{Fp8Format, RecipeName};
use ottava_settings::{LoraConfig, RunConfig};
use ottava_tensor::testing::{integers, values};
use ottava_tensor::{Device, Tensor};
use ottava_train::trainer::Start;
use safetensors::SafeTensors;
use serde_json::{Value, json};
use std::collections::{BTreeMap, BTreeSet};
use std::ops::Range;
use std::path::{Path, PathBuf};

fn names(names: &[&str]) -> Vec<String> {
    names.iter().map(|name| name.to_string()).collect()
}

/// Returns the modules that a case of `scripts/make_lora_referee.py` trains whole.
pub fn saved_in(case: &str) -> Vec<String> {
    match case {
        "modules" => names(&["embed_tokens", "norm"]),
        "head" => names(&["embed_tokens", "lm_head"]),
        _ => Vec::new(),
    }
}

/// Returns the values of each tensor of `param`, by its name in PEFT.
fn by_tensor(param: &Param, values: &[f64]) -> Vec<(String, Vec<f64>)> {
    let mut rest = values;
    let divide = |shard: &ottava_recipe::param::Shard| {
        let (own, after) = rest.split_at(shard.elements());
        rest = after;
        (shard.tensor.name.clone(), own.to_vec())
    };
    param.identity.shards.iter().map(divide).collect()
}

/// The head and the embedding of the recorded model are tied. In PEFT, a module that is trained whole has a weight of its own, and the other module
/// keeps the weight of the base.
#[test]
fn modules_train_as_in_peft() {
    for (case, trained) in [("modules", 1 + 2 * 2 + 1), ("head", 2)] {
        let mut training = peft(case, RecipeName::Fp32, &Device::Cpu, 8.0);
        let ([inputs, targets], rows) = batch(case, 0);
        losses_and_gradients(&mut training.decoder, &inputs, &targets, rows, 1.0 / targets.len() as f64).unwrap();
        let seen = gradients(&mut training.decoder);
        for (param, (_, gradient)) in training.decoder.parameters().into_iter().zip(seen) {
            for (name, own) in by_tensor(param, &gradient) {
                let error = largest_error(&own, &recorded(case).values(&format!("gradients/{name}")));
                // Sums in F32 have another order than in PEFT.
                assert!(error < 1e-5, "{case}: the gradient of {name} is {error:e} apart");
            }
            param.gradient.clear();
        }
        for (step, expected) in recorded(case).values("losses").into_iter().enumerate() {
            let (batch, rows) = batch(case, step);
            let loss = training.step(&batch, rows);
            assert!((loss - expected).abs() < 1e-5, "{case}, step {step}: {loss}, in PEFT {expected}");
        }
        let mut compared = 0;
        for param in training.decoder.parameters() {
            let all = values(&param.weights.value().unwrap());
            for (name, own) in by_tensor(param, &all).into_iter().filter(|(name, _)| !is_of_adapter(name)) {
                let [start, end] = ["weights", "trained"].map(|kind| recorded(case).values(&format!("{kind}/{name}")));
                let (error, change) = (largest_error(&own, &end), largest_error(&start, &end));
                // Adam divides by the size of gradients, so roundings of small gradients are visible in the weights.
                assert!(error < 1e-3 && change > 10.0 * error, "{case}: {name} is {error:e} apart, of {change:e}");
                compared += 1;
            }
        }
        assert_eq!(compared, trained, "{case}");
    }
}

/// The weights of a model without adapters, under the names of PEFT, and adapters that are zero.
struct ZeroAdapters {
    divided_head: Option<[String; 2]>,
}

impl WeightSource for ZeroAdapters {
    fn read(&mut self, tensor: &FolderTensor, elements: Range<usize>, init: Init) -> Result<Tensor> {
        if tensor.name.ends_with(".lora_B.weight") {
            return Ok(Tensor::zeros(&Device::Cpu, &[elements.len()], ottava_tensor::DType::F32)?);
        }
        let name = tensor.name.strip_prefix(PEFT_PREFIX).unwrap_or(&tensor.name).to_string();
        let name = match &self.divided_head {
            Some([head, table]) if name == *head => table.clone(),
            _ => name,
        };
        Seeded { std: 0.1 }.read(&FolderTensor { name, ..tensor.clone() }, elements, init)
    }
}

/// Adapters that are zero change nothing, so each module that can be trained whole has the gradient that it has when all weights are trained. The
/// gradient of a tied weight is the sum of the gradients of embedding and head.
#[test]
fn modules_of_each_family_have_the_gradients_of_full_training() {
    let recipe = recipe(RecipeName::Fp32, Fp8Format::Auto);
    let gradients_of = |sizes: &DecoderConfig| -> BTreeMap<String, Vec<f64>> {
        let mut weights = ZeroAdapters { divided_head: sizes.divided_head() };
        let purpose = Purpose::Train(MemoryPolicy::FULL);
        let mut model = Decoder::new(sizes, &recipe, &Device::Cpu, purpose, 16, &mut weights).unwrap();
        let [inputs, targets] = ["inputs", "targets"].map(|name| integers(name, 32, 96));
        losses_and_gradients(&mut model, &inputs, &targets, 2, 1.0 / 32.0).unwrap();
        gradients(&mut model).into_iter().collect()
    };
    for (family, sizes) in all_families() {
        let lora = Lora { r: 2, ..Lora::default() };
        let described =
            Decoder::describe(&DecoderConfig { lora: Some(lora.clone()), ..sizes.clone() }, &recipe).unwrap();
        let modules_to_save: Vec<String> = described.modules.trainable().into_iter().cloned().collect();
        let lora = Lora { modules_to_save: modules_to_save.clone(), ..lora };
        let adapted = DecoderConfig { lora: Some(lora), ..sizes.clone() };
        let (mut full, mut seen) = (gradients_of(&sizes), gradients_of(&adapted));
        seen.retain(|name, _| !is_of_adapter(name));
        let trained: BTreeSet<&str> = seen.keys().map(|name| module_of(&name[PEFT_PREFIX.len()..])).collect();
        assert_eq!(trained, modules_to_save.iter().map(String::as_str).collect(), "{family}");
        if let Some([head, table]) = adapted.divided_head() {
            let of_head = seen.remove(&format!("{PEFT_PREFIX}{head}")).expect("the head is trained");
            let of_table = seen.get_mut(&format!("{PEFT_PREFIX}{table}")).expect("the embedding is trained");
            of_table.iter_mut().zip(of_head).for_each(|(sum, own)| *sum += own);
        }
        for (name, gradient) in seen {
            let expected =
                full.remove(name.strip_prefix(PEFT_PREFIX).expect("a name of PEFT")).expect("the same module");
            let error = largest_error(&gradient, &expected);
            // The two gradients of a tied weight are added in another order.
            assert!(error < 1e-5, "{family}: {name} is {error:e} apart");
        }
    }
}

/// Ranks that divide rows, layers or tensors train modules as one rank does, at ZeRO stages 0 and 3. The second model has a tied head.
#[test]
fn modules_train_alike_on_ranks() {
    let qwen = llama(json!({"architectures": ["Qwen2ForCausalLM"], "tie_word_embeddings": true}));
    for (model, saved) in
        [(llama(json!({})), &["embed_tokens", "lm_head", "norm"][..]), (qwen, &["embed_tokens", "norm"])]
    {
        for (zero, mesh) in [
            (Zero::Nothing, [2, 1, 1, 1]),
            (Zero::Weights, [2, 1, 1, 1]),
            (Zero::Nothing, [1, 2, 1, 1]),
            (Zero::Nothing, [1, 1, 1, 2]),
        ] {
            let mut alone = Setup::new(model.clone(), RecipeName::Fp32);
            let lora = adapters(false).map(|lora| Lora { modules_to_save: names(saved), ..lora });
            (alone.mesh.zero, alone.mesh.sizes.lora) = (zero, lora);
            let (apart, name) = apart(&alone, mesh);
            assert!(apart < F32, "{saved:?} on {mesh:?}, {zero:?}: {name} is {apart:.1e} apart");
        }
    }
}

fn run_of(inputs: &Path, base: &Path, output: &str, name: RecipeName, saved: &[&str]) -> RunConfig {
    let mut run = adapter_run(inputs, base, &inputs.join(output), name);
    run.lora.modules_to_save = names(saved);
    run
}

fn last(run: &RunConfig) -> PathBuf {
    run.output_dir.join("checkpoints/checkpoint-6")
}

/// Returns the names and the bytes of the tensors of a file.
fn tensors(file: &Path) -> BTreeMap<String, Vec<u8>> {
    let bytes = std::fs::read(file).unwrap();
    let tensors = SafeTensors::deserialize(&bytes).unwrap();
    tensors.tensors().into_iter().map(|(name, view)| (name, view.data().to_vec())).collect()
}

/// In a tied model too, where the folder of a merged model has a head of its own.
#[test]
fn runs_with_modules_resume_exactly_and_are_merged() {
    for is_tied in [false, true] {
        let inputs = tempfile::tempdir().unwrap();
        write_inputs(inputs.path());
        if is_tied {
            let path = inputs.path().join("config.json");
            let text = std::fs::read_to_string(&path).unwrap();
            std::fs::write(&path, text.replace("\"unknown_key\"", "\"tie_word_embeddings\":true,\"unknown_key\""))
                .unwrap();
        }
        let base = base(inputs.path());
        let saved = if is_tied { &["embed_tokens"][..] } else { &["embed_tokens", "lm_head", "norm"] };
        for (name, in_four_bits) in
            [(RecipeName::Fp32, false), (RecipeName::Fp8Delayed, false), (RecipeName::Bf16, true)]
        {
            let run = |output: &str| {
                let mut run = run_of(inputs.path(), &base, &format!("{}-{output}", name.as_str()), name, saved);
                run.lora.load_in_4bit = in_four_bits;
                run
            };
            let (straight, split) = (run("straight"), run("split"));
            train(&straight, &Device::Cpu, &Start::New, u64::MAX).unwrap();
            train(&split, &Device::Cpu, &Start::New, 3).unwrap_err();
            train(&split, &Device::Cpu, &Start::Resume, u64::MAX).unwrap();
            assert_eq!(metrics(&straight.output_dir), metrics(&split.output_dir), "{}", name.as_str());
            for file in ["adapter_model.safetensors", "training/optimizer.safetensors"] {
                let bytes = |run: &RunConfig| std::fs::read(last(run).join(file)).unwrap();
                assert!(bytes(&straight) == bytes(&split), "{}: {file} differs", name.as_str());
            }
        }
        let run = run_of(inputs.path(), &base, "fp32-straight", RecipeName::Fp32, saved);
        let (folder, merged) = (last(&run), inputs.path().join("merged"));
        let config: Value =
            serde_json::from_slice(&std::fs::read(folder.join("adapter_config.json")).unwrap()).unwrap();
        assert_eq!(config["modules_to_save"], json!(saved));
        let (own, of_base) =
            (tensors(&folder.join("adapter_model.safetensors")), tensors(&base.join("model.safetensors")));
        let whole: Vec<&String> = own.keys().filter(|name| !is_of_adapter(name)).collect();
        let modules = if is_tied { 1 } else { 1 + 2 * 2 + 1 + 1 };
        assert_eq!((whole.len(), own.len()), (modules, modules + 28), "{whole:?}");
        assert!(whole.iter().all(|name| own[*name] != of_base[&name[PEFT_PREFIX.len()..]]), "all of them are trained");

        let adapter = AdapterFolder::open(&folder).unwrap();
        assert_eq!(adapter.lora.modules_to_save, saved);
        assert_eq!(merge(&base, &adapter, None, &merged).unwrap(), 14 + modules);
        let sizes = decoder_config(&ConfigFile::read(&merged).unwrap()).unwrap();
        assert!(!sizes.head.tied && tensors(&merged.join("model.safetensors")).contains_key("lm_head.weight"));
        let [plain, with, sum] = [(&base, None), (&base, Some(&*folder)), (&merged, None)]
            .map(|(model, adapter)| folder_losses(model, adapter, RecipeName::Fp32));
        // The merged weights are the weights of the run, except for roundings of the sums with adapters.
        assert!((with / sum - 1.0).abs() < 1e-6, "base and adapter lose {with}, the merged model {sum}");
        assert!((with / plain - 1.0).abs() > 1e-3, "the adapter changes the loss of {plain} to {with}");

        // A run that starts from the adapter has its modules, and evaluates as it did.
        let mut further = adapter_run(inputs.path(), &base, &inputs.path().join("further"), RecipeName::Fp32);
        further.lora = LoraConfig { init_from: folder.clone(), ..LoraConfig::default() };
        let further = further.with_adapter().unwrap();
        assert_eq!(further.lora.modules_to_save, saved);
        train(&further, &Device::Cpu, &Start::New, u64::MAX).unwrap();
        let loss = |run: &RunConfig, at: usize| metrics(&run.output_dir)[at]["eval_loss"].as_f64().unwrap();
        assert_eq!(loss(&further, 0), loss(&run, metrics(&run.output_dir).len() - 1));

        // Models that share their embedding with other adapters cannot have the modules.
        let beside = DecoderConfig {
            lora: Some(Lora::of_no_linear()),
            ..decoder_config(&ConfigFile::read(&base).unwrap()).unwrap()
        };
        let recipe = recipe(RecipeName::Fp32, Fp8Format::Auto);
        let model = Decoder::new(&beside, &recipe, &Device::Cpu, Purpose::Infer, 16, &mut Seeded { std: 0.1 }).unwrap();
        let error = adapter.load(&model).err().expect("it is refused").to_string();
        assert!(error.contains("`modules_to_save`: embed_tokens") && error.contains("--adapter"), "{error}");
    }
}

#[test]
fn modules_that_a_model_or_a_folder_lacks_are_errors() {
    let inputs = tempfile::tempdir().unwrap();
    write_inputs(inputs.path());
    let base = base(inputs.path());
    for (saved, words) in [
        (
            "wte",
            "`wte` is no module of this model; modules that can be trained whole are `embed_tokens`, `input_layernorm`, `lm_head`, `norm`",
        ),
        ("down_proj", "`down_proj` matches `model.layers.0.mlp.down_proj`"),
    ] {
        let run = run_of(inputs.path(), &base, "refused", RecipeName::Fp32, &[saved]);
        let error = train(&run, &Device::Cpu, &Start::New, u64::MAX).unwrap_err().to_string();
        assert!(error.contains("`modules_to_save`: ") && error.contains(words), "{error}");
    }
    let run = run_of(inputs.path(), &base, "run", RecipeName::Fp32, &["lm_head"]);
    train(&run, &Device::Cpu, &Start::New, u64::MAX).unwrap();
    let path = last(&run).join("adapter_config.json");
    let text = std::fs::read_to_string(&path).unwrap();
    let change = |from: &str, to: &str| {
        assert!(text.contains(from), "{text}");
        std::fs::write(&path, text.replace(from, to)).unwrap();
        AdapterFolder::open(&last(&run))
    };
    // As in PEFT, a name without tensors is ignored beside another.
    let both = change("\"lm_head\"", "\"lm_head\", \"pooler\"").unwrap();
    assert_eq!(both.lora.modules_to_save, ["lm_head"]);
    let error = change("\"lm_head\"", "\"embed_tokens\"").err().expect("the tensor is missing").to_string();
    assert!(
        error.contains("`modules_to_save` names `embed_tokens`, and adapter_model.safetensors has no tensor of it"),
        "{error}"
    );
    let silent = change("\"modules_to_save\": [\n    \"lm_head\"\n  ]", "\"modules_to_save\": null").unwrap();
    let error = merge(&base, &silent, None, &inputs.path().join("merged")).unwrap_err().to_string();
    assert!(
        error.contains("`base_model.model.lm_head.weight`") && error.contains("nor `modules_to_save` names"),
        "{error}"
    );
}
