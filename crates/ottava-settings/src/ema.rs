//! The table `[ema]`: the exponential moving average of the weights.

use crate::demands::Problems;
use ottava_parallel::optim::EmaConfig;
use schemars::JsonSchema;
use serde::{Deserialize, Serialize};

/// The `[ema]` table: an average of the trained weights over steps, in F32. The average has no effect on the run itself. Checkpoints hold it, and the run
/// writes it at its end as a model folder, `ema/checkpoint-STEP` in `output_dir`.
#[derive(Clone, Copy, Debug, PartialEq, Serialize, Deserialize, JsonSchema)]
#[serde(deny_unknown_fields, default)]
pub struct EmaSettings {
    /// The share of the average that stays when the weights of a step are added, such as 0.999; 0 keeps no average.
    pub decay: f64,
    /// The first step after which weights are added. The average begins with the weights themselves.
    pub start: u64,
    /// Steps between two additions.
    pub every: u64,
    /// Whether evaluations also compute the metrics of the average, as eval_ema_loss and so on.
    pub evaluate: bool,
}

impl Default for EmaSettings {
    fn default() -> EmaSettings {
        EmaSettings { decay: 0.0, start: 0, every: 1, evaluate: true }
    }
}

impl EmaSettings {
    /// Returns how weights are averaged; `None` if the run keeps no average.
    pub fn config(&self) -> Option<EmaConfig> {
        let EmaSettings { decay, start, every, .. } = *self;
        (decay != 0.0).then_some(EmaConfig { decay, start, every })
    }

    /// Lists the problems of the values, one sentence each.
    pub(super) fn problems(&self) -> Vec<String> {
        let mut all = Problems::default();
        let decay = self.decay;
        all.demand(
            (0.0..1.0).contains(&decay) && (1.0 - decay) as f32 > 0.0,
            format!(
                "`ema.decay` is {decay}; it is a share from 0, which keeps no average, to less than 1, such as 0.999"
            ),
        );
        all.demand_count("ema.every", self.every);
        all.demand_steps("ema.start", self.start);
        all.0
    }
}
