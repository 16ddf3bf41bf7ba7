//! The choices of routers in the steps of a run.

use crate::ExpertCounts;
use ottava_common::error::Result;
use ottava_tensor::ops::{Groups, Routes, add_counts, bias_gradient};
use ottava_tensor::{DType, Device, Tensor};
use serde::{Deserialize, Serialize};

/// A router of a model.
#[derive(Clone, Debug, PartialEq)]
pub struct RouterSite {
    /// The name, for example `model.layers.0.mlp.gate`.
    pub name: String,
    /// The numbers of experts and of choices per token.
    pub experts: ExpertCounts,
    /// The type in which the router's sums are computed.
    pub real: DType,
}

/// Sums over the tokens that a router has sent to experts, on the device.
pub(super) struct RouterSums {
    site: RouterSite,
    /// The number of tokens of each expert, I64 `[E]`.
    counts: Tensor,
    /// The number of rows in the buffers of experts that products read, padding included, I64 `[1]`.
    rows: Tensor,
    /// The sum of the entropies of scores, `[1]`.
    entropy: Tensor,
}

/// The choices of a router.
#[derive(Clone, Debug, PartialEq, Serialize, Deserialize)]
pub struct RouterLoad {
    /// The name of the router.
    pub name: String,
    /// The number of experts that a token is sent to.
    pub chosen: usize,
    /// The number of tokens of each expert.
    pub counts: Vec<i64>,
    /// The number of rows in the buffers of experts that products read, padding included.
    pub rows: i64,
    /// The sum of the entropies of the scores of tokens, in nats.
    pub entropy: f64,
}

/// Metrics of all routers of a model.
#[derive(Clone, Copy, Debug, PartialEq)]
pub struct RouterMetrics {
    /// The number of tokens of the busiest expert of a layer over the layer's mean. The maximum over all layers.
    pub imbalance: f64,
    /// The number of experts without a token, in all layers.
    pub idle: usize,
    /// The mean entropy of the scores of a token, in nats.
    pub entropy: f64,
    /// The share of the rows of experts that is padding.
    pub padding: f64,
}

impl RouterSums {
    pub(super) fn new(device: &Device, site: RouterSite) -> Result<RouterSums> {
        let counts = Tensor::zeros(device, &[site.experts.count], DType::I64)?;
        let rows = Tensor::zeros(device, &[1], DType::I64)?;
        let entropy = Tensor::zeros(device, &[1], site.real)?;
        Ok(RouterSums { site, counts, rows, entropy })
    }

    /// Adds the choices of a micro-batch.
    pub(super) fn add(&mut self, routes: &Routes, counts: &Tensor, rows: &Groups) -> Result<()> {
        add_counts(&mut self.counts, counts)?;
        add_counts(&mut self.rows, &rows.offsets.rows(rows.len(), rows.len() + 1)?)?;
        let entropy = routes.entropy.reshape(&[routes.entropy.len(), 1])?;
        Ok(bias_gradient(&entropy, &mut self.entropy)?)
    }

    /// Reads the sums from the device, and clears them.
    pub(super) fn take(&mut self) -> Result<RouterLoad> {
        let RouterSums { site, counts, rows, entropy } = self;
        let sum = match site.real {
            DType::F64 => entropy.to_vec::<f64>()?[0],
            _ => f64::from(entropy.to_vec::<f32>()?[0]),
        };
        let (name, chosen) = (site.name.clone(), site.experts.chosen);
        let load = RouterLoad { name, chosen, counts: counts.to_vec()?, rows: rows.to_vec::<i64>()?[0], entropy: sum };
        [counts, rows, entropy].into_iter().try_for_each(Tensor::fill_zero)?;
        Ok(load)
    }
}

impl RouterLoad {
    /// Adds the choices of another rank for the same router.
    fn add(&mut self, other: RouterLoad) {
        self.counts.iter_mut().zip(other.counts).for_each(|(sum, count)| *sum += count);
        self.rows += other.rows;
        self.entropy += other.entropy;
    }

    /// Returns the change of the bias for the router's choice: `rate` for experts with fewer tokens than the mean, `-rate` for experts with more.
    /// Wang et al. 2024, arXiv:2408.15664, algorithm 1.
    pub fn bias_change(&self, rate: f64) -> Vec<f64> {
        let (all, experts) = (self.counts.iter().sum::<i64>(), self.counts.len() as i64);
        self.counts.iter().map(|count| rate * (all - count * experts).signum() as f64).collect()
    }

    /// Merges the loads of all ranks by router. They may come in any order.
    pub fn merge(of_ranks: impl IntoIterator<Item = RouterLoad>) -> Vec<RouterLoad> {
        let mut merged: Vec<RouterLoad> = Vec::new();
        for load in of_ranks {
            match merged.iter_mut().find(|known| known.name == load.name) {
                Some(known) => known.add(load),
                None => merged.push(load),
            }
        }
        merged
    }
}

impl RouterMetrics {
    /// Returns the metrics of these routers, or `None` if no token was routed.
    pub fn of(loads: &[RouterLoad]) -> Option<RouterMetrics> {
        let pairs = |load: &RouterLoad| load.counts.iter().sum::<i64>();
        let all: i64 = loads.iter().map(pairs).sum();
        if all == 0 {
            return None;
        }
        let imbalance = |load: &RouterLoad| {
            let most = load.counts.iter().max().copied().unwrap_or(0);
            most as f64 * load.counts.len() as f64 / pairs(load).max(1) as f64
        };
        let idle = |load: &RouterLoad| load.counts.iter().filter(|&&count| count == 0).count();
        let tokens: f64 = loads.iter().map(|load| pairs(load) as f64 / load.chosen as f64).sum();
        let rows: i64 = loads.iter().map(|load| load.rows).sum();
        Some(RouterMetrics {
            imbalance: loads.iter().map(imbalance).fold(0.0, f64::max),
            idle: loads.iter().map(idle).sum(),
            entropy: loads.iter().map(|load| load.entropy).sum::<f64>() / tokens,
            padding: (rows - all) as f64 / rows as f64,
        })
    }

    /// Returns the metrics by name.
    pub fn metrics(self) -> [(&'static str, f64); 4] {
        [
            ("router_imbalance", self.imbalance),
            ("router_idle_experts", self.idle as f64),
            ("router_entropy", self.entropy),
            ("router_padding", self.padding),
        ]
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn loads_of_ranks_are_added_by_router() {
        let load = |name: &str, counts: [i64; 4], rows, entropy| RouterLoad {
            name: name.into(),
            chosen: 2,
            counts: counts.to_vec(),
            rows,
            entropy,
        };
        let merged = RouterLoad::merge([
            load("a", [4, 0, 0, 0], 128, 1.0),
            load("b", [1, 1, 1, 1], 512, 2.0),
            load("a", [0, 2, 2, 0], 256, 3.0),
        ]);
        assert_eq!(merged[0], load("a", [4, 2, 2, 0], 384, 4.0));
        let metrics = RouterMetrics::of(&merged).unwrap();
        assert_eq!((metrics.imbalance, metrics.idle, metrics.entropy), (2.0, 1, 6.0 / 6.0));
        assert_eq!(metrics.padding, (896.0 - 12.0) / 896.0);
        assert_eq!(RouterMetrics::of(&[]), None);
        // The mean of [4, 2, 2, 0] is 2.
        assert_eq!(merged[0].bias_change(0.5), [-0.5, 0.0, 0.0, 0.5]);
    }
}
