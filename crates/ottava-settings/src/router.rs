//! The table `[router]`.

use ottava_models::layers::RouterLossFactors;
use schemars::JsonSchema;
use serde::{Deserialize, Serialize};

/// The `[router]` table: how tokens are spread over the experts of each layer.
#[derive(Clone, Debug, Default, PartialEq, Serialize, Deserialize, JsonSchema)]
#[serde(deny_unknown_fields, default)]
pub struct RouterConfig {
    /// Coefficient of the load-balancing loss of each mixture-of-experts layer (Megatron's `moe_aux_loss_coeff`; 0.01 is usual for training
    /// from scratch). 0 turns it off.
    pub balance_loss: f64,
    /// Coefficient of the router z-loss: the squared log-sum-exp of a router's logits, averaged over tokens. 0 turns it off.
    pub z_loss: f64,
    /// Amount by which each step increases the bias of experts with fewer tokens than the mean, and decreases the bias of experts with more. Only for
    /// models with router biases (DeepSeek-V3, which was trained with 0.001; Megatron's `moe_router_bias_update_rate`). 0 keeps the biases unchanged.
    pub bias_update_rate: f64,
}

impl RouterConfig {
    /// Returns the factors of the routers' losses.
    pub(super) fn losses(&self) -> RouterLossFactors {
        RouterLossFactors { balance: self.balance_loss, z: self.z_loss }
    }

    /// Lists the problems of the values, one sentence each.
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
