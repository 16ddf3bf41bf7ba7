//! A run's configuration after a plan has replaced each `auto` by a value.

use crate::RunConfig;
use ottava_recipe::param::{Description, LayerCosts, MemoryPolicy, Purpose};
use ottava_recipe::recompute::Recompute;
use ottava_recipe::storage::Share;

/// The settings of a run, with values for the settings that depend on the memory of the device. Other `auto` settings (formats, layout of rows,
/// stored codes) follow from methods of [`RunConfig`].
#[derive(Clone, Debug, PartialEq)]
pub struct ResolvedConfig {
    /// The settings of the run's file. The fields below replace the settings of the same names.
    pub run: RunConfig,
    /// The activations that backward recomputes.
    pub recompute: Recompute,
    /// The share of the blocks whose optimizer states and master weights are offloaded.
    pub offload_optimizer: f64,
    /// The share of the blocks whose weights are offloaded.
    pub offload_parameters: f64,
    /// Whether training continues while checkpoints are written.
    pub async_save: bool,
}

impl ResolvedConfig {
    /// Returns the settings of `run` with the fastest value for each setting that is `auto`: nothing is recomputed or offloaded, and training
    /// continues while checkpoints are written.
    pub fn fastest(run: &RunConfig) -> ResolvedConfig {
        let memory = &run.memory;
        ResolvedConfig {
            recompute: memory.recompute.unwrap_or(Recompute::None),
            offload_optimizer: memory.offload_optimizer.unwrap_or(0.0),
            offload_parameters: memory.offload_parameters.unwrap_or(0.0),
            async_save: run.checkpoint.async_save.unwrap_or(true),
            run: run.clone(),
        }
    }

    /// Returns the settings of a run's file, with the resolved values.
    pub fn to_run_config(&self) -> RunConfig {
        let mut run = self.run.clone();
        run.memory.recompute = Some(self.recompute);
        run.memory.offload_optimizer = Some(self.offload_optimizer);
        run.memory.offload_parameters = Some(self.offload_parameters);
        run.checkpoint.async_save = Some(self.async_save);
        run
    }

    /// Returns the cost of each layer of `model` in this run.
    pub fn layer_costs(&self, model: &Description) -> LayerCosts {
        model.layer_costs(self.run.data.max_length, self.recompute.blocks())
    }

    /// Returns the purpose that the model is built for.
    pub fn purpose(&self) -> Purpose {
        let run = &self.run;
        Purpose::Train(MemoryPolicy {
            formats: run.optimizer.formats(),
            weight_codes: run.weight_codes(),
            frozen_values: run.needs_values(),
            four_bit: run.lora.load_in_4bit,
            recompute: self.recompute,
            saved_activations: run.memory.saved_activations,
            offload_optimizer: Share::new(self.offload_optimizer),
            offload_parameters: Share::new(self.offload_parameters),
            offload_residuals: run.memory.offload_residuals,
        })
    }
}
