//! Preferences: pairs of sequences, or sequences with labels, relative to a reference model or to margins.
//!
//! A pair of preferences is two neighbouring documents, which `Split::of_groups` keeps together, and each document has a row. `Records` and
//! `PreferenceLoader` (`data/preference.rs`) make batches of pairs.
//!
//! `MicroBatchPreference` (`loss.rs`) is the loss of a micro-batch. It computes the losses of all tokens, their sums by sequence
//! (`sequence_log_probs`), the loss of the pairs and the factor of each token's cross entropy (the op `preference_loss`), and then the gradient of
//! the head with these factors. The logits are computed twice, since the factor of a token depends on all tokens of its pair.
//!
//! `PreferenceRows` (`rows.rs`) stores the reference log-probabilities. They come from the initial model before the first step, or in each step
//! from a pass over the loaded micro-batches (`TrainStep::loaded_token_losses`) in `Pass::Reference`, which leaves adapters out (`Mode::adapts`).
//! The divergence z of KTO comes from a forward pass over mismatched rows before each step (`divergence.rs`).

mod divergence;
mod evaluation;
mod how;
mod loss;
mod reference;
mod rows;
mod sums;

pub use evaluation::{evaluate_rewards, row_log_probs};
pub use how::Preference;
pub use loss::MicroBatchPreference;
pub(super) use reference::{Reference, ReferenceModel};
pub(super) use rows::PreferenceRows;
pub use sums::{PreferenceSums, Sequences};
