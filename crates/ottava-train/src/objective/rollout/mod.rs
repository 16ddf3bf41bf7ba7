//! Reinforcement learning: the model draws completions of prompts, rewards score them, and steps make good ones more likely.
//!
//! **A generation.** `RolloutRows` (`rows.rs`) asks for completions when no completion is left for a step. `Generator` (`generator.rs`) lends the
//! model to an `Engine` (`Engine::lend`), so that draws read the same weights and codes as the next step. Without ZeRO, nothing is copied. Weights
//! that ranks divide with ZeRO are gathered before the draws, and weights whose codes are not stored are cast (`WholeWeights` of `ottava-parallel`). Each data-parallel rank draws the completions of
//! its prompts (`sample.rs`) and scores them (`ottava-rewards`). Then ranks exchange their completions, so each rank knows all rewards, and a
//! checkpoint can hold the completions that no step has used yet (`Rows::unfinished`).
//!
//! **Staleness.** With `sampling.max_staleness`, completions of the next generation begin while the last completions of a generation are drawn (`ahead.rs`).
//! `RolloutRows` keeps their tokens (`Drawn`) until the next generation, and a checkpoint has them. The saved position in the data stays before their prompts.
//!
//! **Turns.** With an environment, a completion is a `Conversation` (`conversation.rs`). Token ids of all turns are kept; only the environment's
//! messages are tokenized. A turn's prompt is the conversation so far, whose keys and values the prefix cache of the engine already has.
//!
//! **Clients.** With `reinforcement.endpoint`, clients outside of the run draw and score completions. `Generator::collect` lends the engine to
//! `Clients` (`clients.rs`), which `ottava-serve` implements, until they have returned the completions of a generation.
//!
//! **Ranks.** Data-parallel ranks draw different completions. Ranks that divide tensors or experts compute each pass of a draw together, so they draw the
//! same completions (`Ranks::place_of_draws`). The first of them answers and scores the completions and gives them to the others
//! (`Ranks::of_first_drawing`).
//!
//! **A step.** `credit.rs` computes advantages from rewards: by `advantage.rs`, or with a value head by `gae.rs`. Completions are packed into rows
//! (`packing.rs`): each completion is a document of its row. A step runs only as many micro-batches as the completions fill, and all ranks run
//! equally many (`TrainStep::use_micro_batches`). All ranks know all completions of a step, and each rank takes its rows. `PolicyMicroBatch`
//! (`loss.rs`) is the loss of a micro-batch; the op `policy_loss` clips the ratio of new and old probability.
//!
//! **A value head** (PPO) is a weight `[C]` in the `Head` of the trained model (`HeadSpec::value`), which reads the activations that logits are
//! computed from. A second model, as in verl, would need a second copy of the weights and FP8 codes, and a second step. A value head adds one vector,
//! and one step trains decoder and head. The weight is a vector, so it is never cast, has no weight decay, and is whole on each rank. After the draws
//! of a generation, a pass over the completions (`token_values`) estimates the values of their tokens with the weights that drew them. Model folders
//! do not have the head; `Contents` (`checkpoint/training.rs`) saves it with the optimizer states.
//!
//! **Other models.** The reference model and reward models are frozen (`OtherModels`). They are created with the first loss, so a plan counts their
//! memory, and `Rows` reach them through the loss of a step. `RewardRows` (`reward_model.rs`) scores completions in batches; `ottava-rewards` adds
//! these scores to the other rewards by weight.
//!
//! **Log-probabilities.** The engine reports the old log-probabilities. They come from F32 logits (`HeadSpec::wide_logits`), by the op that
//! computes the loss (`LogprobsMode::Loss`). So, on a CPU, they have the same bits as the log-probabilities that a step computes before the first
//! update, with each recipe whose scales do not depend on the other tokens of a product. The temperature is a factor of the head (`HeadSpec::scale`),
//! which draws and losses share.

mod advantage;
mod ahead;
mod clients;
mod completion;
mod conversation;
mod credit;
mod drawer;
mod gae;
mod generator;
mod held_out;
mod loss;
mod packing;
mod policy;
mod reward_model;
mod rows;
mod sample;
mod sums;

pub use advantage::advantages;
pub use clients::{Clients, Returned, Wanted};
pub use completion::Completion;
pub use drawer::{DrawSizes, Drawer};
pub use loss::{Estimates, OtherModels, PolicyMicroBatch, Scored};
pub use packing::{PackedBatch, Place, SampleRows, documents_of_row};
pub use policy::Policy;
pub use sample::{Draw, Drawn, End, Sample, sample, seed_of, set_row};

