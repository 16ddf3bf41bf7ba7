//! Tables of the cosines and sines of a model's rotary positions.

use crate::{DecoderConfig, RopeLengths, RopeScaling};
use ottava_common::error::Result;
use ottava_tensor::ops::{rope_table, scale_columns};
use ottava_tensor::{DType, Device, Tensor};

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
            let table = rope_table(device, &rope.inverse_frequencies(config.rotary_dim(), lengths), seq_len, dtype)?;
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
