//! Preferences: pairs of sequences, or sequences with labels, relative to a reference model or to margins.

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
pub use sums::PreferenceSums;
