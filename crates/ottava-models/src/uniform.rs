//! Models with identical layers. Some file formats can describe only such models, since they hold one size for all layers.

use crate::layers::{HeadsSpec, MlpSpec};
use crate::{BranchSpec, DecoderConfig, LayerSpec, RopeScaling, SublayerSpec};

/// A model in which each layer is attention and then an MLP, with the same sizes in all layers. Windows and rotary positions may differ by layer.
#[derive(Clone, Copy)]
pub struct Uniform<'a> {
    /// The attention of the first layer.
    pub heads: &'a HeadsSpec,
    /// The MLP of all layers.
    pub mlp: &'a MlpSpec,
    /// The rotary positions of the model.
    pub rope: &'a RopeScaling,
}

impl<'a> Uniform<'a> {
    /// Returns the uniform model of `sizes`. Returns `None` if layers have other sublayers or different sizes, or if the model has no rotary
    /// positions.
    pub fn of(sizes: &'a DecoderConfig) -> Option<Uniform<'a>> {
        let (heads, mlp) = parts(sizes.layers.first()?)?;
        let alike = |layer: &LayerSpec| {
            let of_layer = parts(layer);
            of_layer.is_some_and(|(own, of_own)| of_own == mlp && HeadsSpec { window: heads.window, ..*own } == *heads)
        };
        sizes.layers.iter().all(alike).then_some(Uniform { heads, mlp, rope: sizes.rope()? })
    }
}

/// Returns attention and MLP of a layer, if the layer has two branches with one of them each.
fn parts(layer: &LayerSpec) -> Option<(&HeadsSpec, &MlpSpec)> {
    let [attention, mlp] = layer.branches.as_slice() else { return None };
    let has_own_norms = |branch: &BranchSpec| !branch.sublayer_norms.is_empty();
    if layer.parallel || layer.scale.is_some() || layer.branches.iter().any(has_own_norms) {
        return None;
    }
    match (attention.sublayers.as_slice(), mlp.sublayers.as_slice()) {
        ([SublayerSpec::Heads(heads, _)], [SublayerSpec::Mlp(mlp)]) => Some((heads, mlp)),
        _ => None,
    }
}
