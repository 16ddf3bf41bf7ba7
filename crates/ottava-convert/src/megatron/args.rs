//! The arguments of a Megatron run, which its checkpoints store. `config.json` is derived from them or compared with them.

use super::arguments::{FOLLOWED, MODEL_WORDS, Must, OTHER, OTHER_BEGINNINGS, RULES, Rule, When};
use crate::torch::TorchFile;
use crate::torch::{Id, Node};
use ottava_common::error::{Error, Result};
use ottava_models::DecoderConfig;
use serde_json::{Map, Value, json};

/// The error for a checkpoint without arguments.
pub const NO_ARGS: &str = "it has no arguments of its run; name a Hugging Face folder with config.json (--like)";

/// The arguments of a run.
pub struct Args<'a> {
    file: &'a TorchFile,
    args: Id,
}

impl<'a> Args<'a> {
    /// Returns the arguments in the dictionary `state` of a file, if it has arguments.
    pub fn read(file: &'a TorchFile, state: Id) -> Option<Args<'a>> {
        let args = file.pickle.get(state, "args").map(|args| Args { file, args });
        args.filter(|args| args.value("num_layers").is_some_and(|value| value.is_number()))
    }

    /// Returns the argument of this name, if there is one. A value that JSON cannot represent becomes a text.
    fn value(&self, name: &str) -> Option<Value> {
        self.file.pickle.get(self.args, name).map(|id| self.json(id))
    }

    fn json(&self, id: Id) -> Value {
        match self.file.pickle.node(id) {
            Node::None => Value::Null,
            Node::Bool(value) => json!(value),
            Node::Int(value) => json!(value),
            Node::Float(value) => json!(value),
            Node::Text(value) => json!(value),
            // No argument that is compared has nested lists.
            Node::List(items) => items.iter().map(|item| self.scalar(*item)).collect(),
            _ => json!("an object"),
        }
    }

    fn scalar(&self, id: Id) -> Value {
        match self.file.pickle.node(id) {
            Node::List(_) => json!("a list"),
            _ => self.json(id),
        }
    }

    fn is_set(&self, name: &str) -> bool {
        self.value(name) == Some(json!(true))
    }

    /// Whether rotary positions rotate neighbouring rows of a head, and not its two halves.
    pub fn rotary_interleaved(&self) -> bool {
        self.is_set("rotary_interleaved")
    }

    /// Compares the arguments with a model of these `sizes`. If they are `given`, the sizes were read from a `config.json`. Returns the unknown
    /// arguments that may change the model, each with its value.
    ///
    /// Errors with [`Error::Model`], which names the first argument that does not match.
    pub fn check(&self, sizes: &DecoderConfig, given: bool) -> Result<Vec<String>> {
        let problem: Option<String> = RULES.iter().find_map(|rule| self.problem(rule, sizes, given));
        match problem {
            Some(problem) => Err(self.error(&problem)),
            None => Ok(self.unknown()),
        }
    }

    /// Returns the problem of the rule's argument, if it has one.
    fn problem(&self, rule: &Rule, sizes: &DecoderConfig, given: bool) -> Option<String> {
        match rule.when {
            When::With(flag) if !self.is_set(flag) => return None,
            When::Without(flag) if self.is_set(flag) => return None,
            _ => {}
        }
        if let Must::State(expected) = rule.must {
            let (name, found) = (rule.names[0], self.value(rule.names[0]).unwrap_or_default());
            return (found != parsed(expected))
                .then(|| format!("its argument `{name}` is {found}; models with {expected} are converted"));
        }
        rule.names.iter().find_map(|name| {
            let found = self.value(name)?;
            let (key, expected) = match rule.must {
                Must::Be(values) => {
                    let wrong = !values.iter().any(|value| equal(&parsed(value), &found));
                    return wrong.then(|| format!("its argument `{name}` is {found}, which is not converted"));
                }
                Must::Equal(key, expected) if !equal(&expected(sizes), &found) => (key, expected(sizes)),
                // An argument that is not a number is accepted. Then the rows of the embedding give the number.
                Must::AtMost(key, expected) if found.as_f64() > expected(sizes).as_f64() => (key, expected(sizes)),
                _ => return None,
            };
            Some(match given {
                true => format!(
                    "its argument `{name}` is {found}, and config.json of --like makes it {expected} by {key}, which is another model; correct \
                     that config.json, if the argument is right"
                ),
                false => format!("its argument `{name}` is {found}, which is not converted (only {expected} is)"),
            })
        })
    }

    /// Returns the unknown arguments whose names suggest that they affect the model, with their values, unless they are off.
    fn unknown(&self) -> Vec<String> {
        let known = |name: &str| {
            RULES.iter().any(|rule| rule.names.contains(&name))
                || FOLLOWED.contains(&name)
                || OTHER.contains(&name)
                || OTHER_BEGINNINGS.iter().any(|beginning| name.starts_with(beginning))
        };
        let pickle = &self.file.pickle;
        let entries = pickle.entries(self.args).unwrap_or_default();
        let all = entries.iter().filter_map(|(name, value)| Some((pickle.text(*name)?, self.json(*value))));
        let unknown = all.filter(|(name, value)| {
            let neutral = [json!(null), json!(false), json!(0), json!(0.0), json!(""), json!([])];
            MODEL_WORDS.iter().any(|word| name.contains(word)) && !known(name) && !neutral.contains(value)
        });
        unknown.map(|(name, value)| format!("`{name}` = {value}")).collect()
    }

    /// Returns the `config.json` of the model. The vocabulary is `vocab_size` of the arguments, or else the `vocabulary` rows of the embedding with
    /// padding. [`Args::check`] refuses arguments that `config.json` cannot express.
    ///
    /// Errors if a size is missing.
    pub fn config(&self, vocabulary: usize) -> Result<Map<String, Value>> {
        let needed =
            |name: &str| match self.value(name) {
                Some(Value::Number(value)) => Ok(Value::Number(value)),
                _ => Err(self
                    .error(&format!("its arguments have no number `{name}`; name a folder with config.json (--like)"))),
            };
        let (architecture, model_type) = match (self.is_set("qk_layernorm"), self.is_set("add_qkv_bias")) {
            (true, false) => ("Qwen3ForCausalLM", "qwen3"),
            (false, true) => ("Qwen2ForCausalLM", "qwen2"),
            (false, false) => ("LlamaForCausalLM", "llama"),
            (true, true) => {
                return Err(self.error("it has both `qk_layernorm` and `add_qkv_bias`, as no known family"));
            }
        };
        let heads = needed("num_attention_heads")?;
        let groups = if self.is_set("group_query_attention") { needed("num_query_groups")? } else { heads.clone() };
        let number =
            |names: &[&str], default: f64| names.iter().find_map(|name| self.value(name)?.as_f64()).unwrap_or(default);
        let stated = self.value("vocab_size").and_then(|value| value.as_u64());
        let vocabulary = stated.filter(|n| *n <= vocabulary as u64).unwrap_or(vocabulary as u64);
        let config = json!({
            "architectures": [architecture],
            "model_type": model_type,
            "vocab_size": vocabulary,
            "hidden_size": needed("hidden_size")?,
            "intermediate_size": needed("ffn_hidden_size")?,
            "num_hidden_layers": needed("num_layers")?,
            "num_attention_heads": heads,
            "num_key_value_heads": groups,
            "head_dim": needed("kv_channels")?,
            "max_position_embeddings": needed("max_position_embeddings")?,
            "hidden_act": "silu",
            "rms_norm_eps": number(&["norm_epsilon", "layernorm_epsilon"], 1e-5),
            "rope_theta": number(&["rotary_base"], 10_000.0),
            "tie_word_embeddings": !self.is_set("untie_embeddings_and_output_weights"),
        });
        let Value::Object(mut config) = config else { unreachable!("an object was made above") };
        if self.is_set("use_rope_scaling") {
            // The factor of Megatron's GPTModel. Megatron's training script does not pass another (`rope_scaling_factor`).
            let scaling = json!({"rope_type": "llama3", "factor": 8.0, "low_freq_factor": 1.0, "high_freq_factor": 4.0,
                "original_max_position_embeddings": 8192});
            config.insert("rope_scaling".into(), scaling);
        }
        Ok(config)
    }

    fn error(&self, text: &str) -> Error {
        self.file.error(text)
    }
}

/// Parses a value of a table.
fn parsed(text: &str) -> Value {
    serde_json::from_str(text).expect("tables hold JSON")
}

/// Whether two values are equal. 10000 equals 10000.0, and a flag that is not set equals None.
fn equal(a: &Value, b: &Value) -> bool {
    match (a.as_f64(), b.as_f64()) {
        (Some(a), Some(b)) => a == b || (a - b).abs() <= 1e-6 * a.abs(),
        _ => a == b || [a, b].iter().all(|value| matches!(value, Value::Null | Value::Bool(false))),
    }
}
