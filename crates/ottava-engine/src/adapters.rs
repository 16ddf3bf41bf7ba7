//! The adapters of an engine. They can be loaded and removed while requests run.

use crate::batching::Engine;
use crate::request::AdapterId;
use ottava_common::error::Result;
use ottava_models::{Adapters, Decoder};

/// Loads adapters that are open for the model of an engine.
pub type LoadAdapters = Box<dyn FnOnce(&Decoder) -> Result<Adapters> + Send>;

impl Engine {
    /// Adds `adapters`, which requests can then name. They must come from [`Decoder::load_adapters`] of this model.
    pub fn add_adapters(&mut self, adapters: Adapters) -> AdapterId {
        self.adapters.push(Some(adapters));
        AdapterId(self.adapters.len() - 1)
    }

    /// Loads adapters, which requests can then name. Returns the errors of `load`.
    pub fn load_adapters(&mut self, load: LoadAdapters) -> Result<AdapterId> {
        let adapters = load(&self.model)?;
        Ok(self.add_adapters(adapters))
    }

    /// Frees adapters that no request names. Later requests with this number are refused.
    pub fn remove_adapters(&mut self, id: AdapterId) {
        if self.adapter == Some(id) {
            self.set_adapter(None);
        }
        self.adapters[id.0] = None;
        // Captured steps of these adapters read their memory.
        self.steps.forget();
    }

    /// Moves the adapters of `adapter` into the linears of the model.
    pub(super) fn set_adapter(&mut self, adapter: Option<AdapterId>) {
        if adapter != self.adapter {
            // The first exchange takes the adapters out of the linears, and the second moves the new adapters in.
            for AdapterId(at) in [self.adapter, adapter].into_iter().flatten() {
                let adapters = self.adapters[at].as_mut().expect("adapters of requests are not removed");
                self.model.exchange_adapters(adapters);
            }
            self.adapter = adapter;
        }
    }
}
