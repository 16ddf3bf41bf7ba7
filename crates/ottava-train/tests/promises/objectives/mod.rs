//! The objectives of a run: texts, answers, preferences and rewards.

pub mod bandit;
pub mod classification;
pub mod distillation;
pub mod divided_draws;
pub mod embedding_models;
mod encoders;
pub mod label_smoothing;
pub mod log_probabilities;
pub mod policy;
pub mod ppo;
pub mod preference;
pub mod preference_free;
pub mod preference_losses;
pub mod preference_ranks;
pub mod reward;
pub mod reward_models;
pub mod rollouts;
pub mod seeds;
pub mod sft;
pub mod staleness;
pub mod stored_distillation;
pub mod turns;
pub mod weights_of_draws;
