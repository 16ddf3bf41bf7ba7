//! Keys of trainers of reinforcement learning, as settings of `[reinforcement]`.
//!
//! A [`Dialect`] is a trainer's rows of keys, by their whole paths, and a function that reads the keys which mean something only together: rewards,
//! batches, losses. To add a key: a row in the file of the trainer, or a `take` in its `together`.

mod nemo_rl;
mod overrides;
mod reader;
mod rewards;
#[cfg(test)]
mod tests;
mod trl;
mod verl;

use super::defaults::Trainer;
use serde_json::{Map, Value as Json};

pub(super) use overrides::yaml_of_script;
pub(super) use reader::{Dialect, Found, Reader};

/// The dialect of a file of `trainer` with these keys, if it is one of reinforcement learning.
pub(super) fn dialect(trainer: Trainer, table: &Map<String, Json>) -> Option<&'static Dialect> {
    let has = |keys: &[&str]| keys.iter().any(|key| table.contains_key(*key));
    match trainer {
        Trainer::Verl => Some(&verl::DIALECT),
        Trainer::NemoRl => Some(&nemo_rl::DIALECT),
        Trainer::Axolotl if table.get("rl").is_some_and(|rl| rl == "grpo") => Some(&trl::OF_AXOLOTL),
        Trainer::Axolotl | Trainer::LlamaFactory => None,
        _ if !has(&["num_generations", "reward_funcs", "max_completion_length"]) => None,
        _ if has(&["normalize_advantages", "reward_clip_range"]) => Some(&trl::RLOO),
        _ => Some(&trl::GRPO),
    }
}
