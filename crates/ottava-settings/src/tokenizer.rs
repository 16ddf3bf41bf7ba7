//! The table `[tokenizer]`.

use crate::pairs::Pairs;
use ottava_common::error::{Error, Result};
use ottava_data::tokenizer_changes::ChangedTokenizer;
use ottava_data::{BUILT_IN, BuiltInTemplate};
use ottava_models::{ConfigFile, DecoderConfig, decoder_config};
use schemars::JsonSchema;
use serde::{Deserialize, Serialize};
use serde_json::json;

/// The `[tokenizer]` table: changes to the tokenizer of the model, which checkpoints contain.
#[derive(Clone, Debug, PartialEq, Serialize, Deserialize, JsonSchema)]
#[serde(deny_unknown_fields, default)]
pub struct TokenizerConfig {
    /// Tokens to add to the tokenizer. Text that has such a token becomes this token. Embedding and head get a row for each new token, the mean of
    /// the other rows. With adapters, lora.modules_to_save must have both.
    pub added_tokens: Vec<String>,
    /// Special tokens to add, such as ["<|im_start|>", "<|im_end|>"]: like added_tokens, but generated texts can leave them out.
    pub added_special_tokens: Vec<String>,
    /// Special tokens by name: bos_token, eos_token, unk_token, sep_token, pad_token, cls_token, mask_token. Missing tokens are added. A new
    /// eos_token also ends generated texts. Example: { eos_token = "<|im_end|>" }.
    pub special_tokens: Pairs<String>,
    /// A built-in chat template that replaces the template of the folder: "chatml", "llama3", "gemma", "phi3", "zephyr", "vicuna" or "alpaca";
    /// "" keeps the template of the folder. The token that ends a turn becomes the eos_token.
    pub chat_template: String,
    /// Rows of embedding and head are padded to a multiple of this number; 1 adds no padding.
    #[schemars(range(min = 1))]
    pub pad_vocab_to_multiple_of: usize,
    /// The changed files of the tokenizer, once they are written.
    #[serde(skip)]
    pub changed: Option<ChangedTokenizer>,
    /// The rows of the embedding of the adapter that the run starts from; 0 if the run starts from no adapter, or if the base has as many.
    #[serde(skip)]
    pub rows_of_adapter: usize,
}

impl Default for TokenizerConfig {
    fn default() -> TokenizerConfig {
        TokenizerConfig {
            added_tokens: Vec::new(),
            added_special_tokens: Vec::new(),
            special_tokens: Pairs::default(),
            chat_template: String::new(),
            pad_vocab_to_multiple_of: 1,
            changed: None,
            rows_of_adapter: 0,
        }
    }
}

impl TokenizerConfig {
    /// Lists invalid values, one sentence each.
    pub(super) fn problems(&self) -> Vec<String> {
        let mut problems = Vec::new();
        let multiple = self.pad_vocab_to_multiple_of;
        if !(1..=1 << 20).contains(&multiple) {
            problems.push(format!(
                "`tokenizer.pad_vocab_to_multiple_of` is {multiple}; it is a number from 1 to 1,048,576"
            ));
        }
        if !self.chat_template.is_empty() && BuiltInTemplate::find(&self.chat_template).is_none() {
            let names: Vec<_> = BUILT_IN.iter().map(|template| format!("\"{}\"", template.name)).collect();
            problems.push(format!(
                "`tokenizer.chat_template` is \"{}\"; built-in templates are {}; leave it out to use the template of the tokenizer's folder, or name a file in `data.chat.chat_template_path`",
                self.chat_template,
                names.join(", ")
            ));
        }
        problems
    }

    /// Returns whether the tokenizer differs from the tokenizer of the folder.
    pub(super) fn changes(&self) -> bool {
        let TokenizerConfig {
            added_tokens,
            added_special_tokens,
            special_tokens: Pairs(special_tokens),
            chat_template,
            ..
        } = self;
        !(added_tokens.is_empty()
            && added_special_tokens.is_empty()
            && special_tokens.is_empty()
            && chat_template.is_empty())
    }

