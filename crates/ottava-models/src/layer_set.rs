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
        let types = ["full_attention", "sliding_attention"];
        Ok(LayerSet::of_types(file, "layer_types", layers, types)?.unwrap_or(default))
    }

    /// Returns the layers without rotary positions by `no_rope_layers`, or by `no_rope_layer_interval` if the list is null.
    ///
    /// Errors if the list has fewer entries than the model has `layers`, or if the interval is 0.
    pub(super) fn unrotated(file: &ConfigFile, layers: usize) -> Result<LayerSet> {
        let Some(rotated) = file.nullable::<Vec<u8>>("no_rope_layers")? else {
            return LayerSet::unrotated_by_interval(file);
        };
        if rotated.len() < layers {
            let entries = rotated.len();
            let text = format!("`no_rope_layers` has {entries} entries, and `num_hidden_layers` is {layers}");
            return Err(file.error(&text));
        }
        // A 1 marks a layer with rotary positions.
        Ok(LayerSet::Listed(rotated.iter().map(|&rotated| rotated == 0).collect()))
    }

    /// Returns the layers without rotary positions by `no_rope_layer_interval`.
    pub(super) fn unrotated_by_interval(file: &ConfigFile) -> Result<LayerSet> {
        match file.required("no_rope_layer_interval")? {
            0 => Err(file.error("`no_rope_layer_interval` is 0; it is a number of layers")),
            interval => Ok(LayerSet::Every(interval)),
        }
    }

    /// Returns the layers of the type `inside` by the list under `key`, in which other layers have the type `outside`. Returns `None` if the key is
    /// missing.
    ///
    /// Errors as [`LayerSet::with_window`].
    pub(super) fn of_types(
        file: &ConfigFile,
        key: &str,
        layers: usize,
        [outside, inside]: [&str; 2],
    ) -> Result<Option<LayerSet>> {
        let types: Option<Vec<String>> = file.optional(key, None)?;
        let Some(types) = types else { return Ok(None) };
        if types.len() != layers {
            let text = format!("`{key}` has {} entries, and `num_hidden_layers` is {layers}", types.len());
            return Err(file.error(&text));
        }
        let is_inside = |name: &String| match type_of(name) {
            name if name == inside => Ok(true),
            name if name == outside => Ok(false),
            other => {
                Err(file.error(&format!("`{key}` has \"{other}\"; \"{outside}\" and \"{inside}\" are implemented")))
            }
        };
        Ok(Some(LayerSet::Listed(types.iter().map(is_inside).collect::<Result<_>>()?)))
    }
}

/// Returns the name of a layer type in transformers 5. Transformers 4 has other names for some types.
pub(super) fn type_of(name: &str) -> &str {
    match name {
        "mamba" => "linear_attention",
        "attention" => "full_attention",
        name => name,
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
