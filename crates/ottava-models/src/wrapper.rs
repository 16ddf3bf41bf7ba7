//! Text models inside larger models: a folder of a vision-language model has the sizes of its text model in `text_config`, and the tensors of the
//! text model under a prefix. Only the text model is built. `ottava-checkpoint` copies all other tensors unchanged.
//!
//! Positions of text alone are equal in all dimensions of multimodal rotary positions ("mrope"), so they are plain rotary positions.

use crate::ConfigFile;
use ottava_common::error::Result;
use serde_json::{Value, json};
use std::borrow::Cow;

/// A model that contains a text model.
struct Wrapper {
    /// The name in `model_type`.
    model_type: &'static str,
    /// The name in `architectures`.
    architecture: &'static str,
    /// The `model_type` of the text model if `text_config` does not name it.
    text: &'static str,
    /// Whether head and embedding are tied if the file lacks `tie_word_embeddings`.
    tied: bool,
    /// Whether `tie_word_embeddings` of the text model ties them too.
    text_ties: bool,
}

/// All such models. The values of missing keys are the defaults of the configuration classes of transformers 5.
const WRAPPERS: &[Wrapper] = &[
    Wrapper {
        model_type: "qwen2_5_vl",
        architecture: "Qwen2_5_VLForConditionalGeneration",
        text: "qwen2_5_vl_text",
        tied: false,
        text_ties: true,
    },
    Wrapper {
        model_type: "qwen3_vl",
        architecture: "Qwen3VLForConditionalGeneration",
        text: "qwen3_vl_text",
        tied: false,
        text_ties: false,
    },
    Wrapper {
        model_type: "qwen3_vl_moe",
        architecture: "Qwen3VLMoeForConditionalGeneration",
        text: "qwen3_vl_moe_text",
        tied: false,
        text_ties: false,
    },
    Wrapper {
        model_type: "qwen3_5",
        architecture: "Qwen3_5ForConditionalGeneration",
        text: "qwen3_5_text",
        tied: false,
        text_ties: false,
    },
    Wrapper {
        model_type: "qwen3_5_moe",
        architecture: "Qwen3_5MoeForConditionalGeneration",
        text: "qwen3_5_moe_text",
        tied: false,
        text_ties: false,
    },
    Wrapper {
        model_type: "mistral3",
        architecture: "Mistral3ForConditionalGeneration",
        text: "mistral",
        tied: true,
        text_ties: false,
    },
    Wrapper {
        model_type: "gemma3",
        architecture: "Gemma3ForConditionalGeneration",
        text: "gemma3_text",
        tied: true,
        text_ties: false,
    },
    Wrapper {
        model_type: "gemma4",
        architecture: "Gemma4ForConditionalGeneration",
        text: "gemma4_text",
        tied: true,
        text_ties: false,
    },
    Wrapper {
        model_type: "llama4",
        architecture: "Llama4ForConditionalGeneration",
        text: "llama4_text",
        tied: false,
        text_ties: false,
    },
    Wrapper {
        model_type: "kimi_k25",
        architecture: "Kimi_K25ForConditionalGeneration",
        text: "deepseek_v3",
        tied: true,
        text_ties: false,
    },
];

/// The key of the text model's settings.
const TEXT: &str = "text_config";
const TIED: &str = "tie_word_embeddings";
/// The key of the format of all weights of the folder.
const QUANTIZATION: &str = "quantization_config";

/// Returns the wrapper that `model_type` names, or `architectures` if the file has no `model_type`.
fn wrapper(file: &ConfigFile) -> Result<Option<&'static Wrapper>> {
    let name = match file.nullable::<String>("model_type")? {
        Some(name) => name,
        None => file.architecture()?.unwrap_or_default(),
    };
    Ok(WRAPPERS.iter().find(|wrapper| wrapper.model_type == name || wrapper.architecture == name))
}

/// Returns the `model_type` of each wrapper, for messages.
pub(super) fn names() -> impl Iterator<Item = &'static str> {
    WRAPPERS.iter().map(|wrapper| wrapper.model_type)
}

impl ConfigFile {
    /// Returns whether the file describes a larger model that contains a text model.
    ///
    /// Errors if `model_type` or `architectures` is not of its kind.
    pub fn is_wrapper(&self) -> Result<bool> {
        wrapper(self).map(|wrapper| wrapper.is_some())
    }

    /// Returns the settings of the text model: the file itself, or `text_config` of a larger model. The first folders of Qwen2.5-VL have the keys of
    /// `text_config` beside the other keys. As in transformers, `tie_word_embeddings` of the larger model counts.
    ///
    /// Errors if `text_config` is not an object.
    pub fn text_model(&self) -> Result<Cow<'_, ConfigFile>> {
        let Some(wrapper) = wrapper(self)? else { return Ok(Cow::Borrowed(self)) };
        let text = self.section(TEXT)?;
        let mut values = text.as_ref().unwrap_or(self).values().clone();
        if text.is_none() || !values.contains_key("model_type") {
            values.insert("model_type".into(), json!(wrapper.text));
        }
        values.shift_remove("architectures");
        let of_text = wrapper.text_ties && matches!(values.get(TIED), Some(Value::Bool(true)));
        values.insert(TIED.into(), json!(of_text || self.optional(TIED, wrapper.tied)?));
        if let Some(quantization) = self.values().get(QUANTIZATION) {
            values.entry(QUANTIZATION).or_insert_with(|| quantization.clone());
        }
        Ok(Cow::Owned(text.as_ref().unwrap_or(self).with_values(values)))
    }
}

