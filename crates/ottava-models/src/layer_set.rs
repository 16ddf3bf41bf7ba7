//! Sets of layers, for settings that differ by layer.

use crate::ConfigFile;
use ottava_common::error::Result;

/// A sliding window and the layers that have it.
#[derive(Clone, Debug, PartialEq, Eq)]
pub(super) struct Window {
    /// The number of tokens that a token sees, itself included. `None` means all tokens.
    pub(super) size: Option<usize>,
    /// The layers whose attention has the window.
    pub(super) layers: LayerSet,
}

impl Window {
    /// Returns the window of the layer `index`, if it has one.
    pub(super) fn at(&self, index: usize) -> Option<usize> {
        self.size.filter(|_| self.layers.contains(index))
    }
}

/// A set of layers, for models with any number of layers.
#[derive(Clone, Debug, PartialEq, Eq)]
pub enum LayerSet {
    /// No layer.
    None,
    /// All layers.
    All,
    /// All layers with this index or a larger one.
    From(usize),
    /// The last layer of each group of this many layers.
    Every(usize),
    /// All layers except the last of each group of this many layers.
    AllButEvery(usize),
    /// The layers whose entry is true, by index.
    Listed(Vec<bool>),
}

impl LayerSet {
    /// Returns whether the layer `index` belongs to the set.
    pub fn contains(&self, index: usize) -> bool {
        match self {
            LayerSet::None => false,
            LayerSet::All => true,
            LayerSet::From(first) => index >= *first,
            LayerSet::Every(count) => (index + 1).is_multiple_of(*count),
            LayerSet::AllButEvery(count) => !(index + 1).is_multiple_of(*count),
            LayerSet::Listed(layers) => layers.get(index).copied().unwrap_or(false),
        }
    }

    /// Returns the layers with a window by `layer_types`, or `default` if the key is missing. The model has `layers` layers.
    ///
    /// Errors if a type is not implemented, or if the number of types is not the number of layers.
    pub(super) fn with_window(file: &ConfigFile, layers: usize, default: LayerSet) -> Result<LayerSet> {
        let types: Option<Vec<String>> = file.optional("layer_types", None)?;
        let Some(types) = types else { return Ok(default) };
        if types.len() != layers {
            let text = format!("`layer_types` has {} entries, and `num_hidden_layers` is {layers}", types.len());
            return Err(file.error(&text));
        }
        let is_local = |name: &String| match name.as_str() {
            "sliding_attention" => Ok(true),
            "full_attention" => Ok(false),
            other => Err(file.error(&format!(
                "`layer_types` has \"{other}\"; \"full_attention\" and \"sliding_attention\" are implemented"
            ))),
        };
        Ok(LayerSet::Listed(types.iter().map(is_local).collect::<Result<_>>()?))
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn sets_contain_the_layers_that_their_names_say() {
        let of = |set: LayerSet| (0..7).map(|i| if set.contains(i) { 'x' } else { '.' }).collect::<String>();
        assert_eq!(of(LayerSet::None), ".......");
        assert_eq!(of(LayerSet::All), "xxxxxxx");
        assert_eq!(of(LayerSet::From(5)), ".....xx");
        assert_eq!(of(LayerSet::Every(3)), "..x..x.");
        assert_eq!(of(LayerSet::AllButEvery(3)), "xx.xx.x");
        assert_eq!(of(LayerSet::Listed(vec![true, false, true])), "x.x....");
    }
}
