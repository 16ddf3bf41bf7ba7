//! Tests of defaults and tables of single trainers.

use super::tests::imported;
use crate::{Interval, RunConfig};
use ottava_parallel::Zero;
use ottava_recipe::RecipeName;

#[test]
fn texts_of_llama_factory_have_the_field_of_the_prompt() {
    let files = |field: &str| {
        let info = format!(r#"{{"web": {{"file_name": "web.jsonl", "columns": {{"prompt": "{field}"}}}}}}"#);
        let files = [("data/dataset_info.json", info.as_str()), ("data/web.jsonl", "{}")];
        let of = |stage: &str| {
            let text = format!("model_name_or_path: m\nmax_steps: 9\nstage: {stage}\ndataset: web\n");
            let (imported, config) = imported("run.yaml", &text, &files);
            assert!(imported.refused.is_empty(), "{:?}", imported.refused);
            (config.data.records.text_field, config.data.records.fields.0)
        };
        (of("pt"), of("sft"))
    };
    let instruction = |field: &str| vec![("instruction".to_string(), field.to_string())];
    assert_eq!(files("text"), (("text".into(), vec![]), ("text".into(), instruction("text"))));
    assert_eq!(files("content"), (("content".into(), vec![]), ("text".into(), instruction("content"))));
}

#[test]
fn defaults_of_trl_are_the_defaults_of_the_trainer_of_the_file() {
    let of = |keys: &str| {
        let (imported, config) =
            imported("run.yaml", &format!("model_name_or_path: m\ndataset_name: o/n\nmax_steps: 9\n{keys}"), &[]);
        assert!(imported.refused.is_empty(), "{keys}: {:?}", imported.refused);
        config
    };
    for (keys, all) in [("", true), ("assistant_only_loss: true\n", false), ("beta: 0.1\n", false)] {
        assert_eq!(of(keys).data.train_on_inputs, all, "{keys}");
    }
    for (keys, recipe) in [("bf16: false\n", RecipeName::Fp32), ("bf16: false\nfp16: true\n", RecipeName::Fp16)] {
        assert_eq!(of(keys).precision.recipe, recipe, "{keys}");
    }
    let by_steps = "dataset_test_split: test\nload_best_model_at_end: true\neval_strategy: steps\n";
    for (keys, steps) in [("", 10), ("logging_steps: 7\n", 7), ("eval_steps: 5\n", 5)] {
        let config = of(&format!("{by_steps}{keys}"));
        assert!(config.evaluation.load_best_model_at_end, "{keys}");
        assert_eq!(config.evaluation.eval_steps, Interval::Every(steps), "{keys}");
    }
    let (imported, _) =
        imported("run.yaml", "model_name_or_path: m\ndataset_name: d\nload_best_model_at_end: true\n", &[]);
    assert!(imported.refused.iter().any(|note| note.contains("`evaluation.eval_steps` is \"end\"")), "{imported:?}");
}

#[test]
fn keys_in_tables_of_others_are_not_ours_by_their_last_part() {
    let axolotl =
        "base_model: m\nmax_steps: 9\ndatasets: []\nflex_attn_compile_kwargs:\n  mode: max-autotune\nmode: x\n";
    let (imported, config) = imported("run.yml", axolotl, &[]);
    assert_eq!(config.reinforcement, RunConfig::default().reinforcement);
    assert!(imported.needless.iter().any(|note| note.contains("`flex_attn_compile_kwargs.mode`")), "{imported:?}");
    assert!(imported.refused.iter().any(|note| note.ends_with("`mode`: this key is not known")), "{imported:?}");
    let tables =
        "own: {seed: 5, lr: 7.0, mode: x, loss_type: kto, type: linear, deeper: {micro_batch_size: 3, stage: 2}}\n";
    let paths = ["seed", "lr", "mode", "loss_type", "type", "deeper.micro_batch_size", "deeper.stage"];
    let paths = paths.map(|key| format!("`own.{key}`: this key "));
    for (trainer, text) in [
        ("Axolotl", "base_model: m\nmax_steps: 9\ndatasets: []\n"),
        ("Axolotl with GRPO", "base_model: m\nmax_steps: 9\ndatasets: []\nrl: grpo\ntrl: {num_generations: 4}\n"),
        ("LLaMA-Factory", "model_name_or_path: m\nmax_steps: 9\nstage: sft\n"),
        ("TRL", "model_name_or_path: m\nmax_steps: 9\ndataset_name: o/n\n"),
        ("TRL with GRPO", "model_name_or_path: m\nmax_steps: 9\ndataset_name: o/n\nnum_generations: 4\n"),
        ("DeepSpeed", "zero_optimization: {stage: 1}\n"),
        ("Accelerate", "distributed_type: NO\nmixed_precision: bf16\n"),
        ("verl", "actor_rollout_ref: {model: {path: m}}\n"),
        ("NeMo-RL", "grpo: {num_generations_per_prompt: 4}\npolicy: {model_name: m}\n"),
    ] {
        let without = super::tests::imported("run.yaml", text, &[]).1;
        let (imported, config) = super::tests::imported("run.yaml", &format!("{text}{tables}"), &[]);
        assert!(config == without, "{trainer}: {}", imported.toml);
        for path in &paths {
            assert!(
                imported.refused.iter().any(|note| note.contains(path)),
                "{trainer}: {path} in {:?}",
                imported.refused
            );
        }
    }
}

/// Like ds_z3_config.json of transformers and LLaMA-Factory.
const DEEPSPEED: &str = r#"{"train_micro_batch_size_per_gpu": "auto", "train_batch_size": "auto", "gradient_clipping": "auto",
    "gradient_accumulation_steps": "auto", "zero_allow_untested_optimizer": true, "steps_per_print": 2000, "wall_clock_breakdown": false,
    "fp16": {"enabled": "auto", "loss_scale": 0, "loss_scale_window": 1000, "initial_scale_power": 16, "hysteresis": 2, "min_loss_scale": 1},
    "bf16": {"enabled": "auto"}, "optimizer": {"type": "AdamW", "params": {"lr": "auto", "betas": "auto", "eps": "auto", "weight_decay": "auto"}},
    "scheduler": {"type": "WarmupLR", "params": {"warmup_min_lr": "auto", "warmup_max_lr": "auto", "warmup_num_steps": "auto"}},
    "zero_optimization": {"stage": 3, "overlap_comm": true, "reduce_bucket_size": "auto", "offload_param": {"device": "cpu", "pin_memory": true}}}"#;

