//! Which settings may change when a run resumes.

use crate::RunConfig;
use ottava_common::error::{Error, Result};
use std::collections::{BTreeMap, BTreeSet};
use toml::Value;

impl RunConfig {
    /// Says how a run of these settings resumes: the settings of its command line are not in its file.
    pub fn ways_to_resume(&self) -> String {
        let file = self.output_dir.join("config.toml");
        format!("repeat each `--set` of the first command, or run `ottava train {} --resume`", file.display())
    }

    /// Checks that a run that was saved with `saved` may resume with `self`. Settings that define the run must be equal. Other changed settings are
    /// returned as `(key, before, now)` for the log.
    pub fn check_resume(&self, saved: &RunConfig) -> Result<Vec<(String, String, String)>> {
        const FREE: &[&str] = &[
            "output_dir",
            "device",
            "generation",
            "data.cache_dir",
            "data.cached_shards",
            "checkpoint.async_save",
            "lora.init_from",
        ];
        // Paths may differ: the content at these paths is compared when the run resumes.
        const STEERS: &[&str] = &[
            "model.path",
            "model.tokenizer",
            "data.train_files",
            "data.val_files",
            "data.datasets",
            "training",
            "lr_scheduler",
            "evaluation",
            "checkpoint",
            "logging",
            "precision",
            "sentinel",
            "router",
            "reinforcement.correction",
            "alarms",
            "debug",
            "optimizer",
            "memory.recompute",
            "memory.weight_codes",
            "memory.offload_optimizer",
            "memory.offload_parameters",
            "memory.offload_residuals",
            "parallel",
            "recovery",
        ];
        // An optimizer cannot use the states of another optimizer.
        const FIXED: &[&str] = &["optimizer.name"];
        const BATCH: &str = "training.global_batch_size";
        let within = |list: &[&str], key: &str| list.iter().any(|l| key == *l || key.starts_with(&format!("{l}.")));
        let (before, now) = (saved.precision.recipe, self.precision.recipe);
        if saved.precision.recipe().compute != self.precision.recipe().compute {
            return Err(Error::Config(format!(
                "the checkpoint is of recipe `{}` and cannot resume as `{}`, whose weights have another type. \
                 Start a new run with `model.path` set to the checkpoint instead",
                before.as_str(),
                now.as_str()
            )));
        }
        let [before, now] = [saved, self].map(|config| {
            let mut keys: BTreeMap<String, Value> = config.flat().into_iter().collect();
            keys.insert(BATCH.into(), Value::from(config.training.sequences() as i64));
            keys
        });
        let told = |value: Option<&Value>| value.map_or_else(|| "not set".to_string(), ToString::to_string);
        let keys: BTreeSet<&String> = before.keys().chain(now.keys()).collect();
        // Earlier versions had another default.
        let corrects_alike = !self.reinforcement.is_on() || saved.correction() == self.correction();
        let is_free = |key: &str| within(FREE, key) || corrects_alike && within(&["reinforcement.correction"], key);
        let mut changes = Vec::new();
        for key in keys.into_iter().filter(|key| before.get(*key) != now.get(*key) && !is_free(key)) {
            let [before, now] = [&before, &now].map(|keys| told(keys.get(key)));
            if key == BATCH || within(FIXED, key) || !within(STEERS, key) {
                return Err(Error::Config(format!(
                    "`{key}` was {before} when the checkpoint was saved and is {now} now; it must not change within a run. To resume, {}. To change \
                     it, start a new run with `model.path` set to the checkpoint",
                    saved.ways_to_resume()
                )));
            }
            changes.push((key.clone(), before, now));
        }
        Ok(changes)
    }
}
