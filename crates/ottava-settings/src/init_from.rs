//! The adapter that a run starts from.

use crate::RunConfig;
use ottava_checkpoint::AdapterFolder;
use ottava_checkpoint::adapter::CONFIG_FILE;
use ottava_common::error::{Error, Result};
use ottava_data::{ChatTemplate, Clock, Tokenizer};
use ottava_models::{ConfigFile, decoder_config};
use ottava_recipe::lora::Lora;
use std::path::Path;

impl RunConfig {
    /// Adds the settings of the adapter that the run starts from. The adapter is in the folder `lora.init_from`, or in `model.path` if this folder
    /// has an adapter; then `model.path` becomes the base model that the adapter names. If `lora.r` is 0, rank, factor and targets are read from the
    /// adapter.
    ///
    /// Errors with [`Error::Config`] if `lora.r` is set and the settings differ from the adapter.
    pub fn with_adapter(mut self) -> Result<RunConfig> {
        let path = &self.model.path;
        if self.lora.init_from.as_os_str().is_empty() {
            if path.join("config.json").is_file() || !path.join(CONFIG_FILE).is_file() {
                return Ok(self);
            }
            self.lora.init_from = path.clone();
        }
        let from = self.lora.init_from.clone();
        if self.model.path == from {
            self.model.path = AdapterFolder::base(&from)?;
        }
        let adapter = AdapterFolder::open(&from)?.lora;
        let modules = [&self.lora.modules_to_save, &adapter.modules_to_save];
        let have_same_modules = are_same_modules(modules);
        let modules = modules.map(|modules| format!("{modules:?}"));
        let differ = |key: &str, own: String, of_adapter: String| {
            Error::Config(format!(
                "`lora.{key}` is {own}, and the adapter {} has {of_adapter}; a run goes on with an adapter as it is: set the same, or leave out the keys of \
                 [lora] that its {CONFIG_FILE} has",
                from.display()
            ))
        };
        if self.lora.r == 0 {
            let [own, of_adapter] = modules;
            if !self.lora.modules_to_save.is_empty() && !have_same_modules {
                return Err(differ("modules_to_save", own, of_adapter));
            }
            return Ok(RunConfig { lora: self.lora.with(adapter), ..self });
        }
        let Lora { r, alpha, use_rslora, use_dora, exceptions, .. } = adapter;
        let own = &self.lora;
        let differs = [
            ("r", own.r.to_string(), r.to_string()),
            ("lora_alpha", own.lora_alpha.to_string(), alpha.to_string()),
            ("use_rslora", own.use_rslora.to_string(), use_rslora.to_string()),
            ("use_dora", own.use_dora.to_string(), use_dora.to_string()),
            ("rank_pattern", format!("{:?}", own.exceptions().ranks), format!("{:?}", exceptions.ranks)),
            ("alpha_pattern", format!("{:?}", own.exceptions().alphas), format!("{:?}", exceptions.alphas)),
        ];
        let [own_modules, of_adapter] = modules;
        let modules = (!have_same_modules).then_some(("modules_to_save", own_modules, of_adapter));
        match differs.into_iter().find(|(_, own, adapter)| own != adapter).or(modules) {
            Some((key, own, adapter)) => Err(differ(key, own, adapter)),
            None => Ok(self),
        }
    }

    /// Takes the tokenizer and the chat template of the adapter that the run starts from, if `model.tokenizer` is not set and the base model has others,
    /// and the rows of the embedding of the adapter.
    ///
    /// Has the errors of [`Tokenizer::load`], and errors if the base model or the adapter cannot be read.
    pub(super) fn with_texts_of_adapter(mut self) -> Result<RunConfig> {
        let (from, base) = (&self.lora.init_from, &self.model.path);
        if from.as_os_str().is_empty() || !base.is_dir() {
            return Ok(self);
        }
        let sizes = decoder_config(&ConfigFile::read(base)?)?;
        let own = sizes.vocabulary;
        let rows = AdapterFolder::open(from)?.on(sizes).vocabulary;
        let takes = self.model.tokenizer.as_os_str().is_empty() && has_other_texts(from, base, rows)?;
        self.tokenizer.rows_of_adapter = if rows > own { rows } else { 0 };
        if takes {
            self.model.tokenizer = self.lora.init_from.clone();
        }
        Ok(self)
    }
}

/// Returns whether the ends of names of a run and of an adapter select the same modules. An adapter of a larger model has whole names.
fn are_same_modules([own, of_adapter]: [&Vec<String>; 2]) -> bool {
    let selects = |end: &String, module: &String| module.ends_with(end.as_str());
    of_adapter.iter().all(|module| own.iter().any(|end| selects(end, module)))
        && own.iter().all(|end| of_adapter.iter().any(|module| selects(end, module)))
}

/// Returns whether the folder of an adapter has a tokenizer whose tokens fit these `rows`, and other tokens or another chat template than the folder
/// `base`.
fn has_other_texts(adapter: &Path, base: &Path, rows: usize) -> Result<bool> {
    let [of_adapter, of_base] = [adapter, base].map(|folder| folder.join("tokenizer.json"));
    if !of_adapter.is_file() {
        return Ok(false);
    }
    let tokenizer = Tokenizer::load(adapter)?;
    if tokenizer.check_fits(rows).is_err() {
        return Ok(false);
    }
    if !of_base.is_file() || !tokenizer.has_tokens_of(&Tokenizer::load(base)?) {
        return Ok(true);
    }
    let template = |folder: &Path| -> Result<Option<String>> {
        Ok(ChatTemplate::load(folder, None, Clock::Fixed)?.map(|template| template.source().to_string()))
    };
    let own = template(adapter)?;
    Ok(own.is_some() && own != template(base)?)
}
