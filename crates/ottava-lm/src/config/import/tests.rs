use super::*;

/// Imports `text` from a file of this name, beside `files`.
fn imported(name: &str, text: &str, files: &[(&str, &str)]) -> (Imported, RunConfig) {
    let folder = tempfile::tempdir().unwrap();
    for (name, text) in files.iter().chain([&(name, text)]) {
        let path = folder.path().join(name);
        std::fs::create_dir_all(path.parent().unwrap()).unwrap();
        std::fs::write(path, text).unwrap();
    }
    let imported = import(&folder.path().join(name)).unwrap();
    let config = toml::from_str(&imported.toml).unwrap_or_else(|error| panic!("{error}\n{}", imported.toml));
    (imported, config)
}

/// In the shape of Axolotl's examples/llama-3/lora-8b.yml.
const AXOLOTL: &str = "base_model: NousResearch/Meta-Llama-3-8B
model_type: AutoModelForCausalLM
load_in_8bit: true
datasets:
  - path: data/alpaca.jsonl
    type: alpaca
dataset_prepared_path: last_run_prepared
val_set_size: 0.05
output_dir: ./outputs/lora-out
sequence_len: 4096
sample_packing: true
adapter: lora
lora_model_dir:
lora_r: 32
lora_alpha: 16
lora_dropout: 0.05
lora_target_linear: true
lora_modules_to_save:
  - embed_tokens
wandb_project:
wandb_watch: x
gradient_accumulation_steps: 4
micro_batch_size: 2
num_epochs: 4
optimizer: adamw_bnb_8bit
lr_scheduler: cosine
learning_rate: 2e-4
bf16: auto
tf32: false
gradient_checkpointing: true
warmup_steps: 10
evals_per_epoch: 4
fp8: true
purple: 3
special_tokens:
  pad_token: <|end_of_text|>
";

#[test]
fn a_file_of_axolotl_is_translated_and_what_is_left_is_named() {
    let (imported, config) = imported("lora.yml", AXOLOTL, &[]);
    assert_eq!(config.model.path, Path::new("NousResearch/Meta-Llama-3-8B"));
    assert_eq!(config.data.train_files, [Path::new("data/alpaca.jsonl")]);
    assert_eq!((config.data.max_length, config.data.val_set_size), (4096, 0.05));
    assert_eq!((config.data.packing, config.data.formatting.as_str()), (crate::data::Packing::Bfd, "alpaca"));
    assert_eq!((config.lora.r, config.lora.lora_alpha), (32, 16.0));
    let t = &config.training;
    assert_eq!((t.per_device_train_batch_size, t.gradient_accumulation_steps, t.num_train_epochs), (2, 4, 4.0));
    assert_eq!((t.learning_rate, t.warmup_steps, t.warmup_ratio), (2e-4, 10, 0.0));
    assert_eq!((t.weight_decay, t.adam_beta2), (0.0, 0.999), "the defaults of Axolotl");
    assert_eq!(config.memory.recompute, Some(crate::recompute::Recompute::Full));
    assert!(imported.toml.contains("adam_beta2 = 0.999  # the default of Axolotl"), "{}", imported.toml);
    let refused = imported.refused.join("\n");
    for (line, words) in [
        (3, "`load_in_8bit`: base weights in 4 or 8 bit"),
        (16, "`lora_dropout`: `lora_dropout = 0.05` under [lora] is refused: "),
        (18, "`lora_modules_to_save`: single weights cannot be frozen"),
        (25, "`optimizer`: write `state_dtype = \"float8\"`"),
        (32, "`evals_per_epoch`: write `eval_steps`"),
        (34, "`purple`: this key is not known"),
    ] {
        assert!(refused.contains(&format!("lora.yml:{line}: {words}")), "{line} {words} in {refused}");
    }
    assert_eq!(config.precision.recipe, crate::recipe::RecipeName::Fp8Current, "`bf16` is the type of the rest");
    assert_eq!(imported.refused.len(), 8, "these, and the file that is not there: {refused}");
    let needless = imported.needless.join("\n");
    assert!(needless.contains(":21: `wandb_watch`") && needless.contains("`special_tokens.pad_token`"), "{needless}");
    assert!(!needless.contains("wandb_project"), "a key without a value has its default");
    assert_eq!(imported.problems, [""; 0]);
}

