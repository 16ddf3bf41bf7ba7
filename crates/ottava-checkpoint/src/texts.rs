//! The tokenizer and the chat template of a model with an adapter.

use ottava_common::error::Result;
use ottava_data::{ChatTemplate, Clock, Tokenizer};
use std::path::{Path, PathBuf};

/// The names of files that have a tokenizer.
const TOKENIZERS: [&str; 2] = ["tokenizer.json", "tiktoken.model"];

/// The tokenizer of a model, and the folder of its chat template.
pub struct Texts {
    /// The tokenizer. Generated texts end at all tokens that end texts of the base model or of the adapter.
    pub tokenizer: Tokenizer,
    /// The folder with the chat template.
    pub template: PathBuf,
}

impl Texts {
    /// Returns the tokenizer and the folder of the chat template for the model of the folder `base` with the adapter of the folder `adapter`. The
    /// tokenizer of the adapter is used if its tokens fit a `vocabulary` of this size. Then its chat template is used, too. What the adapter does not
    /// have comes from the base.
    ///
    /// Has the errors of [`Tokenizer::load`] and [`ChatTemplate::load`].
    pub fn of(base: &Path, adapter: Option<&Path>, vocabulary: usize) -> Result<Texts> {
        let of_adapter = adapter.map(|adapter| Texts::of_adapter(base, adapter, vocabulary)).transpose()?.flatten();
        match of_adapter {
            Some(texts) => Ok(texts),
            None => Ok(Texts { tokenizer: Tokenizer::load(base)?, template: base.to_path_buf() }),
        }
    }

    /// Like [`Texts::of`]. Returns `None` if the folder `adapter` has no tokenizer that fits.
    pub(super) fn of_adapter(base: &Path, adapter: &Path, vocabulary: usize) -> Result<Option<Texts>> {
        if !has_tokenizer(adapter) {
            return Ok(None);
        }
        let tokenizer = Tokenizer::load(adapter)?;
        if let Err(error) = tokenizer.check_fits(vocabulary) {
            tracing::warn!("{}: {error}; the tokenizer of the base model is used", adapter.display());
            return Ok(None);
        }
        let tokenizer = match has_tokenizer(base) {
            true => tokenizer.with_ends_of(&Tokenizer::load(base)?),
            false => tokenizer,
        };
        let has_template = ChatTemplate::load(adapter, None, Clock::Fixed)?.is_some();
        Ok(Some(Texts { tokenizer, template: if has_template { adapter } else { base }.to_path_buf() }))
    }
}

/// Returns whether `folder` has a tokenizer.
pub(super) fn has_tokenizer(folder: &Path) -> bool {
    TOKENIZERS.iter().any(|name| folder.join(name).is_file())
}
