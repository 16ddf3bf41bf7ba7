//! Reinforcement learning: the model draws completions of prompts, rewards score them, and steps make good ones more likely.
//!
//! **A generation.** `RolloutRows` (`rows.rs`) asks for completions when no completion is left for a step. `Generator` (`generator.rs`) lends the model
//! to an `Engine` (`Engine::lend`), so that draws read the same weights and codes as the next step, and nothing is copied. Each data-parallel rank draws
//! the completions of its prompts (`sample.rs`) and scores them (`ottava-rewards`). Then all ranks tell each other their completions, so that each of
//! them knows all rewards, and a checkpoint can hold the completions that no step has used yet (`Rows::unfinished`).
//!
//! **Turns.** With an environment, a completion is a `Conversation` (`conversation.rs`). Token ids of all turns are kept; only the environment's messages
//! are tokenized. A turn's prompt is the conversation so far, whose keys and values the prefix cache of the engine already has.
//!
//! **Clients.** With `reinforcement.endpoint`, clients outside of the run draw and score completions. `Generator::collect` lends the engine to `Clients`
//! (`clients.rs`), which `ottava-serve` implements, until they have returned the completions of a generation.
//!
//! **A step.** `advantage.rs` makes advantages of rewards. `PolicyMicroBatch` (`loss.rs`) is the loss of a micro-batch, whose rows have one completion
//! each; the op `policy_loss` bounds the ratio of new and old probability.
//!
//! **Log-probabilities.** The engine reports the old log-probabilities. They come from F32 logits (`HeadSpec::wide_logits`), by the op that
//! computes the loss (`LogprobsMode::Loss`). So, on a CPU, they equal to the bit what a step computes before the first update, in each recipe
//! whose scales do not depend on the other tokens of a product. The temperature is a factor of the head (`HeadSpec::scale`), which draws and losses share.

mod advantage;
mod clients;
mod completion;
mod conversation;
mod generator;
mod held_out;
mod loss;
mod rows;
mod sample;

pub use advantage::advantages;
pub use clients::{Clients, Returned, Wanted};
pub use completion::Completion;
pub use loss::{Policy, PolicyMicroBatch, Scored};
pub use sample::{End, Sample, engine_for, sample, seed_of, set_row};

use super::{FrozenModel, Objective, Opening, Rows};
use crate::phase::{Passes, Phase};
use crate::step::{Loss, TrainStep};
use ottava_common::error::Result;
use ottava_recipe::mode::Pass;
use ottava_settings::RunConfig;
use ottava_tensor::{DType, Device};
use rows::RolloutRows;
use std::cell::OnceCell;
use std::rc::Rc;

/// Reinforcement learning from rewards.
pub(super) struct Reinforcement {
    run: RunConfig,
    how: Policy,
    /// The model of the start, if it is the reference model. Made with the first loss.
    reference: OnceCell<Rc<FrozenModel>>,
}

impl Reinforcement {
    pub(super) fn new(config: &RunConfig) -> Reinforcement {
        let r = &config.reinforcement;
        let how = Policy { loss: r.policy_loss(), correction: r.correction, aggregation: r.aggregation() };
        Reinforcement { run: config.clone(), how, reference: OnceCell::new() }
    }

    /// Returns the reference model, if there is one besides the trained model.
    fn reference(&self, device: &Device) -> Result<Option<Rc<FrozenModel>>> {
        let run = &self.run;
        if !run.has_reference_policy() || self.reference.get().is_some() {
            return Ok(self.reference.get().cloned());
        }
        let (sizes, recipe) = (run.decoder_config()?, run.reference_recipe(device));
        let model = FrozenModel::of_folder("reference", &run.model.path, &sizes, &recipe, device, run.data.max_length)?;
        Ok(Some(self.reference.get_or_init(|| Rc::new(model)).clone()))
    }
}

impl Objective for Reinforcement {
    fn loss(&self, rows: usize, device: &Device, dtype: DType) -> Result<Box<dyn Loss>> {
        let (reference, tokens) = (self.reference(device)?, self.run.data.max_length);
        Ok(Box::new(PolicyMicroBatch::new(self.how, reference, rows, tokens, device, dtype)?))
    }

    fn passes(&self, config: &RunConfig) -> Vec<Passes> {
        let reference = Passes {
            phase: Phase::Rows,
            pass: Pass::Reference,
            micro_batches: config.training.gradient_accumulation_steps,
            rows: config.micro_batch_rows(),
        };
        (self.how.loss.beta > 0.0 && !config.has_reference_policy()).then_some(reference).into_iter().collect()
    }

    fn run_other_models(&self, step: &mut TrainStep) -> Result<()> {
        step.each_loaded(|loaded, loss: &mut PolicyMicroBatch| loss.read_reference(loaded))
    }

    fn open(&self, opening: &Opening) -> Result<Box<dyn Rows>> {
        Ok(Box::new(RolloutRows::open(opening)?))
    }
}
