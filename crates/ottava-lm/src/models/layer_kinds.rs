//! Layers that differ from others of their model: in the window of attention, and in rotary positions.

use super::{ConfigFile, DecoderConfig, Positions, RopeLengths, RopeScaling};
use crate::error::Result;
use ottava_tensor::ops::{rope_table, scale_columns};
use ottava_tensor::{DType, Device, Tensor};

/// A set of the layers of a model, whatever their number.
#[derive(Clone, Debug, PartialEq, Eq)]
pub enum LayerSet {
    /// No layer.
    None,
    /// All layers.
    All,
    /// All layers from this index on.
    From(usize),
    /// The last of each group of this many layers.
    Every(usize),
    /// All but the last of each group of this many layers.
    AllButEvery(usize),
    /// The layers for which this says so, by index.
    Listed(Vec<bool>),
}

impl LayerSet {
    /// Whether the layer `index` belongs to it.
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

    /// The layers with a window by `layer_types`, or `default` if the key is missing, of a model of `layers` layers.
    ///
    /// Errors if a type is not implemented, or there is not one for each layer.
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

impl DecoderConfig {
    /// The sliding window of the attention of the layer `index`.
    pub fn window_at(&self, index: usize) -> Option<usize> {
        self.window.filter(|_| self.local.contains(index))
    }

    /// The rotary positions of the layer `index`; `None` if it has none.
    pub fn rope_at(&self, index: usize) -> Option<&RopeScaling> {
        match (self.positions, &self.local_rope) {
            (Positions::Learned, _) => None,
            _ if self.unrotated.contains(index) => None,
            (_, Some(local)) if self.local.contains(index) => Some(local),
            _ => Some(&self.rope),
        }
    }
}

/// The cosines and sines of a model's rotary positions: a table for each kind of layers.
pub struct RopeTables(Vec<(RopeScaling, Tensor)>);

impl RopeTables {
    /// The tables of all layers, for sequences up to `seq_len`, in F32 or F64.
    pub fn new(config: &DecoderConfig, device: &Device, seq_len: usize, dtype: DType) -> Result<RopeTables> {
        let mut tables = RopeTables(Vec::new());
        let lengths = RopeLengths { max_positions: config.max_positions, seq_len };
        for rope in (0..config.layers).filter_map(|index| config.rope_at(index)) {
            if tables.of(rope).is_some() {
                continue;
            }
            let table = rope_table(device, &rope.inverse_frequencies(config.head_dim, lengths), seq_len, dtype)?;
            let width = table.shape()[1];
            let table = match rope.attention_factor() {
                1.0 => table,
                factor => scale_columns(&table, &Tensor::from_slice(device, &[width], &vec![factor as f32; width])?)?,
            };
            tables.0.push((rope.clone(), table));
        }
        Ok(tables)
    }

    fn of(&self, rope: &RopeScaling) -> Option<Tensor> {
        self.0.iter().find(|(known, _)| known == rope).map(|(_, table)| table.clone())
    }

    /// The table of the layer `index`; `None` without rotary positions.
    pub fn at(&self, config: &DecoderConfig, index: usize) -> Option<Tensor> {
        self.of(config.rope_at(index)?)
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
