use super::*;
use crate::{Adamw, Algorithm, TrackerKind, Warmup};

/// Imports `text` from a file of this name, beside `files`.
pub(super) fn imported(name: &str, text: &str, files: &[(&str, &str)]) -> (Imported, RunConfig) {
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
    assert_eq!((config.data.packing, config.data.records.formatting.as_str()), (ottava_data::Packing::Bfd, "alpaca"));
    assert_eq!((config.lora.r, config.lora.lora_alpha, config.lora.lora_dropout), (32, 16.0, 0.05));
    assert_eq!(config.lora.modules_to_save, ["embed_tokens"]);
    let t = &config.training;
    assert_eq!((t.per_device_train_batch_size, t.gradient_accumulation_steps, t.num_train_epochs), (2, 4, 4.0));
    assert_eq!((config.optimizer.learning_rate, config.lr_scheduler.warmup_steps), (2e-4, Warmup::Steps(10)));
    let beta2_of_axolotl = Algorithm::Adamw(Adamw { beta2: 0.999, ..Adamw::default() });
    assert_eq!((config.optimizer.weight_decay, config.optimizer.algorithm), (0.0, beta2_of_axolotl));
    assert_eq!(config.memory.recompute, Some(ottava_recipe::recompute::Recompute::Full));
    assert!(imported.toml.contains("beta2 = 0.999  # the default of Axolotl"), "{}", imported.toml);
    let refused = imported.refused.join("\n");
    for (line, words) in [
        (3, "`load_in_8bit`: base weights in 8 bit"),
        (25, "`optimizer`: write `state_dtype = \"float8\"`"),
        (32, "`evals_per_epoch`: write `eval_steps`"),
        (34, "`purple`: this key is not known"),
    ] {
        assert!(refused.contains(&format!("lora.yml:{line}: {words}")), "{line} {words} in {refused}");
    }
    assert_eq!(config.precision.recipe, ottava_recipe::RecipeName::Fp8Current, "`bf16` is the type of the rest");
    assert_eq!(imported.refused.len(), 6, "these, and the file that is not there: {refused}");
    let needless = imported.needless.join("\n");
    assert!(needless.contains(":21: `wandb_watch`") && needless.contains("`special_tokens.pad_token`"), "{needless}");
    assert!(!needless.contains("wandb_project"), "a key without a value has its default");
    assert_eq!(imported.problems, [""; 0]);
}

#[test]
fn a_project_of_wandb_in_a_file_of_axolotl_is_reported_to() {
    let of =
        |keys: &str| imported("run.yaml", &format!("base_model: m\ndatasets: []\nmax_steps: 9\n{keys}"), &[]).1.logging;
    let logging = of("wandb_project: words\nwandb_name: first\n");
    assert_eq!(
        (logging.report_to, logging.project.as_str(), logging.run_name.as_str()),
        (vec![TrackerKind::Wandb], "words", "first")
    );
    assert!(of("wandb_project: \n").report_to.is_empty());
    assert_eq!(of("wandb_project: words\nuse_mlflow: false\nreport_to: mlflow\n").report_to, [TrackerKind::Mlflow]);
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
    assert_eq!(config.data.train_files[1..], [Path::new("x/y")], "a data set of the Hub");
    assert!(config.data.train_files[0].ends_with("data/identity.json"));
    assert_eq!(config.data.val_files, config.data.train_files[..1]);
    assert_eq!((config.lora.r, config.lora.lora_alpha), (8, 16.0), "alpha is twice the rank by default");
    assert_eq!(config.lora.target_modules, ottava_recipe::lora::Targets::Names(vec!["q_proj".into(), "v_proj".into()]));
    assert_eq!((config.optimizer.learning_rate, config.optimizer.weight_decay), (1e-4, 0.0));
    assert_eq!(config.lr_scheduler.warmup_steps, Warmup::Share(0.1));
    assert_eq!((config.parallel.communication.collective_timeout, config.data.max_length), (2_592_000, 2048));
    let refused = imported.refused.join("\n");
    assert_eq!(config.tokenizer.chat_template, "llama3");
    for words in ["`trust_remote_code`", "`max_samples`"] {
        assert!(refused.contains(words), "{words} in {refused}");
    }
    assert_eq!(imported.refused.len(), 2, "{refused}");
    assert_eq!(imported.needless.len(), 5, "{:?}", imported.needless);
}