/// In the shape of LLaMA-Factory's examples/train_lora/llama3_lora_sft.yaml.
const LLAMA_FACTORY: &str = "### model
model_name_or_path: meta-llama/Meta-Llama-3-8B-Instruct
trust_remote_code: true
### method
stage: sft
do_train: true
finetuning_type: lora
lora_rank: 8
lora_target: q_proj,v_proj
### dataset
dataset: identity,alpaca_en_demo
eval_dataset: identity
template: llama3
cutoff_len: 2048
max_samples: 1000
overwrite_cache: true
preprocessing_num_workers: 16
### output
output_dir: saves/llama3-8b/lora/sft
logging_steps: 10
save_steps: 500
plot_loss: true
overwrite_output_dir: true
report_to: none
### train
per_device_train_batch_size: 1
gradient_accumulation_steps: 8
learning_rate: 1.0e-4
num_train_epochs: 3.0
lr_scheduler_type: cosine
warmup_ratio: 0.1
bf16: true
ddp_timeout: 180000000
";

#[test]
fn a_file_of_llama_factory_is_translated_with_its_data_sets() {
    let info = r#"{"identity": {"file_name": "identity.json"}, "alpaca_en_demo": {"hf_hub_url": "x/y"}}"#;
    let files = [("data/dataset_info.json", info), ("data/identity.json", "[]")];
    let (imported, config) = imported("sft.yaml", LLAMA_FACTORY, &files);
    assert_eq!(config.data.train_files.len(), 1);
    assert!(config.data.train_files[0].ends_with("data/identity.json"));
    assert_eq!(config.data.val_files, config.data.train_files);
    assert_eq!((config.lora.r, config.lora.lora_alpha), (8, 16.0), "alpha is twice the rank by default");
    assert_eq!(config.lora.target_modules, crate::lora::Targets::Names(vec!["q_proj".into(), "v_proj".into()]));
    let t = &config.training;
    assert_eq!((t.learning_rate, t.warmup_ratio, t.weight_decay), (1e-4, 0.1, 0.0));
    assert_eq!((config.parallel.collective_timeout, config.data.max_length), (2_592_000, 2048));
    let refused = imported.refused.join("\n");
    for words in ["`trust_remote_code`", "`template`", "`max_samples`", "`alpaca_en_demo` has no `file_name`"] {
        assert!(refused.contains(words), "{words} in {refused}");
    }
    assert_eq!(imported.refused.len(), 4, "{refused}");
    assert_eq!(imported.needless.len(), 6, "{:?}", imported.needless);
}

#[test]
fn stages_of_llama_factory_are_objectives() {
    let of = |keys: &str| {
        imported("run.yaml", &format!("model_name_or_path: m\nfinetuning_type: lora\nmax_steps: 9\n{keys}"), &[]).1
    };
    let loss = |keys: &str| of(keys).preference.loss_type.map(|loss| loss.as_str());
    assert_eq!(["kto", "rm"].map(|stage| loss(&format!("stage: {stage}\n"))), ["kto", "bradley_terry"].map(Some));
    assert_eq!(loss("stage: dpo\npref_loss: ipo\n"), Some("ipo"));
    let packing = |keys: &str| of(keys).data.packing;
    assert_eq!(packing("stage: pt\n"), crate::data::Packing::Wrapped, "packed by default");
    assert_eq!(packing("stage: pt\npacking: false\n"), crate::data::Packing::None);
    assert_eq!(packing("stage: sft\n"), crate::data::Packing::None);
}

#[test]
fn an_objective_that_is_not_implemented_is_an_error() {
    let folder = tempfile::tempdir().unwrap();
    let path = folder.path().join("run.yaml");
    for (keys, words) in [
        ("base_model: m\ndatasets: []\nrl: grpo\n", "run.yaml:3: `rl`: of preferences, runs train DPO"),
        ("base_model: m\ndatasets: []\nrl: orpo\n", "`rl`: "),
        ("base_model: m\ndatasets: []\nrl: something\n", "`rl`: "),
        ("model_name_or_path: m\nstage: ppo\n", "`stage`: "),
        ("model_name_or_path: m\nstage: dpo\npref_loss: simpo\n", "`pref_loss`: "),
        ("model_name_or_path: m\ndataset_name: d.jsonl\nloss_type: [sigmoid, sft]\n", "`loss_type`: "),
        ("model_name_or_path: m\ndataset_name: d.jsonl\nloss_type: discopop\n", "`loss_type`: "),
    ] {
        std::fs::write(&path, keys).unwrap();
        let error = import(&path).unwrap_err().to_string();
        assert!(error.contains(words) && error.contains("another objective, so none is written"), "{keys}: {error}");
    }
}

