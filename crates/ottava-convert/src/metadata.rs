//! The keys of GGUF files that change what a model or its tokenizer computes. Some of these keys are read, and others are refused.

use crate::architecture::Architecture;
use crate::gemma::{LOCAL_THETA, LOGIT_CAP, SCORE_CAP, WINDOW, WINDOW_PATTERN};
use crate::gguf::{Gguf, Value};
use ottava_common::Result;

/// The keys that are read; the name of the architecture precedes them.
const READ: &[&str] = &[
    "attention.head_count",
    "attention.head_count_kv",
    "attention.key_length",
    "attention.layer_norm_rms_epsilon",
    "attention.value_length",
    "block_count",
    "context_length",
    "embedding_length",
    "expert_count",
    "feed_forward_length",
    "rope.dimension_count",
    "rope.freq_base",
    "rope.scale_linear",
    "rope.scaling.factor",
    "rope.scaling.original_context_length",
    "rope.scaling.type",
    "rope.scaling.yarn_beta_fast",
    "rope.scaling.yarn_beta_slow",
];

/// Further keys that are read for Gemma.
const READ_FOR_GEMMA: &[&str] = &[LOCAL_THETA, LOGIT_CAP, SCORE_CAP, WINDOW, WINDOW_PATTERN];

/// Keys that do not affect the computation in llama.cpp; the name of the architecture precedes them.
const NEEDLESS: &[&str] = &["rope.scaling.finetuned", "tensor_data_layout", "vocab_size"];

/// Keys with the value at which they have no effect, if this is not 0, false or empty. A flag that is true counts as 1.
const NEUTRAL: &[(&str, f64)] = &[
    ("attention.causal", 1.0),
    ("attention.output_scale", 1.0),
    ("embedding_scale", 1.0),
    ("logit_scale", 1.0),
    ("residual_scale", 1.0),
    ("rope.scaling.attn_factor", 1.0),
    ("rope.scaling.yarn_attn_factor", 1.0),
    ("rope.scaling.yarn_ext_factor", 1.0),
];

/// The keys of the tokenizer that are refused unless they are false or empty.
const REFUSED_OF_TOKENIZER: &[&str] =
    &["add_eos_token", "add_sep_token", "precompiled_charsmap", "remove_extra_whitespaces"];

/// Errors if a file has only a part of a model.
pub(super) fn expect_whole(gguf: &Gguf) -> Result<()> {
    let parts = gguf.count("split.count")?.unwrap_or(0);
    if parts > 1 {
        let part = gguf.count("split.no")?.unwrap_or(0) + 1;
        return Err(gguf.error(&format!(
            "the model is split: this is part {part} of {parts}; join the parts with `llama-gguf-split --merge` of llama.cpp"
        )));
    }
    match gguf.text("general.type")? {
        None | Some("model") => Ok(()),
        Some(other) => Err(gguf.error(&format!("`general.type` is `{other}`; a `model` is converted"))),
    }
}

/// Errors if an unknown key of the architecture or the tokenizer changes what is computed.
pub(super) fn expect_known(gguf: &Gguf, architecture: &Architecture) -> Result<()> {
    let prefix = format!("{}.", architecture.name);
    for (key, value) in gguf.metadata() {
        let Some(name) = key.strip_prefix(&prefix) else { continue };
        let reads = READ.contains(&name) || architecture.gemma.is_some() && READ_FOR_GEMMA.contains(&name);
        // Converters write this key for Qwen2, but sublayers of Qwen2 are not parallel in llama.cpp.
        let is_needless = NEEDLESS.contains(&name) || architecture.name == "qwen2" && name == "use_parallel_residual";
        // A window that covers all positions has no effect.
        let context = gguf.count(&format!("{prefix}context_length"))?;
        let is_whole = name == WINDOW && context.is_some() && gguf.count(key)? >= context;
        if !(reads || is_needless || is_whole || is_neutral(name, value)) {
            return Err(gguf.error(&format!(
                "`{key}` is {}, which is not read for models of the architecture `{}`",
                described(value),
                architecture.name
            )));
        }
    }
    for name in REFUSED_OF_TOKENIZER {
        let key = format!("tokenizer.ggml.{name}");
        if let Some(value) = gguf.value(&key).filter(|value| !is_neutral(name, value)) {
            return Err(gguf.error(&format!("`{key}` is {}, which is not implemented", described(value))));
        }
    }
    Ok(())
}

