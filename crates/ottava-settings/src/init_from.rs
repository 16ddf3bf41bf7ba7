//! The adapter that a run starts from.

use crate::RunConfig;
use ottava_checkpoint::AdapterFolder;
use ottava_checkpoint::adapter::CONFIG_FILE;
use ottava_common::error::{Error, Result};
use ottava_recipe::lora::Lora;

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
        if self.lora.r == 0 {
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
        match differs.into_iter().find(|(_, own, adapter)| own != adapter) {
            Some((key, own, adapter)) => Err(Error::Config(format!(
                "`lora.{key}` is {own}, and the adapter {} has {adapter}; a run goes on with an adapter as it is: set the same, or leave out \
                 the keys of [lora] that its {CONFIG_FILE} has",
                from.display()
            ))),
            None => Ok(self),
        }
    }
}