/// TRL 1.16 smooths the labels of `robust`, and not of `sigmoid`.
#[test]
fn smoothing_of_trl_is_that_of_its_loss() {
    let of = |loss: &str| {
        let text = format!("model_name_or_path: m\ndataset_name: d.jsonl\nmax_steps: 9\nlabel_smoothing: 0.1\n{loss}");
        imported("dpo.yaml", &text, &[])
    };
    for loss in ["", "loss_type: sigmoid\n", "loss_type: [sigmoid]\n"] {
        let (imported, config) = of(loss);
        assert_eq!(config.preference.label_smoothing, 0.0, "{loss}");
        assert!(
            imported.needless.iter().any(|note| note.contains("`label_smoothing`: TRL reads it")),
            "{:?}",
            imported.needless
        );
    }
    assert_eq!(of("loss_type: robust\n").1.preference.label_smoothing, 0.1);
}

#[test]
fn names_and_keys_cannot_write_settings() {
    let keys = "model_name_or_path: m\n\"a\\nseed = 5\": 1\n\"\\e[31m\": 2\n\"b\\rseed = 6\": {\"c\\u0085d\": 3}\noutput_dir: \"x\\ny = 1\"\n";
    let (imported, config) = imported("a\nseed = 7\n.yaml", keys, &[]);
    assert_eq!((config.seed, config.output_dir.as_path()), (RunConfig::default().seed, Path::new("x\ny = 1")));
    let is_comment = |line: &str| line.starts_with('#') || !line.contains("seed");
    assert!(imported.toml.lines().all(is_comment), "{}", imported.toml);
    assert!(!imported.toml.contains(|c: char| c.is_control() && c != '\n'), "{:?}", imported.toml);
    assert!(imported.toml.contains(r"`a\nseed = 5`: this key is not known"), "{}", imported.toml);
}

#[test]
fn files_of_deepspeed_and_trl_are_translated() {
    let ds = r#"{"train_micro_batch_size_per_gpu": 2, "gradient_clipping": 0.5, "bf16": {"enabled": true},
        "zero_optimization": {"stage": 3, "offload_optimizer": {"device": "cpu", "pin_memory": true}, "reduce_bucket_size": 500},
        "optimizer": {"type": "AdamW", "params": {"lr": 3e-5, "betas": [0.9, 0.95], "eps": 1e-8}}}"#;
    let (imported, config) = imported("ds.json", ds, &[]);
    assert_eq!(config.parallel.zero, crate::parallel::Zero::Weights);
    assert_eq!((config.memory.offload_optimizer, config.training.learning_rate), (Some(1.0), 3e-5));
    assert_eq!((config.training.per_device_train_batch_size, config.training.max_grad_norm), (2, 0.5));
    assert_eq!((imported.refused.len(), imported.needless.len()), (1, 2), "betas; {:?}", imported.refused);
    let trl = "model_name_or_path: m\ndataset_name: d.jsonl\nlearning_rate: 1e-5\nuse_peft: true\neval_steps: 0.5\nwarmup_steps: 0.1\n";
    let (imported, config) = super::tests::imported("sft.yaml", trl, &[]);
    assert_eq!((config.lora.r, config.training.warmup_ratio, config.training.num_train_epochs), (16, 0.1, 3.0));
    assert!(
        imported.refused.iter().any(|note| note.contains("`eval_steps = 0.5` under [training] is refused")),
        "{imported:?}"
    );
}

/// The tables of [[data.datasets]]: name, last part of the file, weight and repeat.
fn sets(config: &RunConfig) -> Vec<(&str, String, Option<f64>, Option<f64>)> {
    let file = |path: &Path| path.file_name().unwrap().to_string_lossy().into_owned();
    let of = |set: &crate::config::DatasetConfig| file(&set.train_files[0]);
    config.data.datasets.iter().map(|set| (set.name.as_str(), of(set), set.weight, set.repeat)).collect()
}