#[test]
fn data_sets_of_the_hub_keep_their_names() {
    let files = |text: &str, info: &[(&str, &str)]| {
        let (imported, config) = imported("run.yaml", text, info);
        assert!(imported.refused.is_empty(), "{:?}", imported.refused);
        let texts =
            |paths: Vec<std::path::PathBuf>| paths.iter().map(|path| path.display().to_string()).collect::<Vec<_>>();
        (texts(config.data.train_files), texts(config.data.val_files))
    };
    let trl = "model_name_or_path: m/m\ndataset_name: trl-lib/Capybara\nmax_steps: 9\n";
    assert_eq!(files(trl, &[]), (vec!["trl-lib/Capybara".into()], vec![]));
    let more = format!(
        "{trl}dataset_config: en\ndataset_train_split: train_sft\ndataset_test_split: test_sft\neval_strategy: steps\n"
    );
    let named = |split: &str| vec![format!("trl-lib/Capybara?config=en&split={split}")];
    assert_eq!(files(&more, &[]), (named("train_sft"), named("test_sft")));
    let axolotl = "base_model: m/m\nmax_steps: 9\ndatasets:\n  - path: a/b\n    name: en\n    split: test\n    type: chat_template\n  - path: c/d\n    data_files: [x/y.jsonl]\n    type: chat_template\n";
    assert_eq!(files(axolotl, &[]).0, ["a/b?config=en&split=test", "hf://datasets/c/d/x/y.jsonl"]);
    let info = [("data/dataset_info.json", r#"{"hub": {"hf_hub_url": "o/n", "subset": "en", "split": "test"}}"#)];
    let factory = "model_name_or_path: m/m\nstage: sft\nfinetuning_type: full\ndataset: hub\nmax_steps: 9\n";
    assert_eq!(files(factory, &info).0, ["o/n?config=en&split=test"]);
}

#[test]
fn stages_of_llama_factory_are_objectives() {
    let of = |keys: &str| {
        imported("run.yaml", &format!("model_name_or_path: m\nfinetuning_type: lora\nmax_steps: 9\n{keys}"), &[]).1
    };
    let loss = |keys: &str| of(keys).preference.loss_type.map(|losses| losses.names());
    assert_eq!(
        ["kto", "rm"].map(|stage| loss(&format!("stage: {stage}\n"))),
        ["kto", "bradley_terry"].map(|name| Some(name.into()))
    );
    assert_eq!(loss("stage: dpo\npref_loss: ipo\n"), Some("ipo".into()));
    let packing = |keys: &str| of(keys).data.packing;
    assert_eq!(packing("stage: pt\n"), ottava_data::Packing::Wrapped, "packed by default");
    assert_eq!(packing("stage: pt\npacking: false\n"), ottava_data::Packing::None);
    assert_eq!(packing("stage: sft\n"), ottava_data::Packing::None);
}

#[test]
fn an_objective_that_is_not_implemented_is_an_error() {
    let folder = tempfile::tempdir().unwrap();
    let path = folder.path().join("run.yaml");
    for (keys, words) in [
        ("base_model: m\ndatasets: []\nrl: gdpo\n", "run.yaml:3: `rl`: of preferences, runs train the losses"),
        ("base_model: m\ndatasets: []\nrl: something\n", "`rl`: "),
        ("model_name_or_path: m\nstage: ppo\n", "`stage`: "),
        ("model_name_or_path: m\nstage: dpo\npref_loss: kto_pair\n", "`pref_loss`: "),
        ("model_name_or_path: m\ndataset_name: d.jsonl\nloss_type: [sigmoid, other]\n", "`loss_type`: "),
        ("model_name_or_path: m\ndataset_name: d.jsonl\nloss_type: dft\n", "`loss_type`: "),
        ("model_name_or_path: m\ndataset_name: d.jsonl\nf_divergence_type: forward_kl\n", "`f_divergence_type`: "),
        (
            "model_name_or_path: m\ndataset_name: d.jsonl\nlabel_smoothing: 0.1\nloss_type: [sigmoid, robust]\n",
            "`label_smoothing`: TRL smooths no labels of `sigmoid`",
        ),
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
    for loss in ["robust", "exo_pair", "aot", "aot_unpaired", "[aot, sft]"] {
        assert_eq!(of(&format!("loss_type: {loss}\n")).1.preference.label_smoothing, 0.1, "{loss}");
    }
}

#[test]
fn losses_of_trl_are_translated() {
    let of = |keys: &str| {
        let text = format!("model_name_or_path: m\ndataset_name: d.jsonl\nmax_steps: 9\n{keys}");
        let (imported, config) = imported("dpo.yaml", &text, &[]);
        assert_eq!(imported.problems, [""; 0], "{keys}");
        config
    };
    let names = |keys: &str| of(keys).preference.loss_type.map(|losses| losses.names());
    for loss in
        ["apo_zero", "nca_pair", "bco_pair", "sppo_hard", "aot", "sigmoid_norm", "discopop", "apo_zero_unpaired"]
    {
        assert_eq!(names(&format!("loss_type: {loss}\n")).as_deref(), Some(loss));
        assert_eq!(names(&format!("loss_type: [{loss}]\n")).as_deref(), Some(loss));
    }
    assert_eq!(names("loss_type: aot_pair\n").as_deref(), Some("aot_unpaired"));
    let sum =
        of("loss_type: [sigmoid, bco_pair, sft]\nloss_weights: [0.8, 0.2, 1.0]\nreference_free: true\n").preference;
    assert_eq!((sum.loss_weights, sum.reference_free), (vec![0.8, 0.2, 1.0], true));
    assert_eq!(of("label_smoothing_factor: 0.1\n").training.label_smoothing_factor, 0.1);
    let rate = |keys: &str| of(keys).optimizer.learning_rate;
    assert_eq!(["", "loss_type: nll\n"].map(rate), [2e-5; 2], "the default of SFTConfig");
    assert_eq!(["beta: 0.2\n", "loss_type: [ipo]\n"].map(rate), [1e-6; 2], "the default of DPOConfig and KTOConfig");
}

#[test]
fn tokens_and_templates_are_translated() {
    let axolotl = "base_model: m\nmax_steps: 9\ndatasets: []\nchat_template: chatml\ntokens: [<a>]\nspecial_tokens:\n  eos_token: <e>\n  \
                   bos_token: <b>\n  pad_token: <p>\n  additional_special_tokens: [<c>]\n";
    let (imported, config) = imported("run.yml", axolotl, &[]);
    let tokenizer = config.tokenizer;
    assert_eq!((tokenizer.added_tokens, tokenizer.added_special_tokens), (vec!["<a>".into()], vec!["<c>".to_string()]));
    assert_eq!(
        tokenizer.special_tokens.0,
        [("eos_token", "<e>"), ("bos_token", "<b>")].map(|(a, b)| (a.into(), b.into()))
    );
    assert_eq!((tokenizer.chat_template.as_str(), imported.refused.len()), ("chatml", 0), "{:?}", imported.refused);
    let factory = "model_name_or_path: m\nmax_steps: 9\nstage: sft\nadd_special_tokens: <a>,<b>\ntemplate: qwen3\n";
    let (imported, config) = super::tests::imported("run.yaml", factory, &[]);
    assert_eq!(config.tokenizer.added_special_tokens, ["<a>", "<b>"]);
    assert!(
        imported.refused.join("\n").contains("instruct models of this family have this template"),
        "{:?}",
        imported.refused
    );
    let trl = "model_name_or_path: m\ndataset_name: d.jsonl\nmax_steps: 9\neos_token: <e>\n";
    let (_, config) = super::tests::imported("run.yaml", trl, &[]);
    assert_eq!(config.tokenizer.special_tokens.0, [("eos_token".to_string(), "<e>".to_string())]);
}

/// Trainers of preferences of TRL and LLaMA-Factory switch dropout off by default; adapters of TRL have dropout by default.
#[test]
fn dropout_is_the_dropout_that_the_trainer_applies() {
    let of = |file: &str| {
        imported("run.yaml", &format!("model_name_or_path: m\nmax_steps: 9\n{file}"), &[]).1.lora.lora_dropout
    };
    let trl = "dataset_name: d.jsonl\nuse_peft: true\n";
    for (keys, dropout) in [
        ("", 0.05),
        ("lora_dropout: 0.1\n", 0.1),
        ("beta: 0.1\n", 0.0),
        ("beta: 0.1\nlora_dropout: 0.1\n", 0.0),
        ("beta: 0.1\nlora_dropout: 0.1\ndisable_dropout: false\n", 0.1),
    ] {
        assert_eq!(of(&format!("{trl}{keys}")), dropout, "{keys}");
    }
    let factory = "finetuning_type: lora\nlora_dropout: 0.1\nstage: ";
    assert_eq!(["sft\n", "dpo\n", "kto\n"].map(|stage| of(&format!("{factory}{stage}"))), [0.1, 0.0, 0.0]);
}

/// CPOTrainer adds the likelihood of the chosen completions to each loss, and LLaMA-Factory to none.
#[test]
fn losses_without_a_reference_model_are_translated() {
    let of = |file: &str, keys: &str| {
        let (imported, config) = imported("run.yaml", &format!("{file}max_steps: 9\n{keys}"), &[]);
        // Files of LLaMA-Factory name data sets, not files.
        let is_about_files = |problem: &String| problem.contains("`data.train_files` is empty");
        assert!(imported.problems.iter().all(is_about_files), "{keys}: {:?}", imported.problems);
        let p = config.preference;
        let losses = p.loss_type.map(|losses| losses.names()).unwrap_or_default();
        (losses, p.loss_weights, p.reference_free, [p.beta, p.cpo_alpha, p.simpo_gamma, p.label_smoothing])
    };
    let trl = "model_name_or_path: m\ndataset_name: d.jsonl\n";
    let axolotl = "base_model: m\ndatasets:\n  - path: d.jsonl\n    type: chatml.intel\n";
    let factory = "model_name_or_path: m\nfinetuning_type: lora\nstage: dpo\n";
    for (file, keys, losses, weights, is_free, numbers) in [
        (trl, "cpo_alpha: 0.5\nlabel_smoothing: 0.1\n", "cpo", vec![], false, [0.1, 0.5, 0.5, 0.1]),
        (trl, "cpo_alpha: 0.5\nloss_type: hinge\n", "hinge + sft", vec![1.0, 0.5], true, [0.1, 1.0, 0.5, 0.0]),
        (trl, "cpo_alpha: 0\nloss_type: ipo\n", "ipo", vec![], true, [0.1, 1.0, 0.5, 0.0]),
        (
            trl,
            "loss_type: simpo\nbeta: 2.0\nsimpo_gamma: 1.0\n",
            "simpo + sft",
            vec![1.0, 1.0],
            false,
            [2.0, 1.0, 1.0, 0.0],
        ),
        (trl, "loss_type: simpo\ncpo_alpha: 0.0\n", "simpo", vec![], false, [0.1, 1.0, 0.5, 0.0]),
        (axolotl, "rl: simpo\nrl_beta: 2.0\n", "simpo + sft", vec![1.0, 1.0], false, [2.0, 1.0, 0.5, 0.0]),
        (axolotl, "rl: orpo\norpo_alpha: 0.2\n", "orpo", vec![], false, [0.2, 1.0, 0.5, 0.0]),
        (factory, "pref_loss: orpo\npref_beta: 0.2\n", "orpo", vec![], false, [0.2, 1.0, 0.5, 0.0]),
        (factory, "pref_loss: simpo\nsimpo_gamma: 0.7\n", "simpo", vec![], false, [0.1, 1.0, 0.7, 0.0]),
    ] {
        assert_eq!(of(file, keys), (losses.to_string(), weights, is_free, numbers), "{keys}");
    }
}

/// A key of several trainers of TRL belongs to the objective of the file.
#[test]
fn files_of_gkd_are_distillation() {
    let text = "model_name_or_path: m\ndataset_name: d.jsonl\nmax_steps: 9\nteacher_model_name_or_path: t\nbeta: 0.2\ntemperature: 1.0\nmax_new_tokens: 64\n";
    let (imported, config) = imported("gkd.yaml", &format!("{text}lmbda: 0.0\n"), &[]);
    let others: Vec<_> = imported.refused.iter().filter(|note| !note.contains("there is no file")).collect();
    assert!(imported.problems.is_empty() && others.is_empty(), "{:?}, {others:?}", imported.problems);
    let d = &config.distillation;
    assert_eq!((d.teacher.to_str(), d.beta, d.temperature, d.lmbda), (Some("t"), 0.2, 1.0, 0.0));
    assert_eq!((d.max_completion_length, config.generation.max_new_tokens), (64, 64));
    assert_eq!((config.preference.beta, config.optimizer.learning_rate), (0.1, 2e-5));
    assert_eq!(self::imported("gkd.yaml", text, &[]).1.distillation.lmbda, 0.5, "the default of TRL");
}

#[test]
fn fsdp_divides_weights_and_is_named_once() {
    let of = |keys: &str| imported("run.yaml", &format!("base_model: m\ndatasets: []\nmax_steps: 9\n{keys}"), &[]);
    for (keys, zero) in [
        ("fsdp: [full_shard, auto_wrap]\n", 3),
        ("fsdp: shard_grad_op auto_wrap\n", 2),
        ("fsdp: [no_shard]\n", 0),
        ("fsdp: true\n", 3),
        ("fsdp: false\n", 0),
        ("fsdp: auto_wrap\n", 3),
        ("fsdp: auto_wrap offload SHARD_GRAD_OP\n", 2),
        ("fsdp: []\n", 0),
        ("fsdp:\n", 0),
        ("fsdp_config:\n  fsdp_sharding_strategy: SHARD_GRAD_OP\n", 2),
        ("fsdp_config:\n  reshard_after_forward: false\n", 2),
        ("fsdp_config:\n  fsdp_sharding_strategy: FULL_SHARD\n", 3),
    ] {
        assert_eq!(of(keys).1.parallel.zero as u8, zero, "{keys}");
    }
    let keys = "fsdp_version: 2\nfsdp_config:\n  offload_params: false\n  cpu_ram_efficient_loading: true\n  \
                auto_wrap_policy: TRANSFORMER_BASED_WRAP\n  transformer_layer_cls_to_wrap: LlamaDecoderLayer\n  \
                state_dict_type: FULL_STATE_DICT\n  fsdp_sync_module_states: true\n  activation_checkpointing: true\n";
    let (imported, config) = of(keys);
    assert_eq!(
        (config.parallel.zero as u8, config.memory.recompute),
        (3, Some(ottava_recipe::recompute::Recompute::Full))
    );
    let told = [imported.refused.clone(), imported.needless.clone()].concat();
    assert_eq!(told.iter().filter(|note| note.contains("blocks are gathered")).count(), 1, "{told:?}");
    assert!(imported.refused.is_empty(), "{told:?}");
    assert_eq!(of("fsdp: hybrid_shard auto_wrap\n").0.refused.len(), 1);
    assert_eq!(of("fsdp: [offload, full_shard]\n").1.memory.offload_parameters, Some(1.0));
    let (accelerate, config) = super::tests::imported(
        "fsdp.yaml",
        "distributed_type: FSDP\nmixed_precision: bf16\nfsdp_config:\n  fsdp_version: 2\n  fsdp_state_dict_type: x\n",
        &[],
    );
    assert_eq!((config.parallel.zero as u8, accelerate.refused.len()), (3, 0), "{:?}", accelerate.refused);
}

#[test]
fn fields_and_roles_of_data_sets_are_translated() {
    let of = |keys: &str| {
        let text =
            format!("base_model: m\nmax_steps: 9\ndatasets:\n  - path: a.jsonl\n    type: chat_template\n{keys}");
        let (imported, config) = imported("run.yaml", &text, &[]);
        assert_eq!(imported.refused.len(), 1, "the file that is not there: {:?}", imported.refused);
        config.data
    };
    let data = of(
        "    field_messages: chat\n    message_property_mappings:\n      role: who\n      content: says\n    roles:\n      \
         user: [me, you]\n      assistant: [bot]\n    roles_to_train: [assistant]\n    train_on_eos: all\n",
    );
    let mut fields = data.records.fields.entries();
    fields.sort();
    assert_eq!(fields, ["content=says", "messages=chat", "role=who"]);
    let mut roles = data.records.roles.entries();
    roles.sort();
    assert_eq!(roles, ["assistant=bot", "user=me", "user=you"]);
    let sharegpt = "    field_messages: conversations\n    message_property_mappings: {role: from, content: value}\n";
    assert!(
        of(sharegpt).records.fields.0.is_empty() && of(sharegpt).records.roles.0.is_empty(),
        "these are understood without a setting"
    );
    let older = of("    field_messages: turns\n    message_field_role: from\n    message_field_content: text\n");
    assert_eq!(older.records.roles.entries(), ["user=human", "assistant=gpt"]);
    let text = "base_model: m\nmax_steps: 9\ndatasets:\n  - path: a.jsonl\n    type:\n      field_instruction: q\n      field_output: a\n";
    let mut fields = imported("run.yaml", text, &[]).1.data.records.fields.entries();
    fields.sort();
    assert_eq!(fields, ["instruction=q", "output=a"]);
    let info = r#"{"own": {"file_name": "own.json", "formatting": "sharegpt", "columns": {"messages": "chat"},
        "tags": {"role_tag": "who", "content_tag": "content", "user_tag": "me", "assistant_tag": "gpt"}}}"#;
    let text = "model_name_or_path: m\nstage: sft\nmax_steps: 9\ndataset: own\ndataset_dir: sets\n";
    let data = imported("run.yaml", text, &[("sets/dataset_info.json", info)]).1.data;
    assert_eq!(
        (data.records.fields.entries(), data.records.roles.entries()),
        (vec!["conversations=chat".into(), "from=who".into()], vec!["user=me".into()])
    );
}

#[test]
fn a_data_set_of_the_hub_is_no_file() {
    for (name, words) in [("set", "`set` is no file here"), ("d.jsonl", "there is no file d.jsonl yet")] {
        let text = format!("model_name_or_path: m\ndataset_name: {name}\nmax_steps: 9\n");
        let (imported, config) = imported("sft.yaml", &text, &[]);
        assert!(imported.refused.iter().any(|note| note.contains(words)), "{:?}", imported.refused);
        assert_eq!(config.data.train_files, [Path::new(name)]);
    }
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
    assert_eq!(config.parallel.zero, ottava_parallel::Zero::Weights);
    assert_eq!((config.memory.offload_optimizer, config.optimizer.learning_rate), (Some(1.0), 3e-5));
    assert_eq!((config.training.per_device_train_batch_size, config.training.max_grad_norm), (2, 0.5));
    assert_eq!((imported.refused.len(), imported.needless.len()), (1, 2), "betas; {:?}", imported.refused);
    let other = "base_model: m\ndatasets: []\noptimizer: lion_pytorch\nadam_epsilon: 1e-7\nlr_scheduler: constant\nlr_end: 1e-6\n";
    let (imported, _) = super::tests::imported("other.yml", other, &[]);
    for words in ["it is for adamw, muon, and `optimizer.name` is lion", "and `lr_scheduler.type` is constant"] {
        assert!(imported.refused.iter().any(|note| note.contains(words)), "{words} in {imported:?}");
    }
    let trl = "model_name_or_path: m\ndataset_name: d.jsonl\nlearning_rate: 1e-5\nuse_peft: true\neval_steps: 0.5\nwarmup_steps: 0.1\n";
    let (imported, config) = super::tests::imported("sft.yaml", trl, &[]);
    assert_eq!(
        (config.lora.r, config.lr_scheduler.warmup_steps, config.training.num_train_epochs),
        (16, Warmup::Share(0.1), 3.0)
    );
    assert!(
        imported.refused.iter().any(|note| note.contains("`eval_steps = 0.5` under [evaluation] is refused")),
        "{imported:?}"
    );
}

/// The tables of [[data.datasets]]: name, last part of the file, weight and repeat.
fn sets(config: &RunConfig) -> Vec<(&str, String, Option<f64>, Option<f64>)> {
    let file = |path: &Path| path.file_name().unwrap().to_string_lossy().into_owned();
    let of = |set: &crate::DatasetConfig| file(&set.train_files[0]);
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
