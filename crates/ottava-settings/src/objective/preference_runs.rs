//! Checks of the settings of a run on preferences.

use crate::{ObjectiveKind, RunConfig};
use ottava_common::error::{Error, Result};
use ottava_data::{Formatting, Packing};
use ottava_models::{ConfigFile, classifier, is_classifier, reward_model, without_scores};

impl RunConfig {
    /// Resolves `[preference]` and the packing of preferences by the formattings of the files.
    ///
    /// Errors with [`Error::Config`] when a setting does not fit the data.
    pub(crate) fn resolve_preference(&mut self, mut files: impl Iterator<Item = Formatting>) -> Result<()> {
        let Some(kind) = files.find_map(|formatting| formatting.kind().preference()) else {
            return match &self.preference.loss_type {
                None => Ok(()),
                Some(losses) => Err(Error::Config(format!(
                    "`preference.loss_type` is \"{}\", and the data hold no preferences (`chosen` and `rejected`, or `completion` and `label`); set it to \"auto\"",
                    losses.names()
                ))),
            };
        };
        // A folder that cannot be read is an error where its sizes are.
        let is_reward_model = ConfigFile::read(&self.model.path).and_then(|file| is_classifier(&file));
        let unresolved = self.clone();
        self.preference.resolve(kind, &self.lora, is_reward_model.unwrap_or(false))?;
        // Settings that do not go together with the loss that "auto" stands for.
        self.expect_no_more_problems_than(&unresolved)?;
        if self.preference.trains_reward_model() && !self.generation.prompts.is_empty() {
            return Err(Error::Config(
                "`generation.prompts` is set, and a reward model writes no text; remove the prompts".into(),
            ));
        }
        if self.data.datasets.len() > 1 {
            return Err(Error::Config(
                "[[data.datasets]] has several sets, and the data are preferences, which are not mixed; name all files in `data.train_files`".into(),
            ));
        }
        match self.data.packing {
            Packing::Auto | Packing::None => self.data.packing = Packing::None,
            Packing::Wrapped | Packing::Bfd => {
                return Err(Error::Config(
                    "`data.packing` packs several documents into a row, and the data are preferences, each completion of which has a row of its own; \
                     set it to \"none\" or \"auto\""
                        .into(),
                ));
            }
        }
        // Padding comes after the only document of a row, where causal attention does not see it.
        self.data.document_mask.get_or_insert(false);
        Ok(())
    }

    /// `config.json` of the model that is trained: the file in `model.path`, or the file of a classifier or a reward model that starts from
    /// `model.path`. `padding` is the padding token of the tokenizer, for these models.
    pub fn model_config(&self, padding: Option<u32>) -> Result<ConfigFile> {
        let file = self.tokenizer.apply(ConfigFile::read(&self.model.path)?)?;
        match self.objective() {
            ObjectiveKind::Classification => classifier(&file, padding, &self.classification.labels()),
            ObjectiveKind::Reward => reward_model(&file, padding),
            _ if !is_classifier(&file)? => without_scores(&file),
            _ => Err(file.error(
                "this is a reward model or a classifier: a reward model is trained on pairs of preferences (`chosen` and `rejected`) by \
                 `preference.loss_type` = \"bradley_terry\" or \"auto\", and a classifier on texts with labels by `classification.problem_type`",
            )),
        }
    }
}
