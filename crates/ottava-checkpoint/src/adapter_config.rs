//! Reads `adapter_config.json`. A table says what each key of PEFT's `LoraConfig` means for a trained adapter.

use ottava_common::error::Result;
use ottava_models::ConfigFile;
use ottava_models::layers::SCORE;
use ottava_recipe::lora::{Exceptions, Lora, Targets};
use serde::Deserialize;
use serde::de::DeserializeOwned;
use serde_json::Value;

/// The meaning of a key.
#[derive(Clone, Copy, PartialEq)]
enum Meaning {
    /// [`settings`] reads it.
    Read,
    /// The key has no effect on the result of a trained adapter.
    Needless,
    /// The key changes the result of an adapter, and is not implemented.
    Refused,
}
use Meaning::{Needless, Read, Refused};

/// The keys of PEFT 0.21.
const KEYS: &[(&str, Meaning)] = &[
    ("alora_invocation_tokens", Refused),
    ("alpha_pattern", Read),
    ("arrow_config", Refused),
    ("auto_mapping", Needless),
    ("base_model_name_or_path", Read),
    ("bias", Read),
    ("corda_config", Needless),
    ("ensure_weight_tying", Read),
    ("eva_config", Needless),
    ("exclude_modules", Read),
    // PEFT corrects this value by the kind of each linear.
    ("fan_in_fan_out", Needless),
    ("inference_mode", Needless),
    ("init_lora_weights", Read),
    ("kasa_config", Refused),
    ("layer_replication", Refused),
    ("layers_pattern", Read),
    ("layers_to_transform", Read),
    ("loftq_config", Needless),
    ("lora_alpha", Read),
    ("lora_bias", Refused),
    ("lora_dropout", Needless),
    ("lora_ga_config", Needless),
    ("megatron_config", Refused),
    ("megatron_core", Needless),
    ("modules_to_save", Read),
    ("monteclora_config", Refused),
    ("peft_type", Read),
    ("peft_version", Needless),
    ("qalora_group_size", Needless),
    ("r", Read),
    ("rank_pattern", Read),
    ("revision", Needless),
    ("runtime_config", Needless),
    ("target_modules", Read),
    ("target_parameters", Read),
    ("task_type", Needless),
    ("trainable_token_indices", Refused),
    ("use_bdlora", Refused),
    ("use_dora", Read),
    // The key is for base models in GPTQ.
    ("use_qalora", Needless),
    ("use_rslora", Read),
    // The key compresses saved activations.
    ("velora_config", Needless),
];

/// The initializations that do not change the weights of the base model. PEFT draws `A` and `B`, and the file replaces them.
const PLAIN: [&str; 5] = ["gaussian", "orthogonal", "eva", "mica", "lora_ga"];

/// The heads that PEFT saves with the adapters of a reward model. The supported families use the second name.
const HEADS: [&str; 2] = ["classifier", SCORE];

/// One value, or a list of values.
#[derive(Deserialize)]
#[serde(untagged)]
enum OneOrMany<T> {
    One(T),
    Many(Vec<T>),
}

/// Returns the rank, the factor and the targets of an adapter with these settings.
///
/// Errors with [`Error::Model`](ottava_common::Error::Model), which names a key that is not implemented or not known.
pub(super) fn settings(config: &ConfigFile) -> Result<Lora> {
    let kind: String = config.required("peft_type")?;
    if kind != "LORA" {
        return Err(config.error(&format!("`peft_type` is \"{kind}\"; adapters of LORA are implemented")));
    }
    expect_known(config)?;
    expect_plain(config)?;
    let parameters: Vec<String> = many(config, "target_parameters")?;
    let lora = Lora {
        r: config.required("r")?,
        alpha: config.required("lora_alpha")?,
        use_rslora: config.optional("use_rslora", false)?,
        use_dora: config.optional("use_dora", false)?,
        targets: match targets(config, "target_modules")? {
            Some(targets) => targets,
            None if !parameters.is_empty() => Targets::NONE,
            None => return Err(config.error("the key `target_modules` is missing")),
        },
        parameters,
        exceptions: Exceptions {
            exclude: targets(config, "exclude_modules")?.unwrap_or(Targets::NONE),
            layers: many(config, "layers_to_transform")?,
            layers_pattern: many(config, "layers_pattern")?,
            ranks: config.optional("rank_pattern", Default::default())?,
            alphas: config.optional("alpha_pattern", Default::default())?,
        },
        modules_to_save: saved(config)?.into_iter().filter(|name| !is_head(name)).collect(),
        // How the adapters were trained is of no consequence to their values.
        ..Lora::default()
    };
    if config.optional("ensure_weight_tying", false)? && !lora.modules_to_save.is_empty() {
        return Err(config.error(&format!(
            "`ensure_weight_tying` is set beside `modules_to_save` ({}), so PEFT shares the trained embedding with the head of a tied model, which is not \
             implemented; train with `ensure_weight_tying` = false, or merge the adapter with PEFT",
            lora.modules_to_save.join(", ")
        )));
    }
    if lora.r == 0 || lora.r > 1 << 24 {
        return Err(config.error(&format!("`r` is {}", lora.r)));
    }
    if matches!(lora.targets, Targets::Pattern(_)) && !lora.exceptions.layers.is_empty() {
        return Err(config.error(
            "`layers_to_transform` is set, and `target_modules` is a regular expression, which PEFT does not combine; write the layers into it",
        ));
    }
    Ok(lora)
}