#[test]
fn auto_in_a_file_of_deepspeed_leaves_the_default() {
    let (imported, config) = imported("ds.json", DEEPSPEED, &[]);
    assert_eq!((config.parallel.zero, config.memory.offload_parameters), (Zero::Weights, Some(1.0)));
    let untouched = RunConfig::default();
    assert_eq!((&config.training, &config.optimizer), (&untouched.training, &untouched.optimizer));
    assert_eq!((imported.refused.len(), config.precision == untouched.precision), (0, true), "{:?}", imported.refused);
    for part in [r#"{"optimizer": {"params": {"lr": "auto"}}}"#, r#"{"fp16": {"enabled": "auto"}}"#] {
        assert_eq!(super::tests::imported("ds.json", part, &[]).0.refused, [""; 0], "{part}");
    }
}

#[test]
fn the_file_of_deepspeed_that_a_file_names_is_read_with_it() {
    let trl = "model_name_or_path: m\ndataset_name: o/n\nmax_steps: 9\nlearning_rate: 1e-5\nper_device_train_batch_size: 2\nlr_scheduler_type: cosine\n";
    let axolotl =
        "base_model: m\ndatasets: []\nmax_steps: 9\nlearning_rate: 1e-5\nmicro_batch_size: 2\nlr_scheduler: cosine\n";
    for (name, text) in [("sft.yaml", trl), ("examples/full/run.yml", axolotl)] {
        let text = format!("{text}deepspeed: ds/z3.json\n");
        let (imported, config) = imported(name, &text, &[("ds/z3.json", DEEPSPEED)]);
        assert_eq!((config.parallel.zero, config.memory.offload_parameters), (Zero::Weights, Some(1.0)), "{name}");
        assert_eq!((config.optimizer.learning_rate, config.training.per_device_train_batch_size), (1e-5, 2), "{name}");
        let [schedule] = &imported.refused[..] else { panic!("{:?}", imported.refused) };
        assert!(
            schedule.contains("`deepspeed.scheduler.type`: `lr_scheduler.type` is \"cosine\" by another key"),
            "{schedule}"
        );
    }
    let text = format!("{trl}fp16: true\nbf16: false\ndeepspeed: z3.json\n");
    let fp16 = imported("sft.yaml", &text, &[("z3.json", DEEPSPEED)]).1.precision;
    assert_eq!(
        (fp16.recipe, fp16.fp16.loss_scale_window),
        (RecipeName::Fp16, 1000),
        "`auto` is the switch of the file"
    );
    let (imported, config) = imported("sft.yaml", &format!("{trl}deepspeed: nowhere.json\n"), &[]);
    assert_eq!(config.parallel.zero, Zero::Nothing);
    assert!(
        imported.refused.iter().any(|note| note.contains("`deepspeed`: write `zero = 1`")),
        "{:?}",
        imported.refused
    );
}

