//! Tables of a model's positions: cosines and sines of rotary positions, and factors of queries.

use crate::layers::{HeadsSpec, QueryGrowth, Rotary};
use crate::spec::RopeSpec;
use crate::{DecoderConfig, RopeLengths, RopeScaling};
use ottava_common::error::Result;
use ottava_tensor::ops::{factor_table, rope_table, scale_columns};
use ottava_tensor::{DType, Device, Tensor};

/// The tables of a model's positions: the cosines and sines for each combination of scaling and head size, and the growth of queries.
pub struct RopeTables {
    rotations: Vec<Table>,
    /// Each growth with its head size.
    growths: Vec<(QueryGrowth, usize, Tensor)>,
}

/// The table of one scaling and one head size.
struct Table {
    scaling: RopeScaling,
    /// The number of elements of a head to which rotary positions apply.
    dim: usize,
    values: Tensor,
}

impl RopeTables {
    /// Computes the tables of all layers, for sequences up to `seq_len`, in F32 or F64.
    pub fn new(config: &DecoderConfig, device: &Device, seq_len: usize, dtype: DType) -> Result<RopeTables> {
        let mut tables = RopeTables { rotations: Vec::new(), growths: Vec::new() };
        for layer in &config.layers {
            let Some(&HeadsSpec { growth: Some(growth), head_dim, .. }) = layer.heads() else { continue };
            if tables.growth(Some(growth), head_dim).is_none() {
                let table = factor_table(device, |at| growth.factor(at), [seq_len, head_dim], dtype)?;
                tables.growths.push((growth, head_dim, table));
            }
        }
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
            tables.rotations.push(Table { scaling: scaling.clone(), dim, values });
        }
        Ok(tables)
    }

    fn find(&self, scaling: &RopeScaling, dim: usize) -> Option<&Table> {
        self.rotations.iter().find(|table| table.dim == dim && table.scaling == *scaling)
    }

    /// Returns the tables of a layer with the positions `rope`, for `dim` elements of a head. Panics if no layer of the model needs these tables.
    pub fn of(&self, config: &DecoderConfig, rope: RopeSpec, dim: usize) -> Rotary {
        let Table { values, .. } = self.find(&config.ropes[rope.rope], dim).expect("each layer has a table");
        Rotary { table: values.clone(), pairs: rope.pairs }
    }

    /// Returns the factors of queries of heads with `dim` elements, if they grow.
    pub fn growth(&self, growth: Option<QueryGrowth>, dim: usize) -> Option<Tensor> {
        let growth = growth?;
        self.growths.iter().find(|(of, head, _)| *of == growth && *head == dim).map(|(_, _, table)| table.clone())
    }
}
