//! Sets of adapters that share a model. The layers of the model have the adapters of one set at a time.

use super::{Decoder, Span};
use crate::DecoderConfig;
use crate::layers::{Adaptable, LayerAdapter};
use ottava_common::error::{Error, Result};
use ottava_recipe::lora::Lora;
use ottava_recipe::param::{Purpose, WeightSource};

/// The adapters of the linears, experts and routers of a model, in the order of forward. A layer without an adapter has `None`.
pub struct Adapters(Vec<Option<LayerAdapter>>);

impl Decoder {
    /// Builds and loads the adapters of `lora` for the layers of this model, on its device. The model must be built with
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
        like.visit_adapted(&mut |layer| adapters.0.push(layer.exchange_adapter(None)));
        assert!(like.parameters().is_empty(), "`linears_mut` of each layer visits all of its layers with adapters");
        Ok(adapters)
    }

    /// Swaps the adapters of the layers with `adapters`. An empty `adapters` removes the adapters of the layers. If the layers had no adapters,
    /// each entry is `None` afterwards.
    pub fn exchange_adapters(&mut self, adapters: &mut Adapters) {
        let mut next = std::mem::take(&mut adapters.0).into_iter();
        self.visit_adapted(&mut |layer| adapters.0.push(layer.exchange_adapter(next.next().flatten())));
    }

    fn visit_adapted(&mut self, visit: &mut dyn FnMut(&mut dyn Adaptable)) {
        self.stages.iter_mut().for_each(|stage| stage.linears_mut(&mut |layer| visit(layer)));
    }
}
