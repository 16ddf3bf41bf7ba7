//! The plan of mixtures of experts.

use crate::config::RunConfig;
use crate::layers::ExpertsSpec;
use crate::models::DecoderConfig;
use ottava_tensor::ops::Groups;
use serde::Serialize;

/// The mixtures of a model.
#[derive(Clone, Debug, Serialize)]
pub struct ExpertsPlan {
    /// Layers with experts.
    pub layers: usize,
    /// Experts of each.
    pub experts: usize,
    /// Experts that a token is sent to.
    pub chosen: usize,
    /// Width of an expert.
    pub hidden: usize,
    /// How routers choose, and the losses that they add.
    pub router: String,
    /// Width of the MLP that all tokens share; `None` if there is none.
    pub shared: Option<usize>,
    /// Ranks that divide the experts of each layer, and exchange tokens.
    pub ranks: usize,
    /// Rows that a micro-batch of these ranks sends to the experts of a layer.
    pub rows: usize,
    /// Rows of the buffers of a rank, which have room for any choices in groups of multiples of 128.
    pub capacity: usize,
}

impl ExpertsPlan {
    /// The plan of a run of a model of `sizes`; `None` if it has no experts.
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