use super::{FrozenModel, Objective, Opening, Rows};
use crate::phase::{Passes, Phase};
use crate::step::{Loaded, Loss, TrainStep};
use ottava_common::error::Result;
use ottava_models::{Decoder, DecoderConfig};
use ottava_parallel::Partition;
use ottava_recipe::mode::Pass;
use ottava_rewards::RewardSpec;
use ottava_settings::RunConfig;
use ottava_tensor::{DType, Device};
use rows::RolloutRows;
use std::cell::{OnceCell, RefCell};
use std::path::Path;
use std::rc::Rc;

/// Reinforcement learning from rewards.
pub(super) struct Reinforcement {
    run: RunConfig,
    how: Policy,
    /// The frozen models, created with the first loss.
    others: OnceCell<Rc<OtherModels>>,
    /// The engine and KV cache that a plan rehearses draws with.
    rehearsed: RefCell<Option<Drawer>>,
}

impl Reinforcement {
    pub(super) fn new(config: &RunConfig) -> Reinforcement {
        let how = Policy::of(config);
        Reinforcement { run: config.clone(), how, others: OnceCell::new(), rehearsed: RefCell::default() }
    }

    /// Returns the frozen models of the run: the reference model, if it is the model of `model.path`, and the reward models.
    fn others(&self, device: &Device) -> Result<Rc<OtherModels>> {
        if let Some(others) = self.others.get() {
            return Ok(others.clone());
        }
        let (run, recipe) = (&self.run, self.run.reference_recipe(device));
        let open = |scope, folder: &Path, sizes: &DecoderConfig| {
            FrozenModel::of_folder(scope, folder, sizes, &recipe, device, run.data.max_length)
        };
        let reference = match run.has_reference_policy() {
            true => {
                let mut sizes = run.decoder_config()?;
                (sizes.head.value, sizes.lora) = (false, None);
                Some(open("reference", &run.model.path, &sizes)?)
            }
            false => None,
        };
        let rewards = RewardSpec::models(&run.reinforcement.rewards)
            .map(|(name, model)| open("reward model", &model.path, &run.reward_model_sizes(name, &model.path)?));
        let others = OtherModels { reference, rewards: rewards.collect::<Result<_>>()? };
        Ok(self.others.get_or_init(|| Rc::new(others)).clone())
    }
}

impl Objective for Reinforcement {
    fn loss(&self, rows: usize, device: &Device, dtype: DType) -> Result<Box<dyn Loss>> {
        let (others, tokens) = (self.others(device)?, self.run.data.max_length);
        Ok(Box::new(PolicyMicroBatch::new(self.how, others, rows, tokens, device, dtype)?))
    }

    fn max_documents(&self) -> Option<usize> {
        Some(documents_of_row(self.run.data.max_length))
    }

    fn passes(&self, config: &RunConfig) -> Vec<Passes> {
        let passes =
            |pass, micro_batches| Passes { phase: Phase::Rows, pass, micro_batches, rows: config.micro_batch_rows() };
        let is_adapted = self.how.loss.beta > 0.0 && !config.has_reference_policy();
        let reference = is_adapted.then(|| passes(Pass::Reference, config.training.gradient_accumulation_steps));
        let has_pass = self.how.value.is_some() || self.how.correction_by_pass.is_some();
        let values = has_pass.then(|| passes(Pass::Evaluation, 1));
        reference.into_iter().chain(values).collect()
    }

    fn run_other_models(&self, step: &mut TrainStep) -> Result<()> {
        step.each_loaded(|loaded, loss: &mut PolicyMicroBatch| {
            let Loaded { inputs, targets, sequences } = loaded;
            for model in &loss.others().rewards {
                model.losses(inputs, targets, sequences)?;
            }
            loss.read_reference(loaded)
        })
    }

    fn rehearse_draws(&self, model: &mut Decoder, partition: &Partition, config: &RunConfig) -> Result<()> {
        let (r, ranks) = (&config.reinforcement, config.parallel.planned_data());
        let of_step = config.micro_batch_rows() * config.training.gradient_accumulation_steps * ranks;
        let draws = (ranks / config.parallel.expert).max(1);
        let completions = r.prompts(of_step) * r.num_generations / draws;
        let mut drawer = self.rehearsed.borrow_mut();
        drawer
            .get_or_insert_with(|| Drawer::new(DrawSizes::of_generation(config, completions)))
            .rehearse(model, partition)
    }

    fn open(&self, opening: &Opening) -> Result<Box<dyn Rows>> {
        Ok(Box::new(RolloutRows::open(opening)?))
    }
}