    /// Returns the keys of `config.json` for special tokens that changed, with their ids.
    pub fn ids(&self) -> &[(&'static str, u32)] {
        self.changed.as_ref().map_or(&[], |changed| &changed.ids)
    }

    /// Returns `file` with the rows of embedding and head that the tokens need, and with the ids of special tokens that changed.
    ///
    /// Errors with [`Error::Model`] if the rows cannot change: in a vision-language folder, or beside per-layer embeddings.
    pub(super) fn apply(&self, file: ConfigFile) -> Result<ConfigFile> {
        if !self.changes() && self.pad_vocab_to_multiple_of == 1 && self.rows_of_adapter == 0 {
            return Ok(file);
        }
        let sizes = decoder_config(&file)?;
        let tokens = self.changed.as_ref().map_or(0, |changed| changed.vocabulary);
        let rows =
            tokens.max(sizes.vocabulary).max(self.rows_of_adapter).next_multiple_of(self.pad_vocab_to_multiple_of);
        let mut values = file.values().clone();
        if rows != sizes.vocabulary {
            if file.is_wrapper()? || sizes.embedding.of_layers.is_some() {
                return Err(file.error(&format!(
                    "[tokenizer] makes {rows} rows of the {} rows of the embedding, which is implemented for text models without per-layer embeddings; \
                     use tokens that the tokenizer has",
                    sizes.vocabulary
                )));
            }
            values.insert("vocab_size".into(), json!(rows));
        }
        for (key, id) in self.ids() {
            values.insert(key.to_string(), json!(id));
        }
        Ok(file.with_values(values))
    }

    /// Returns whether the run has tokens or rows of the embedding that its model folder does not have.
    pub fn adds_rows(&self) -> bool {
        self.pad_vocab_to_multiple_of > 1 || self.changed.as_ref().is_some_and(|changed| !changed.new_tokens.is_empty())
    }

    /// Errors with [`Error::Config`] if adapters would leave the rows of new tokens as they are, also of tokens whose rows the folder has. `sizes` are the
    /// sizes of the run, and `of_folder` the sizes of the model's folder. A classifier has no head with a row for each token.
    pub(super) fn expect_trained_rows(&self, sizes: &DecoderConfig, of_folder: &DecoderConfig) -> Result<()> {
        let Some(lora) = &sizes.lora else { return Ok(()) };
        let names = sizes.stream.names;
        let modules = if sizes.head.labels.is_some() { &[names.embedding][..] } else { &[names.embedding, names.head] };
        let new = self.changed.as_ref().map_or(&[][..], |changed| &changed.new_tokens);
        let rows = sizes.vocabulary - of_folder.vocabulary;
        if modules.iter().all(|module| lora.saves(module)) || rows == 0 && new.is_empty() {
            return Ok(());
        }
        let last: Vec<_> =
            modules.iter().map(|module| format!("\"{}\"", ottava_recipe::lora::last_name(module))).collect();
        let what = match new {
            [] => format!("{rows} rows"),
            [first, ..] => format!("{} tokens such as {first:?}", new.len()),
        };
        Err(Error::Config(format!(
            "[tokenizer] adds {what} to embedding and head, which are frozen beside adapters; set `lora.modules_to_save = [{}]`, or use tokens that the tokenizer has",
            last.join(", ")
        )))
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use ottava_recipe::lora::Lora;
    use std::path::Path;

    #[test]
    fn new_tokens_of_a_reward_model_need_the_embedding_alone() {
        let shape = Path::new(env!("CARGO_MANIFEST_DIR")).join("../../configs/models/llama-110m.json");
        let mut sizes = decoder_config(&ConfigFile::read(&shape).unwrap()).unwrap();
        let changed = ChangedTokenizer {
            folder: "tokens".into(),
            vocabulary: sizes.vocabulary,
            new_tokens: vec!["<x>".into()],
            ids: Vec::new(),
        };
        let tokens = TokenizerConfig { changed: Some(changed), ..TokenizerConfig::default() };
        let of_folder = sizes.clone();
        sizes.lora = Some(Lora { modules_to_save: vec!["embed_tokens".into()], ..Lora::of_no_linear() });
        let check = |sizes: &DecoderConfig| tokens.expect_trained_rows(sizes, &of_folder);
        let error = check(&sizes).unwrap_err().to_string();
        assert!(error.contains("`lora.modules_to_save = [\"embed_tokens\", \"lm_head\"]`"), "{error}");
        sizes.head.labels = Some(1);
        check(&sizes).unwrap();
        sizes.lora = Some(Lora::of_no_linear());
        let error = check(&sizes).unwrap_err().to_string();
        assert!(error.contains("`lora.modules_to_save = [\"embed_tokens\"]`"), "{error}");
    }
}
