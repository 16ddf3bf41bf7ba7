//! Tests of defaults and tables of single trainers.

use super::tests::imported;
use crate::{Interval, RunConfig};
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
    let axolotl = "base_model: m\nmax_steps: 9\ndatasets: []\nflex_attn_compile_kwargs:\n  mode: max-autotune\nsome_kwargs:\n  seed: 5\n";
    let (imported, config) = imported("run.yml", axolotl, &[]);
    assert_eq!(config.seed, RunConfig::default().seed);
    let [refused, needless] = [&imported.refused, &imported.needless].map(|notes| notes.join("\n"));
    assert!(refused.contains("`some_kwargs.seed`: this key is not known"), "{refused}");
    assert!(needless.contains("`flex_attn_compile_kwargs.mode`"), "{needless}");
    let deepspeed = r#"{"train_micro_batch_size_per_gpu": "auto", "train_batch_size": "auto", "gradient_clipping": "auto",
        "gradient_accumulation_steps": "auto", "optimizer": {"type": "AdamW", "params": {"lr": "auto", "weight_decay": "auto"}}, "bf16": {"enabled": "auto"},
        "zero_optimization": {"stage": 3, "reduce_bucket_size": "auto"}}"#;
    let (imported, config) = super::tests::imported("ds.json", deepspeed, &[]);
    assert_eq!((imported.refused.len(), config.parallel.zero), (0, ottava_parallel::Zero::Weights), "{imported:?}");
}
