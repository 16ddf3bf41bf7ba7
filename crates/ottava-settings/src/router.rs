//! The table `[router]`.

use ottava_models::layers::RouterLossFactors;
use serde::{Deserialize, Serialize};

/// The `[router]` table: how tokens are spread over the experts of each layer.
#[derive(Clone, Debug, Default, PartialEq, Serialize, Deserialize)]
#[serde(deny_unknown_fields, default)]
pub struct RouterConfig {
    /// Factor of the loss that is smallest if all experts get as many tokens; 0 for none.
    pub balance_loss: f64,
    /// Factor of the mean square of the log-sum-exp of a router's logits, which keeps them small; 0 for none.
    pub z_loss: f64,
    /// What a step adds to or subtracts from the bias of each expert, for models whose routers have one; 0 for none.
    pub bias_update_rate: f64,
}

impl RouterConfig {
    /// The losses of routers.
    pub(super) fn losses(&self) -> RouterLossFactors {
        RouterLossFactors { balance: self.balance_loss, z: self.z_loss }
    }

    /// Problems of the values, a sentence each.
    pub(super) fn problems(&self) -> Vec<String> {
        let values = [
            ("router.balance_loss", self.balance_loss),
            ("router.z_loss", self.z_loss),
            ("router.bias_update_rate", self.bias_update_rate),
        ];
        let wrong = values.into_iter().filter(|(_, value)| !(value.is_finite() && *value >= 0.0));
        wrong.map(|(key, value)| format!("`{key}` is {value}; it is a number from 0 up")).collect()
    }
}
