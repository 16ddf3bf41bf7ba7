//! The result of a run.

use super::Trainer;
use super::building::model_of;
use super::outputs::Outputs;
use super::start::{RunLock, Start, checkpoints};
use ottava_checkpoint::{Best, atomic};
use ottava_common::error::Result;
use ottava_data::Tokenizer;
use ottava_models::Decoder;
use std::path::PathBuf;

impl Trainer {
    /// Returns the best evaluation and the path of its checkpoint, if `load_best_model_at_end` is set.
    pub fn best(&self) -> Option<(&Best, PathBuf)> {
        let config = &self.environment.config;
        let best = self.progress.best.as_ref().filter(|_| config.evaluation.load_best_model_at_end)?;
        Some((best, checkpoints(&config.output_dir).join(atomic::name(best.step))))
    }

    /// Frees the memory of a run that has failed, and leaves the job: from here on, the loss of another rank does not end this process. On the leading
    /// rank, returns the lock on the folder of the run, so that no other process trains into the folder before this process has ended.
    pub fn leave(self) -> Option<RunLock> {
        let Trainer { outputs: Outputs { saver, files, .. }, .. } = self;
        // A save in progress writes under the lock.
        drop(saver);
        files.map(|files| files.lock)
    }

    /// Returns the model and its tokenizer after the run, and frees all other memory of the run. With `load_best_model_at_end`, returns the model of
    /// the best checkpoint. Otherwise, if ranks divide the model, loads it from the last checkpoint.
    pub fn into_model(self) -> Result<(Decoder, Tokenizer)> {
        let best = self.best().filter(|(best, _)| best.step != self.progress.step).map(|(_, path)| path);
        let Trainer { outputs, environment, run, .. } = self;
        let run = run.into_inner();
        drop(outputs.saver);
        let model = match best.map(Start::ResumeFrom) {
            None if environment.ranks.have_whole_model() => run.model,
            start => {
                drop(run);
                model_of(&environment, &start.unwrap_or(Start::Resume))?
            }
        };
        Ok((model, environment.inputs.tokenizer))
    }
}
