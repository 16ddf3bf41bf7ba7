//! Layers that can have adapters.

use super::moe::{GroupedAdapter, GroupedLinear, Router};
use super::{Adapter, Linear};

/// The adapter of a layer.
pub enum LayerAdapter {
    /// The adapter of a linear or of a router.
    Linear(Box<Adapter>),
    /// The adapters of all experts.
    Experts(Box<GroupedAdapter>),
}

/// A layer that can have an adapter: a linear, a linear of experts, or a router.
pub trait Adaptable {
    /// Replaces the adapter, and returns the adapter that the layer had.
    ///
    /// Panics if `adapter` belongs to a layer of another kind.
    fn exchange_adapter(&mut self, adapter: Option<LayerAdapter>) -> Option<LayerAdapter>;
}

/// Replaces the adapter in `place`.
fn exchange(place: &mut Option<Adapter>, adapter: Option<LayerAdapter>) -> Option<LayerAdapter> {
    let adapter = adapter.map(|adapter| match adapter {
        LayerAdapter::Linear(adapter) => *adapter,
        LayerAdapter::Experts(_) => unreachable!("layers are visited in the same order"),
    });
    std::mem::replace(place, adapter).map(|adapter| LayerAdapter::Linear(Box::new(adapter)))
}

impl Adaptable for Linear {
    fn exchange_adapter(&mut self, adapter: Option<LayerAdapter>) -> Option<LayerAdapter> {
        exchange(self.adapter_mut(), adapter)
    }
}

impl Adaptable for Router {
    fn exchange_adapter(&mut self, adapter: Option<LayerAdapter>) -> Option<LayerAdapter> {
        exchange(self.adapter_mut(), adapter)
    }
}

impl Adaptable for GroupedLinear {
    fn exchange_adapter(&mut self, adapter: Option<LayerAdapter>) -> Option<LayerAdapter> {
        let adapter = adapter.map(|adapter| match adapter {
            LayerAdapter::Experts(adapter) => *adapter,
            LayerAdapter::Linear(_) => unreachable!("layers are visited in the same order"),
        });
        std::mem::replace(self.adapter_mut(), adapter).map(|adapter| LayerAdapter::Experts(Box::new(adapter)))
    }
}