/// Returns whether the adapter has the head of a reward model.
pub(super) fn has_score(config: &ConfigFile) -> Result<bool> {
    Ok(saved(config)?.iter().any(|name| is_head(name)))
}

/// Returns the modules that were trained whole beside the adapters, by the ends of their names.
fn saved(config: &ConfigFile) -> Result<Vec<String>> {
    Ok(config.optional::<Option<Vec<String>>>("modules_to_save", None)?.unwrap_or_default())
}

fn is_head(name: &str) -> bool {
    HEADS.contains(&name)
}

/// Errors for a key that changes the result of an adapter and is not read.
fn expect_known(config: &ConfigFile) -> Result<()> {
    for (key, value) in config.values() {
        let is_unset = match value {
            Value::Null | Value::Bool(false) => true,
            Value::Object(pattern) => pattern.is_empty(),
            Value::Array(names) => names.is_empty(),
            Value::Bool(true) | Value::Number(_) | Value::String(_) => false,
        };
        match KEYS.iter().find(|(known, _)| known == key) {
            _ if is_unset => {}
            Some((_, Read | Needless)) => {}
            Some((_, Refused)) => {
                return Err(config.error(&format!("`{key}` is set, which is not implemented for adapters")));
            }
            None => {
                return Err(config.error(&format!(
                    "the key `{key}` is not known, and may change what the adapter computes; remove it if it does not"
                )));
            }
        }
    }
    Ok(())
}

/// Errors if biases of linears are trained, or weights of the base are replaced.
fn expect_plain(config: &ConfigFile) -> Result<()> {
    let bias: String = config.optional("bias", "none".to_string())?;
    if bias != "none" {
        return Err(config.error(&format!("`bias` is \"{bias}\"; adapters with trained biases are not implemented")));
    }
    match config.values().get("init_lora_weights") {
        None | Some(Value::Null | Value::Bool(_)) => Ok(()),
        Some(Value::String(name)) if PLAIN.contains(&name.to_lowercase().as_str()) => Ok(()),
        Some(name) => Err(config.error(&format!(
            "`init_lora_weights` is {name}, which also changes the weights of the base model; convert the adapter with PEFT's \
             `save_pretrained(output, path_initial_model_for_weight_conversion=initial)`, where `initial` is the adapter as it was saved before \
             training, or merge it with PEFT"
        ))),
    }
}

fn targets(config: &ConfigFile, key: &str) -> Result<Option<Targets>> {
    match config.values().get(key) {
        None | Some(Value::Null) => Ok(None),
        Some(value) => {
            let read = serde_json::from_value(value.clone());
            read.map(Some).map_err(|error| config.error(&format!("`{key}`: {error}")))
        }
    }
}

fn many<T: DeserializeOwned>(config: &ConfigFile, key: &str) -> Result<Vec<T>> {
    Ok(match config.optional::<Option<OneOrMany<T>>>(key, None)? {
        None => Vec::new(),
        Some(OneOrMany::One(one)) => vec![one],
        Some(OneOrMany::Many(many)) => many,
    })
}

#[cfg(test)]
mod tests {
    use super::*;
    use serde_json::json;

    fn read(key: &str, value: Value) -> Result<Lora> {
        let mut values = json!({"peft_type": "LORA", "r": 8, "lora_alpha": 16, "target_modules": ["q_proj", "v_proj"],
            "base_model_name_or_path": "base"});
        values[key] = value;
        settings(&ConfigFile::from_values("adapter_config.json", values.as_object().unwrap().clone()))
    }

