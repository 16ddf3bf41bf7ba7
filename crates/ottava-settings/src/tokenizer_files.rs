//! The files of the tokenizer of a run.

use crate::{Pairs, RunConfig, TokenizerConfig};
use ottava_common::error::Result;
use ottava_data::BuiltInTemplate;
use ottava_data::tokenizer_changes::TokenizerChanges;
use std::path::Path;

impl RunConfig {
    /// Returns the path of the tokenizer: the changed files if `[tokenizer]` changes it, else the tokenizer of `[model]`.
    pub fn tokenizer_path(&self) -> &Path {
        match &self.tokenizer.changed {
            Some(changed) => &changed.folder,
            None => self.model.tokenizer_path(),
        }
    }

    /// Writes the files of the changed tokenizer into the folder of the prepared tokens, if `[tokenizer]` changes the tokenizer. A tokenizer that does
    /// not exist here is reported by the command that reads it. A `config.json` as the model has no tokenizer, so a plan of it has no new tokens.
    ///
    /// Has the errors of [`TokenizerChanges::write`].
    pub(super) fn with_tokenizer(mut self) -> Result<RunConfig> {
        let source = self.model.tokenizer_path();
        let is_shape = self.model.path.is_file() && self.model.tokenizer.as_os_str().is_empty();
        if !self.tokenizer.changes() || is_shape || !source.exists() {
            return Ok(self);
        }
        let TokenizerConfig {
            added_tokens,
            added_special_tokens,
            special_tokens: Pairs(special_tokens),
            chat_template,
            ..
        } = &self.tokenizer;
        let chat_template = BuiltInTemplate::find(chat_template);
        let changes = TokenizerChanges { added_tokens, added_special_tokens, special_tokens, chat_template };
        self.tokenizer.changed = Some(changes.write(source, &self.cache_dir())?);
        Ok(self)
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn settings_of_the_tokenizer_that_make_no_sense_are_errors() {
        let problems = |change: &dyn Fn(&mut RunConfig)| {
            let mut run = RunConfig::default();
            run.model.path = "m".into();
            let before = run.problems();
            change(&mut run);
            run.problems().into_iter().filter(|problem| !before.contains(problem)).collect::<Vec<_>>().join("\n")
        };
        let text = problems(&|run| run.tokenizer.chat_template = "qwen3".into());
        assert!(
            text.contains("built-in templates are \"chatml\", \"llama3\", ")
                && text.contains("`data.chat.chat_template_path`"),
            "{text}"
        );
        let text = problems(&|run| {
            run.tokenizer.chat_template = "chatml".into();
            run.data.chat.chat_template_path = "a.jinja".into();
        });
        assert!(text.contains("are both set, and a run has one chat template"), "{text}");
        let text = problems(&|run| run.tokenizer.pad_vocab_to_multiple_of = 0);
        assert!(text.contains("`tokenizer.pad_vocab_to_multiple_of` is 0"), "{text}");
        assert_eq!(problems(&|run| run.tokenizer.chat_template = "alpaca".into()), "");
    }
}
