//! The inputs that a run reads before its first step: tokens, tokenizer and model folder.

use super::start::Resumed;
use ottava_checkpoint::FolderTemplate;
use ottava_common::error::{Error, Result};
use ottava_data::{Tokenizer, TrainingData};
use ottava_models::DecoderConfig;
use ottava_parallel::Ranks;
use ottava_settings::RunConfig;

/// The inputs of a run.
pub(super) struct Inputs {
    pub(super) tokenizer: Tokenizer,
    pub(super) data: TrainingData,
    pub(super) template: FolderTemplate,
    pub(super) sizes: DecoderConfig,
}

impl Inputs {
    /// Reads the inputs of a new or a `resumed` run. One rank prepares the tokens, then all `ranks` read them.
    pub(super) fn read(config: &RunConfig, resumed: Option<&Resumed>, ranks: &Ranks) -> Result<Inputs> {
        let prepared = || -> Result<_> {
            let tokenizer = Tokenizer::load(config.tokenizer_path())?;
            let data = config.prepare_data(&tokenizer)?;
            Ok((tokenizer, data))
        };
        let first = ranks.leads().then(prepared).transpose();
        let first = ranks.together("preparing the data", first)?;
        let read = first.map_or_else(prepared, Ok).and_then(|read| Inputs::check(config, resumed, read, ranks));
        let inputs = ranks.together("reading the data", read)?;
        ranks.expect_equal("the key of the data", &inputs.data.key())?;
        ranks.expect_equal("the model", &format!("{:?}", inputs.sizes))?;
        Ok(inputs)
    }

    /// Checks the tokenizer and the tokens, and derives the other inputs from them.
    fn check(
        config: &RunConfig,
        resumed: Option<&Resumed>,
        (tokenizer, data): (Tokenizer, TrainingData),
        ranks: &Ranks,
    ) -> Result<Inputs> {
        if let Some(resumed) = resumed.filter(|resumed| resumed.progress.rows.data != data.key()) {
            return Err(Error::Data(format!(
                "the data or the tokenizer have changed since {} was saved; put them back, or start a new run with `model.path` set to the checkpoint",
                resumed.path.display()
            )));
        }
        if ranks.leads() {
            tracing::info!("{}", tokenizer.describe_edges());
            // If the objective does not cut documents, its rows say how many documents are left out.
            let cuts = config.objective().properties().cuts_documents;
            for set in data.sets.iter().filter(|set| cuts && set.stream.is_none()) {
                if let Some(sentence) = set.statistics.describe_fit(&data.layout) {
                    tracing::warn!("{}{sentence}", set.label());
                }
            }
        }
        let mut template = FolderTemplate::read(&config.model.path, config.tokenizer_path(), tokenizer.eos_ids())?
            .with_chat_template(&config.data.chat.chat_template_path)?
            .with_special_ids(config.tokenizer.ids());
        template.config = config.model_config(tokenizer.padding_id())?;
        let sizes = config.trained_sizes(&template.config)?;
        if let Some(pooling) = config.embedding.pooling {
            template = template.with_pooling(pooling.mode(), sizes.stream.channels, config.data.max_length);
        }
        tokenizer.check_fits(sizes.vocabulary)?;
        // A checkpoint of adapters holds no other weights of the model.
        if let Some(resumed) = resumed.filter(|_| sizes.lora.is_none()) {
            resumed.expect_model(config, &template.config, &sizes)?;
        }
        Ok(Inputs { tokenizer, data, template, sizes })
    }
}