/// Whether a key has no effect with this value.
fn is_neutral(name: &str, value: &Value) -> bool {
    let number = match value {
        Value::Integer(n) => *n as f64,
        Value::Float(n) => *n,
        Value::Bool(flag) => f64::from(u8::from(*flag)),
        Value::Text(text) => return text.is_empty(),
        Value::Integers(list) => return list.iter().all(|n| *n == 0),
        Value::Texts(list) => return list.is_empty(),
        Value::Floats(list) => return list.iter().all(|n| *n == 0.0),
        Value::Other => return false,
    };
    // A value of 0 for `attention.causal` means attention to later tokens, so it is not neutral.
    let zero_is_neutral = name != "attention.causal";
    number == 0.0 && zero_is_neutral || NEUTRAL.contains(&(name, number))
}

fn described(value: &Value) -> String {
    match value {
        Value::Integer(n) => n.to_string(),
        Value::Float(n) => n.to_string(),
        Value::Bool(flag) => flag.to_string(),
        Value::Text(text) => format!("`{text}`"),
        Value::Integers(_) | Value::Texts(_) | Value::Floats(_) | Value::Other => "a list".into(),
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::gguf::tests::with_keys;
    use crate::tokenizer;
    use Value::{Bool, Float, Integer, Text};
    use ottava_models::{RopeKind, Yarn};
    use serde_json::json;

    fn known(architecture: &str, keys: &[(&str, Value)]) -> Result<()> {
        let name = ("general.architecture", Text(architecture.into()));
        let keys: Vec<_> = std::iter::once(name).chain(keys.to_vec()).collect();
        let gguf = with_keys(&keys);
        expect_known(&gguf, Architecture::of(&gguf)?)
    }

    #[test]
    fn keys_that_change_the_function_are_refused_by_name() {
        for (key, value) in [
            ("llama.attention.clamp_kqv", Float(3.0)),
            ("llama.attention.causal", Bool(false)),
            ("llama.attention.sliding_window", Integer(7)),
            ("llama.attn_logit_softcapping", Float(20.0)),
            ("llama.rope.scaling.attn_factor", Float(1.3)),
            ("llama.logit_scale", Float(0.5)),
            ("llama.use_parallel_residual", Bool(true)),
            ("llama.a_key_of_tomorrow", Text("x".into())),
            ("tokenizer.ggml.add_eos_token", Bool(true)),
            ("tokenizer.ggml.remove_extra_whitespaces", Bool(true)),
        ] {
            let error = known("llama", &[(key, value)]).unwrap_err().to_string();
            assert!(error.contains(&format!("`{key}` is ")), "{error}");
        }
    }

    #[test]
    fn keys_without_effect_pass() {
        for (key, value) in [
            ("llama.attention.clamp_kqv", Float(0.0)),
            ("llama.attention.causal", Bool(true)),
            ("llama.rope.scaling.attn_factor", Float(1.0)),
            ("llama.rope.scaling.finetuned", Bool(true)),
            ("llama.logit_scale", Float(1.0)),
            ("llama.expert_count", Integer(0)),
            ("llama.vocab_size", Integer(12)),
            ("llama.use_parallel_residual", Bool(false)),
            ("qwen2.logit_scale", Float(7.0)),
            ("tokenizer.ggml.add_eos_token", Bool(false)),
            ("general.name", Text("x".into())),
        ] {
            known("llama", &[(key, value)]).unwrap();
        }
        known("llama", &[("llama.attention.sliding_window", Integer(64)), ("llama.context_length", Integer(64))])
            .unwrap();
        known(
            "gemma2",
            &[("gemma2.attn_logit_softcapping", Float(20.0)), ("gemma2.attention.sliding_window", Integer(7))],
        )
        .unwrap();
        known("qwen2", &[("qwen2.use_parallel_residual", Bool(true))]).unwrap();
    }

    #[test]
    fn parts_of_models_and_other_files_are_named() {
        let whole = |keys: &[(&str, Value)]| expect_whole(&with_keys(keys)).map_err(|error| error.to_string());
        let part = whole(&[("split.no", Integer(1)), ("split.count", Integer(3))]).unwrap_err();
        assert!(
            part.contains("the model is split: this is part 2 of 3; join the parts with `llama-gguf-split --merge`"),
            "{part}"
        );
        whole(&[("split.no", Integer(0)), ("split.count", Integer(1))]).unwrap();
        whole(&[("general.type", Text("model".into()))]).unwrap();
        assert!(
            whole(&[("general.type", Text("adapter".into()))]).unwrap_err().contains("`general.type` is `adapter`")
        );
    }

    #[test]
    fn generation_ends_at_each_token_that_ends_a_turn() {
        let ends = |keys: &[(&str, u32)]| {
            let keys: Vec<_> = keys
                .iter()
                .map(|(name, id)| (format!("tokenizer.ggml.{name}_token_id"), Integer(i128::from(*id))))
                .collect();
            let keys: Vec<_> = keys.iter().map(|(key, value)| (key.as_str(), value.clone())).collect();
            tokenizer::ends(&with_keys(&keys)).unwrap()
        };
        assert_eq!(ends(&[("eos", 2), ("eot", 3), ("eom", 4)]), json!([2, 3, 4]));
        assert_eq!(ends(&[("eos", 2), ("eot", 2)]), json!(2));
        assert_eq!(ends(&[("eot", 3)]), json!(3));
        assert_eq!(ends(&[]), json!(null));
    }

    #[test]
    fn rope_scaling_is_that_of_llama_cpp() {
        let kind = |keys: &[(&str, Value)]| {
            let name = ("general.architecture", Text("llama".into()));
            let keys: Vec<_> = std::iter::once(name).chain(keys.to_vec()).collect();
            let gguf = with_keys(&keys);
            Architecture::of(&gguf).unwrap().rope_scaling(&gguf)
        };
        let (linear, yarn) = (Text("linear".into()), Text("yarn".into()));
        let of_factor = |factor: f64| ("llama.rope.scaling.factor", Float(factor));
        let of_type = |name: Value| ("llama.rope.scaling.type", name);
        assert_eq!(kind(&[]).unwrap(), RopeKind::Default);
        assert_eq!(kind(&[of_factor(4.0)]).unwrap(), RopeKind::Linear { factor: 4.0 });
        assert_eq!(kind(&[("llama.rope.scale_linear", Float(2.0))]).unwrap(), RopeKind::Linear { factor: 2.0 });
        assert_eq!(
            kind(&[of_type(linear.clone()), ("llama.rope.scale_linear", Float(2.0))]).unwrap(),
            RopeKind::Linear { factor: 2.0 }
        );
        assert_eq!(kind(&[of_type(linear)]).unwrap(), RopeKind::Default);
        assert_eq!(kind(&[of_type(Text("none".into())), of_factor(4.0)]).unwrap(), RopeKind::Default);
        let expected = Yarn {
            factor: 4.0,
            original_max_positions: 16.0,
            attention_factor: None,
            mscale: None,
            mscale_all_dim: None,
            beta_fast: 16.0,
            beta_slow: 1.0,
            truncate: true,
        };
        let keys = [
            of_type(yarn),
            of_factor(4.0),
            ("llama.rope.scaling.original_context_length", Integer(16)),
            ("llama.rope.scaling.yarn_beta_fast", Float(16.0)),
        ];
        assert_eq!(kind(&keys).unwrap(), RopeKind::Yarn(expected));
        let error = kind(&[of_type(Text("longrope".into()))]).unwrap_err().to_string();
        assert!(error.contains("`longrope` (`llama.rope.scaling.type`) is not implemented"), "{error}");
    }
}
