//! `config.json` from the arguments of a training run of Megatron, which its checkpoints hold.

use crate::convert::torch::TorchFile;
use crate::convert::torch::pickle::{Id, Node};
use crate::error::Result;
use serde_json::{Map, Value, json};

/// What a checkpoint without arguments is told.
pub const NO_ARGS: &str = "it has no arguments of its run; name a Hugging Face folder with config.json (--like)";

/// The arguments of a run.
pub struct Args<'a> {
    file: &'a TorchFile,
    args: Id,
}

impl<'a> Args<'a> {
    /// The arguments in the dictionary `state` of a file.
    ///
    /// Errors when it has none.
    pub fn of(file: &'a TorchFile, state: Id) -> Result<Args<'a>> {
        let args = file.pickle.get(state, "args").map(|args| Args { file, args });
        args.filter(|args| args.value("num_layers").is_number()).ok_or_else(|| file.error(NO_ARGS))
    }

    /// An argument; null if it is none of None, a number or a text.
    fn value(&self, name: &str) -> Value {
        let pickle = &self.file.pickle;
        match pickle.get(self.args, name).map(|id| pickle.node(id)) {
            Some(Node::Bool(value)) => json!(value),
            Some(Node::Int(value)) => json!(value),
            Some(Node::Float(value)) => json!(value),
            Some(Node::Text(value)) => json!(value),
            _ => Value::Null,
        }
    }

    /// `config.json` of the model, whose table has `vocabulary` tokens unless an argument says how many are no padding.
    ///
    /// Errors for models that are not Llama, Qwen2 or Qwen3.
    pub fn config(&self, vocabulary: usize) -> Result<Map<String, Value>> {
        let flag = |name: &str| self.value(name) == json!(true);
        let needed = |name: &str| match self.value(name) {
            Value::Number(value) => Ok(Value::Number(value)),
            _ => Err(self
                .file
                .error(&format!("its arguments have no number `{name}`; name a folder with config.json (--like)"))),
        };
        for (name, expected) in
            [("normalization", json!("RMSNorm")), ("swiglu", json!(true)), ("position_embedding_type", json!("rope"))]
        {
            let found = self.value(name);
            if found != expected {
                return Err(self
                    .file
                    .error(&format!("its argument `{name}` is {found}; models with {expected} are converted")));
            }
        }
        let percent = self.value("rotary_percent").as_f64().unwrap_or(1.0);
        let differs = ["add_bias_linear", "apply_layernorm_1p", "multi_latent_attention", "num_experts"];
        let differs = differs.into_iter().find(|name| !matches!(self.value(name), Value::Null | Value::Bool(false)));
        if let Some(name) = differs.or((percent != 1.0).then_some("rotary_percent")) {
            return Err(self
                .file
                .error(&format!("its argument `{name}` is {}, which is not converted", self.value(name))));
        }
        let (architecture, model_type) = match (flag("qk_layernorm"), flag("add_qkv_bias")) {
            (true, false) => ("Qwen3ForCausalLM", "qwen3"),
            (false, true) => ("Qwen2ForCausalLM", "qwen2"),
            (false, false) => ("LlamaForCausalLM", "llama"),
            (true, true) => {
                return Err(self.file.error("it has both `qk_layernorm` and `add_qkv_bias`, as no known family"));
            }
        };
        let heads = needed("num_attention_heads")?;
        let groups = if flag("group_query_attention") { needed("num_query_groups")? } else { heads.clone() };
        let epsilon = [self.value("norm_epsilon"), self.value("layernorm_epsilon")].into_iter().find(Value::is_number);
        let vocabulary =
            self.value("vocab_size").as_u64().filter(|n| *n <= vocabulary as u64).unwrap_or(vocabulary as u64);
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
            "rms_norm_eps": epsilon.unwrap_or(json!(1e-5)),
            "rope_theta": self.value("rotary_base").as_f64().unwrap_or(10_000.0),
            "tie_word_embeddings": !flag("untie_embeddings_and_output_weights"),
        });
        let Value::Object(mut config) = config else { unreachable!("an object was made above") };
        if flag("use_rope_scaling") {
            let scaling = json!({"rope_type": "llama3", "factor": self.value("rope_scaling_factor").as_f64().unwrap_or(8.0),
                "low_freq_factor": 1.0, "high_freq_factor": 4.0, "original_max_position_embeddings": 8192});
            config.insert("rope_scaling".into(), scaling);
        }
        Ok(config)
    }
}
