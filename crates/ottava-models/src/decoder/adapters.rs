//! Sets of adapters that share a model. The linears of the model have the adapters of one set at a time.

use super::{Decoder, Span};
use crate::DecoderConfig;
use crate::layers::Adapter;
use ottava_common::error::{Error, Result};
use ottava_recipe::lora::Lora;
use ottava_recipe::param::{Purpose, WeightSource};

/// The adapters of the linears of a model, in the order of forward. A linear without an adapter has `None`.
pub struct Adapters(Vec<Option<Adapter>>);

impl Decoder {
    /// Builds and loads the adapters of `lora` for the linears of this model, on its device. The model must be built with
    /// [`Lora::of_no_linear`]. [`Decoder::exchange_adapters`] puts the adapters into the model.
    ///
    /// If ranks divide the model, each rank builds and loads its parts.
    ///
    /// Errors with [`Error::Config`] if a target of `lora` is not a linear of the model, if `lora` trained modules whole, or if the model was not built
    /// with [`Lora::of_no_linear`].
    pub fn load_adapters(&self, lora: &Lora, weights: &mut dyn WeightSource) -> Result<Adapters> {
        if self.config.lora != Some(Lora::of_no_linear()) {
            return Err(Error::Config("adapters are loaded beside a model that is built for them".into()));
        }
        if !lora.modules_to_save.is_empty() {
            return Err(Error::Config(format!(
                "the adapter has modules that were trained whole (`modules_to_save`: {}), and adapters that are loaded beside a model share its embedding, \
                 head and norms; load this adapter alone with --adapter, or merge it with `ottava merge`",
                lora.modules_to_save.join(", ")
            )));
        }
        let config = DecoderConfig { lora: Some(lora.clone()), ..self.config.clone() };
        // The other parameters of this second model are not loaded and take no memory.
        let (whole, ranks) = ([Span::whole(config.layers.len())], self.ranks.clone());
        let mut like = Decoder::staged(&config, &self.recipe, &self.device, Purpose::Infer, 1, &whole, ranks)?;
        like.parameters().into_iter().try_for_each(|param| param.load_whole(weights))?;
        let mut adapters = Adapters(Vec::new());
        like.visit_adapters(&mut |adapter| adapters.0.push(adapter.take()));
        assert!(like.parameters().is_empty(), "`linears_mut` of each layer visits all of its linears");
        Ok(adapters)
    }

    /// Swaps the adapters of the linears with `adapters`. An empty `adapters` removes the adapters of the linears. If the linears had no adapters,
    /// each entry is `None` afterwards.
    pub fn exchange_adapters(&mut self, adapters: &mut Adapters) {
        let mut next = std::mem::take(&mut adapters.0).into_iter();
        self.visit_adapters(&mut |adapter| adapters.0.push(std::mem::replace(adapter, next.next().flatten())));
    }

    fn visit_adapters(&mut self, visit: &mut dyn FnMut(&mut Option<Adapter>)) {
        self.stages.iter_mut().for_each(|stage| stage.linears_mut(&mut |linear| visit(linear.adapter_mut())));
    }
}