#[test]
fn shares_of_llama_factory_are_weights() {
    let info = r#"{"web": {"file_name": "web.jsonl"}, "chats": {"file_name": "c.json"}}"#;
    let files = [("data/dataset_info.json", info), ("data/web.jsonl", "{}"), ("data/c.json", "[]")];
    let of = |keys: &str| {
        let text = format!("model_name_or_path: m\nstage: sft\ndataset: web,chats\nmax_steps: 9\n{keys}");
        imported("sft.yaml", &text, &files)
    };
    for (keys, weights) in [
        ("mix_strategy: interleave_over\ninterleave_probs: 0.7,0.3\n", [0.7, 0.3]),
        ("mix_strategy: interleave_under\ninterleave_probs: [0.25, 0.75]\n", [0.25, 0.75]),
        ("mix_strategy: interleave_under\n", [1.0, 1.0]),
    ] {
        let (imported, config) = of(keys);
        let expected = [("web", "web.jsonl", weights[0]), ("chats", "c.json", weights[1])];
        let expected = expected.map(|(name, file, weight)| (name, file.to_string(), Some(weight), None));
        assert_eq!(sets(&config), expected, "{}", imported.toml);
        assert!(config.data.train_files.is_empty());
        assert!(imported.toml.contains("# of the tokens; in LLaMA-Factory, of the records\n"), "{}", imported.toml);
        assert_eq!(imported.problems, [""; 0]);
        let refused = imported.refused.join("\n");
        assert!(refused.contains("`mix_strategy`: an epoch there ends ") && imported.refused.len() == 1, "{refused}");
    }
    // These read every record once.
    for keys in ["mix_strategy: concat\n", "mix_strategy: interleave_once\ninterleave_probs: 0.7,0.3\n", ""] {
        let (imported, config) = of(keys);
        assert_eq!((config.data.train_files.len(), config.data.datasets.len()), (2, 0), "{keys}");
        assert_eq!(imported.refused, [""; 0], "{keys}");
    }
    for (keys, words) in [
        ("mix_strategy: interleave_over\ninterleave_probs: 0.7\n", "`interleave_probs`: 2 numbers are needed"),
        ("mix_strategy: interleave_over\ninterleave_probs: a,b\n", "`interleave_probs`: 2 numbers are needed"),
        ("mix_strategy: random\n", "`mix_strategy`: this strategy is not known"),
    ] {
        let (imported, config) = of(keys);
        assert_eq!((config.data.train_files.len(), config.data.datasets.len()), (2, 0), "{keys}");
        assert!(imported.refused.iter().any(|note| note.contains(words)), "{words} in {:?}", imported.refused);
    }
}

#[test]
fn weights_of_axolotl_are_repeats() {
    let entry = |path: &str, more: &str| format!("  - path: {path}\n    type: chat_template\n{more}");
    let of = |sets: String| imported("sft.yml", &format!("base_model: m\nmax_steps: 9\ndatasets:\n{sets}"), &[]);
    let (imported, config) =
        of(entry("a/data.jsonl", "") + &entry("b/data.jsonl", "    weight: 0.02\n") + &entry("c d.jsonl", ""));
    let expected = [("data", "data.jsonl", 1.0), ("data-2", "data.jsonl", 0.02), ("c-d", "c d.jsonl", 1.0)];
    let expected = expected.map(|(name, file, repeat)| (name, file.to_string(), None, Some(repeat)));
    assert_eq!(sets(&config), expected, "{}", imported.toml);
    assert!(imported.toml.contains("repeat = 0.02  # weight of Axolotl, which reads the same records in every epoch"));
    assert_eq!(imported.problems, [""; 0]);
    assert!(imported.refused.iter().all(|note| note.contains("there is no file ")), "{:?}", imported.refused);
    let (imported, config) = of(entry("a.jsonl", "    weight: 1.0\n") + &entry("b.jsonl", ""));
    assert_eq!((config.data.train_files.len(), config.data.datasets.len()), (2, 0), "{}", imported.toml);
}
