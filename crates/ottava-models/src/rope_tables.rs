//! Tables of the cosines and sines of a model's rotary positions.

use crate::layers::Rotary;
use crate::rope::QueryGrowth;
use crate::spec::RopeSpec;
use crate::{DecoderConfig, RopeLengths, RopeScaling};
use ottava_common::error::Result;
use ottava_tensor::ops::{factor_table, rope_table, scale_columns};
use ottava_tensor::{DType, Device, Tensor};

/// The cosines and sines of a model's rotary positions: one table for each combination of scaling and head size.
pub struct RopeTables(Vec<Table>);

/// The table of one scaling and one head size.
struct Table {
    scaling: RopeScaling,
    /// The number of elements of a head to which rotary positions apply.
    dim: usize,
    values: Tensor,
    /// The table of the growth of queries, if they grow.
    growth: Option<Tensor>,
}

impl RopeTables {
    /// Computes the tables of all layers, for sequences up to `seq_len`, in F32 or F64.
    pub fn new(config: &DecoderConfig, device: &Device, seq_len: usize, dtype: DType) -> Result<RopeTables> {
        let mut tables = RopeTables(Vec::new());
        let lengths = RopeLengths { max_positions: config.max_positions, seq_len };
        for sublayer in config.sublayers() {
            let (Some(rope), dim) = (sublayer.rope(), sublayer.rotary_dim()) else { continue };
            let scaling = &config.ropes[rope.rope];
            if tables.find(scaling, dim).is_some() {
                continue;
            }
            let table = rope_table(device, &scaling.inverse_frequencies(dim, lengths), seq_len, dtype)?;
            let width = table.shape()[1];
            let values = match scaling.attention_factor() {
                1.0 => table,
                factor => scale_columns(&table, &Tensor::from_slice(device, &[width], &vec![factor as f32; width])?)?,
            };
            let factors = |of: QueryGrowth| factor_table(device, |at| of.factor(at), [seq_len, dim], dtype);
            let growth = scaling.growth.map(factors).transpose()?;
            tables.0.push(Table { scaling: scaling.clone(), dim, values, growth });
        }
        Ok(tables)
    }

    fn find(&self, scaling: &RopeScaling, dim: usize) -> Option<&Table> {
        self.0.iter().find(|table| table.dim == dim && table.scaling == *scaling)
    }

    /// Returns the tables of a layer with the positions `rope`, for `dim` elements of a head. Panics if no layer of the model needs these tables.
    pub fn of(&self, config: &DecoderConfig, rope: RopeSpec, dim: usize) -> Rotary {
        let Table { values, growth, .. } = self.find(&config.ropes[rope.rope], dim).expect("each layer has a table");
        Rotary { table: values.clone(), pairs: rope.pairs, growth: growth.clone() }
    }
}