    #[test]
    fn keys_that_change_nothing_pass() {
        for (key, meaning) in KEYS {
            for unset in [Value::Null, json!(false), json!({}), json!([])] {
                if *meaning != Read {
                    read(key, unset).unwrap();
                }
            }
        }
        for (key, value) in [
            ("lora_dropout", json!(0.1)),
            ("inference_mode", json!(true)),
            ("runtime_config", json!({"ephemeral_gpu_offload": false})),
            ("megatron_core", json!("megatron.core")),
            ("qalora_group_size", json!(16)),
            ("eva_config", json!({"rho": 2.0})),
            ("init_lora_weights", json!("gaussian")),
            ("init_lora_weights", json!("eva")),
            ("init_lora_weights", json!(false)),
            ("modules_to_save", json!(["classifier", "score"])),
            ("a_key_of_tomorrow", Value::Null),
            ("another_key", json!({})),
        ] {
            read(key, value).unwrap_or_else(|error| panic!("{key}: {error}"));
        }
    }

    #[test]
    fn keys_that_change_the_function_are_refused_by_name() {
        for (key, _) in KEYS.iter().filter(|(_, meaning)| *meaning == Refused) {
            for set in [json!(true), json!([1]), json!({"a": 1}), json!("x")] {
                let error = read(key, set).unwrap_err().to_string();
                assert!(error.contains(&format!("`{key}` is set")), "{error}");
            }
        }
        for (key, value, words) in [
            (
                "init_lora_weights",
                json!("pissa"),
                "`init_lora_weights` is \"pissa\", which also changes the weights of the base",
            ),
            ("init_lora_weights", json!("pissa_niter_4"), "path_initial_model_for_weight_conversion"),
            ("init_lora_weights", json!("olora"), "`init_lora_weights` is \"olora\""),
            ("init_lora_weights", json!("loftq"), "`init_lora_weights` is \"loftq\""),
            ("init_lora_weights", json!("corda"), "`init_lora_weights` is \"corda\""),
            ("bias", json!("lora_only"), "`bias` is \"lora_only\""),
            ("a_key_of_tomorrow", json!(3), "the key `a_key_of_tomorrow` is not known"),
            ("peft_type", json!("ADALORA"), "`peft_type` is \"ADALORA\""),
            ("target_modules", json!("(q_proj"), "`target_modules`: \"(q_proj\" is no regular expression"),
            ("target_modules", Value::Null, "`target_modules` is missing"),
        ] {
            let error = read(key, value).unwrap_err().to_string();
            assert!(error.contains(words), "{error}");
        }
    }

    #[test]
    fn modules_to_save_are_read_without_the_heads_of_reward_models() {
        let saved = |value: Value| read("modules_to_save", value).unwrap().modules_to_save;
        assert_eq!(saved(json!(["score", "embed_tokens", "lm_head"])), ["embed_tokens", "lm_head"]);
        assert_eq!(
            [json!(null), json!([]), json!(["classifier", "score"])].map(saved),
            [vec![], vec![], Vec::<String>::new()]
        );
    }

    #[test]
    fn a_shared_embedding_that_is_trained_is_refused() {
        let error = |saved: Value| {
            let values = json!({"peft_type": "LORA", "r": 8, "lora_alpha": 16, "target_modules": ["q_proj"], "modules_to_save": saved,
                "ensure_weight_tying": true});
            let values = values.as_object().unwrap().clone();
            settings(&ConfigFile::from_values("adapter_config.json", values)).err().map(|error| error.to_string())
        };
        assert!(error(json!(["embed_tokens"])).unwrap().contains("`ensure_weight_tying` is set beside"));
        assert_eq!(error(Value::Null), None);
    }

    #[test]
    fn targets_may_be_patterns_and_layers() {
        let lora = read("target_modules", json!(".*(q|v)_proj")).unwrap();
        assert!(lora.has("model.layers.0.self_attn.v_proj") && !lora.has("model.layers.0.mlp.up_proj"));
        assert_eq!(read("target_modules", json!("all-linear")).unwrap().targets, Targets::AllLinear);
        let lora = read("layers_to_transform", json!(1)).unwrap();
        assert!(lora.has("model.layers.1.self_attn.v_proj") && !lora.has("model.layers.0.self_attn.v_proj"));
        assert!(!read("exclude_modules", json!(["q_proj"])).unwrap().has("model.layers.1.self_attn.q_proj"));
        let lora = read("rank_pattern", json!({"q_proj": 2})).unwrap();
        assert_eq!(["q_proj", "v_proj"].map(|name| lora.rank(&format!("model.layers.1.self_attn.{name}"))), [2, 8]);
    }
}
