//! Measurements and scales of all stages of a model. Each rank of a pipeline has the measurements and scales of its stages.

use crate::Partition;
use ottava_common::error::Result;
use ottava_models::Decoder;
use ottava_recipe::scaling::{CastCounts, CastRecord, RouterLoad};
use ottava_tensor::comm::Axis;
use ottava_tensor::{DType, Device, Tensor};
use std::collections::HashMap;

/// The bits of a [`CastRecord`], because text has no infinities: name, largest, amax, scale and counts.
type RecordBits = (String, u32, u32, Option<u32>, [i64; 4]);

/// The name of the array that has one value for all slots.
const UPDATES: &str = "scaling.updates";

impl Partition {
    /// Returns the measurements of each cast over all ranks, in the order of the model. All ranks call it.
    pub fn casts(&self, model: &mut Decoder) -> Result<Vec<CastRecord>> {
        let own = model.scaling().measured(self)?;
        if self.ranks().pipeline().size() == 1 {
            return Ok(own);
        }
        let sent: Vec<RecordBits> = own.into_iter().map(bits).collect();
        let all = self.ranks().of_stages("measurements of casts", &sent)?;
        let mut records: HashMap<_, _> = all.into_iter().flatten().map(|bits| (bits.0.clone(), record(bits))).collect();
        Ok(self.cast_names(model).iter().filter_map(|name| records.remove(name)).collect())
    }

    /// Returns the choices of each router of the model since the last call, over all ranks. If the model has experts, all ranks call it.
    pub fn router_loads(&self, model: &mut Decoder) -> Result<Vec<RouterLoad>> {
        let own = model.scaling().router_loads()?;
        Ok(RouterLoad::merge(self.ranks().all("choices of routers", Ok(own))?.into_iter().flatten()))
    }

    /// Returns the names of the casts of all stages, in the order of the model.
    pub fn cast_names(&self, model: &Decoder) -> Vec<String> {
        model.description().casts.iter().map(|(name, _)| name.clone()).collect()
    }

    /// Returns [`ScalingState::arrays`](ottava_recipe::scaling::ScalingState::arrays) of all stages. The slots are in the order of
    /// [`Partition::cast_names`]. All ranks call it.
    pub fn scaling_arrays(&self, model: &mut Decoder) -> Result<Vec<(String, Tensor)>> {
        let own = model.scaling().arrays()?;
        if self.ranks().pipeline().size() == 1 {
            return Ok(own);
        }
        let slots = model.scaling().names();
        let of_array = |(name, array): &(String, Tensor)| (name.clone(), array.dtype().to_string(), array.bytes());
        let heads: (_, Vec<_>) = (slots, own.iter().map(of_array).collect());
        let all_heads = self.ranks().of_stages("scaling arrays of stages", &heads)?;
        let mut bytes = Vec::new();
        own.iter().try_for_each(|(_, array)| array.read_bytes().map(|own| bytes.extend(own)))?;
        let all_bytes = self.ranks().group(&[Axis::Pipeline]).agree("values of scaling arrays", &bytes)?;
        let names = self.cast_names(model);
        let place: HashMap<_, _> = names.iter().enumerate().map(|(at, name)| (name.as_str(), at)).collect();
        let mut arrays: Vec<(String, DType, Vec<u8>)> = Vec::new();
        for ((slots, heads), bytes) in all_heads.iter().zip(&all_bytes) {
            let mut rest = bytes.as_slice();
            for (name, dtype, length) in heads {
                let (own, others) = rest.split_at(*length);
                rest = others;
                let dtype = [DType::F32, DType::I64].into_iter().find(|known| known.to_string() == *dtype);
                let dtype = dtype.expect("scaling arrays are F32 or I64");
                let columns = if name == UPDATES { 1 } else { slots.len() };
                let (size, rows) = (dtype.size(), own.len() / dtype.size() / columns.max(1));
                let at = arrays.iter().position(|(other, ..)| other == name).unwrap_or(arrays.len());
                let all = if name == UPDATES { 1 } else { names.len() };
                if at == arrays.len() {
                    arrays.push((name.clone(), dtype, vec![0; rows * all * size]));
                }
                let into = &mut arrays[at].2;
                for (i, value) in own.chunks_exact(size).enumerate() {
                    let column = if name == UPDATES { 0 } else { place[slots[i % columns].as_str()] };
                    let start = (i / columns * all + column) * size;
                    into[start..start + size].copy_from_slice(value);
                }
            }
        }
        let tensor = |(name, dtype, bytes): (String, DType, Vec<u8>)| {
            let (all, elements) = (names.len(), bytes.len() / dtype.size());
            let shape = if name == HISTORY { vec![elements / all.max(1), all] } else { vec![elements] };
            Ok((name, Tensor::from_bytes(&Device::Cpu, &shape, dtype, &bytes)?))
        };
        arrays.into_iter().map(tensor).collect()
    }
}

/// The name of the array with several rows.
const HISTORY: &str = "scaling.amax_history";

fn bits(record: CastRecord) -> RecordBits {
    let CastRecord { name, largest, amax, scale, counts } = record;
    let counts = [counts.elements, counts.saturated, counts.underflowed, counts.non_finite];
    (name, largest.to_bits(), amax.to_bits(), scale.map(f32::to_bits), counts)
}

fn record((name, largest, amax, scale, counts): RecordBits) -> CastRecord {
    let [elements, saturated, underflowed, non_finite] = counts;
    let counts = CastCounts { elements, saturated, underflowed, non_finite };
    let scale = scale.map(f32::from_bits);
    CastRecord { name, largest: f32::from_bits(largest), amax: f32::from_bits(amax), scale, counts }
}