/// The prefixes that a folder puts before the names of a text model's tensors, in place of `model.` and `lm_head.`.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct TextNames {
    decoder: &'static str,
    head: &'static str,
}

/// The prefixes of a text model's own folder.
const DECODER: &str = "model.";
const HEAD: &str = "lm_head.";

impl TextNames {
    /// The names of a text model that is not part of a larger model.
    pub const PLAIN: TextNames = TextNames { decoder: DECODER, head: HEAD };
    /// The names of modules of transformers, which name adapters of PEFT.
    pub const MODULES: TextNames = TextNames { decoder: "model.language_model.", head: HEAD };
    /// The names in folders of LLaVA's form, such as Mistral 3 and Gemma 3.
    const NESTED: TextNames = TextNames { decoder: "language_model.model.", head: "language_model.lm_head." };
    /// All forms of folders.
    const ALL: [TextNames; 3] = [TextNames::MODULES, TextNames::NESTED, TextNames::PLAIN];

    /// Returns the prefixes that a folder with tensors of these names has, or `None` if no prefix leads to an embedding.
    pub fn of_folder(has: impl Fn(&str) -> bool) -> Option<TextNames> {
        TextNames::ALL.into_iter().find(|names| has(&format!("{}embed_tokens.weight", names.decoder)))
    }

    /// Returns the name in the folder of the text model's tensor `name`.
    pub fn stored(&self, name: &str) -> String {
        match (name.strip_prefix(DECODER), name.strip_prefix(HEAD)) {
            (Some(rest), _) => format!("{}{rest}", self.decoder),
            (None, Some(rest)) => format!("{}{rest}", self.head),
            (None, None) => name.to_string(),
        }
    }

    /// Returns the text model's name of the folder's tensor `stored`, or `None` if the tensor is of another part of the model.
    pub fn of_text(&self, stored: &str) -> Option<String> {
        let of_decoder = stored.strip_prefix(self.decoder).map(|rest| format!("{DECODER}{rest}"));
        of_decoder.or_else(|| Some(format!("{HEAD}{}", stored.strip_prefix(self.head)?)))
    }

    /// Returns the text model's name of a module or tensor that has one of the forms of names, and `name` itself if it has none.
    pub fn without_prefix(name: &str) -> String {
        let nested = [TextNames::MODULES, TextNames::NESTED].into_iter().find_map(|names| names.of_text(name));
        nested.unwrap_or_else(|| name.to_string())
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    fn file(values: Value) -> ConfigFile {
        ConfigFile::from_values("config.json", values.as_object().unwrap().clone())
    }

    #[test]
    fn the_larger_model_decides_whether_the_head_is_tied() {
        let tied = |name: &str, root: Value, text: Value| {
            let mut values = json!({"model_type": name, "text_config": {}});
            for (object, tied) in [("/text_config", text), ("", root)] {
                if !tied.is_null() {
                    values.pointer_mut(object).unwrap()[TIED] = tied;
                }
            }
            file(values).text_model().unwrap().required::<bool>(TIED).unwrap()
        };
        let none = || Value::Null;
        assert!(tied("mistral3", none(), json!(false)) && !tied("mistral3", json!(false), json!(true)));
        assert!(!tied("qwen3_vl", json!(false), json!(true)) && !tied("qwen3_vl", none(), json!(true)));
        assert!(tied("qwen2_5_vl", none(), json!(true)) && !tied("qwen2_5_vl", none(), none()));
        assert!(tied("gemma3", none(), none()));
    }

    #[test]
    fn keys_of_the_text_model_may_be_beside_the_others() {
        let nested =
            file(json!({"model_type": "mistral3", "text_config": {"model_type": "ministral3", "vocab_size": 7}}));
        let text = nested.text_model().unwrap();
        assert_eq!(text.required::<String>("model_type").unwrap(), "ministral3");
        let old = file(json!({"model_type": "qwen2_5_vl", "vocab_size": 7, "architectures": ["X"]}));
        let text = old.text_model().unwrap();
        assert_eq!(text.required::<String>("model_type").unwrap(), "qwen2_5_vl_text");
        assert_eq!((text.required::<usize>("vocab_size").unwrap(), text.architecture().unwrap()), (7, None));
        let plain = file(json!({"model_type": "qwen2", "text_config": 3}));
        assert!(!plain.is_wrapper().unwrap() && plain.text_model().is_ok());
        assert!(file(json!({"model_type": "gemma3", "text_config": 3})).text_model().is_err());
    }

    #[test]
    fn each_form_of_names_is_inverted() {
        let [weight, head] = ["model.layers.0.mlp.up_proj.weight", "lm_head.weight"];
        for (embedding, stored, stored_head) in [
            ("model.embed_tokens.weight", weight, head),
            ("model.language_model.embed_tokens.weight", "model.language_model.layers.0.mlp.up_proj.weight", head),
            (
                "language_model.model.embed_tokens.weight",
                "language_model.model.layers.0.mlp.up_proj.weight",
                "language_model.lm_head.weight",
            ),
        ] {
            let names = TextNames::of_folder(|name| name == embedding).unwrap();
            assert_eq!([names.stored(weight), names.stored(head)], [stored, stored_head]);
            let back = [stored, stored_head].map(|name| names.of_text(name).unwrap());
            assert_eq!(back, [weight, head]);
            assert_eq!([stored, stored_head].map(TextNames::without_prefix), [weight, head]);
            assert_eq!(names.of_text("visual.blocks.0.norm1.weight"), None);
        }
        assert_eq!(TextNames::of_folder(|name| name == "visual.norm.weight"), None);
        assert_eq!(TextNames::MODULES.of_text("model.visual.norm.weight"), None);
    }
}