#[test]
fn tables_of_accelerate_are_translated() {
    let of = |text: &str, files: &[(&str, &str)]| {
        let (imported, config) =
            imported("accelerate.yaml", &format!("compute_environment: LOCAL_MACHINE\n{text}"), files);
        (imported.refused, config)
    };
    let keys = "deepspeed_config:\n  zero_stage: 2\n  gradient_accumulation_steps: auto\n  gradient_clipping: 0.5\n  \
                offload_optimizer_device: cpu\n  zero3_init_flag: false\n";
    let (refused, config) = of(keys, &[]);
    assert_eq!((config.parallel.zero, config.memory.offload_optimizer), (Zero::Gradients, Some(1.0)), "{refused:?}");
    assert_eq!((config.training.max_grad_norm, refused.len()), (0.5, 0), "{refused:?}");
    let named = "deepspeed_config:\n  deepspeed_config_file: z3.json\n  zero3_init_flag: true\n";
    let (refused, config) =
        of(named, &[("z3.json", r#"{"zero_optimization": {"stage": 3}, "gradient_clipping": "auto"}"#)]);
    assert_eq!((config.parallel.zero, refused.len()), (Zero::Weights, 0), "{refused:?}");
    let (refused, config) = of("parallelism_config:\n  parallelism_config_tp_size: 2\n  cp_size: 4\n", &[]);
    assert_eq!((config.parallel.tensor, config.parallel.context, refused.len()), (2, 4, 0), "{refused:?}");
    let (refused, config) =
        of("fp8_config:\n  margin: 2\n  fp8_format: E4M3\n  amax_history_len: 64\n  lr: 3.0\n", &[]);
    assert!(refused.len() == 1 && refused[0].contains("`fp8_config.lr`"), "{refused:?}");
    let delayed = config.precision.delayed;
    assert_eq!((delayed.margin, delayed.amax_history_len), (2, 64));
    // Axolotl 0.19.
    for (recipe, ours) in [("tensorwise", RecipeName::Fp8Current), ("rowwise", RecipeName::Fp8Row)] {
        let text = format!("base_model: m\ndatasets: []\nmax_steps: 9\nfp8: true\nfp8_config:\n  recipe: {recipe}\n");
        let (imported, config) = imported("run.yml", &text, &[]);
        assert_eq!((config.precision.recipe, imported.refused.len()), (ours, 0), "{:?}", imported.refused);
    }
}
