//! The plan of mixtures of experts.

use ottava_models::DecoderConfig;
use ottava_models::layers::ExpertsSpec;
use ottava_settings::RunConfig;
use ottava_tensor::ops::Groups;
use serde::Serialize;

/// The mixtures of experts of a model.
#[derive(Clone, Debug, Serialize)]
pub struct ExpertsPlan {
    /// The number of layers with experts.
    pub layers: usize,
    /// The number of experts of each layer.
    pub experts: usize,
    /// The number of experts that a token is sent to.
    pub chosen: usize,
    /// The width of an expert.
    pub hidden: usize,
    /// How routers choose experts, and the losses that they add, in words.
    pub router: String,
    /// The width of the MLP that all tokens share; `None` without such an MLP.
    pub shared: Option<usize>,
    /// The number of ranks that divide the experts of each layer and exchange tokens.
    pub ranks: usize,
    /// The number of rows that a micro-batch of these ranks sends to the experts of a layer.
    pub rows: usize,
    /// The number of rows of the buffers of a rank. They have room for any choice of experts, with groups padded to multiples of 128.
    pub capacity: usize,
}

impl ExpertsPlan {
    /// Plans the mixtures of a model of `sizes`. Returns `None` if the model has no experts.
    pub(super) fn new(run: &RunConfig, sizes: &DecoderConfig) -> Option<ExpertsPlan> {
        let ExpertsSpec { count, hidden, routing, shared, losses, .. } = sizes.experts()?;
        let sequences = run.training.per_device_train_batch_size;
        let ranks = run.parallel.expert * run.parallel.tensor;
        let tokens = sequences * run.data.max_length / run.parallel.context.max(1) * run.parallel.expert;
        let own = count / ranks;
        let loss = |name, factor: f64| if factor == 0.0 { String::new() } else { format!(", {name} {factor}") };
        let losses = format!("{}{}", loss("loss of balance times", losses.balance), loss("z-loss times", losses.z));
        Some(ExpertsPlan {
            layers: sizes.layers.iter().filter(|layer| layer.experts().is_some()).count(),
            experts: *count,
            chosen: routing.chosen,
            hidden: *hidden,
            router: format!("{routing}, logits in F32{losses}"),
            shared: shared.map(|shared| shared.hidden),
            ranks,
            rows: tokens * routing.chosen,
            capacity: Groups::capacity(tokens * routing.chosen.min(own), own),
        })
    }
}
