//! What a run optimises: the settings of each objective, and what the other settings depend on.

mod distillation;
mod distillation_runs;
mod effects;
mod kind;
mod loss_type;
mod preference;
mod preference_runs;
mod reinforcement;
mod reinforcement_runs;
#[cfg(test)]
mod tests;

pub use distillation::DistillationConfig;
pub(super) use effects::OF_REFERENCE;
pub use kind::{ObjectiveKind, ObjectiveProperties};
pub use loss_type::{LossType, LossTypes};
pub use preference::PreferenceConfig;
pub(super) use preference::problems;
pub use reinforcement::{
    AdvantageConfig, AdvantageEstimator, Aggregation, CorrectionConfig, CorrectionMode, KlEstimator, PolicyConfig,
    PolicyLossType, ReinforcementConfig, ScaleRewards,
};
