//! The memory of the caches of all layers, which a phase without a cache may use.

use super::{KvBlocks, counters};
use crate::ops::AttentionSpec;
use crate::{DType, Device, Result, Suspended, Tensor};

/// The shape of the keys and values of a layer, `[blocks, 2, H_kv, block size, D]`.
type Shape = [usize; 5];

/// The blocks of all layers, whose memory other tensors use for a while.
pub struct SuspendedKv {
    data: Suspended,
    scale_inv: Option<Suspended>,
    arrived: Vec<Tensor>,
    shapes: Vec<Shape>,
}

impl KvBlocks {
    /// Allocates blocks of `block_size` tokens in type `dtype`, for layers with these specs and numbers of blocks. The keys and values of all layers lie
    /// in one piece of memory, so that tensors of another phase leave no gaps in it.
    pub fn of_layers(
        device: &Device,
        layers: &[(AttentionSpec, usize)],
        block_size: usize,
        dtype: DType,
    ) -> Result<Vec<KvBlocks>> {
        let shape = |&(spec, blocks): &(AttentionSpec, usize)| [blocks, 2, spec.kv_heads, block_size, spec.head_dim];
        let shapes: Vec<Shape> = layers.iter().map(shape).collect();
        // Rows that no token has written are never read. They are zeros so that caches can be compared.
        let zeros = |sizes: fn(&Shape) -> usize, dtype| {
            Tensor::zeros(device, &[shapes.iter().map(sizes).sum::<usize>()], dtype)
        };
        let scale_inv = (dtype == DType::E4M3).then(|| zeros(scales, DType::F32)).transpose()?;
        let counter =
            |(spec, blocks): &(AttentionSpec, usize)| Tensor::zeros(device, &[*blocks, counters(spec)], DType::I32);
        let arrived = layers.iter().map(counter).collect::<Result<_>>()?;
        divide(zeros(values, dtype)?, scale_inv, arrived, &shapes)
    }
}

impl SuspendedKv {
    /// Returns the memory of the keys and values of `layers`, which are all layers of [`KvBlocks::of_layers`], to the device.
    pub fn new(layers: Vec<KvBlocks>) -> Result<SuspendedKv> {
        let shapes = layers.iter().map(|layer| layer.data.dims("cache")).collect::<Result<_>>()?;
        let (mut data, mut scale_inv, mut arrived) = (Vec::new(), Vec::new(), Vec::new());
        for layer in layers {
            data.push(layer.data);
            scale_inv.extend(layer.scale_inv);
            arrived.push(layer.arrived);
        }
        let scale_inv = (!scale_inv.is_empty()).then(|| Tensor::join(scale_inv)).transpose()?;
        Ok(SuspendedKv {
            data: Tensor::join(data)?.suspend(),
            scale_inv: scale_inv.map(Tensor::suspend),
            arrived,
            shapes,
        })
    }

    /// Returns the blocks of all layers, and whether they lie at other addresses than before, so that graphs that were captured with them are no longer
    /// valid. The content of keys and values is undefined.
    ///
    /// Errors as [`Suspended::resume`].
    pub fn resume(self) -> Result<(Vec<KvBlocks>, bool)> {
        let data = self.data.resume()?;
        let scale_inv = self.scale_inv.as_ref().map(Suspended::resume).transpose()?;
        let has_moved = !self.data.is_place_of(&data)
            || self.scale_inv.as_ref().zip(scale_inv.as_ref()).is_some_and(|(of, resumed)| !of.is_place_of(resumed));
        Ok((divide(data, scale_inv, self.arrived, &self.shapes)?, has_moved))
    }
}

/// The number of keys' and values' elements.
fn values(shape: &Shape) -> usize {
    shape.iter().product()
}

/// The number of scales of codes.
fn scales(shape: &Shape) -> usize {
    shape[..4].iter().product()
}

/// Divides the memory of all layers.
fn divide(data: Tensor, scale_inv: Option<Tensor>, arrived: Vec<Tensor>, shapes: &[Shape]) -> Result<Vec<KvBlocks>> {
    let parts = |whole: Tensor, size: fn(&Shape) -> usize, dims: usize| -> Result<Vec<Tensor>> {
        let mut end = 0;
        let range = |shape| {
            let start = end;
            end += size(shape);
            start..end
        };
        let ranges: Vec<_> = shapes.iter().map(range).collect();
        let parts = whole.split(&ranges)?.into_iter().zip(shapes);
        parts.map(|(part, shape)| part.reshape(&shape[..dims])).collect()
    };
    let scales: Vec<Option<Tensor>> = match scale_inv {
        Some(scale_inv) => parts(scale_inv, scales, 4)?.into_iter().map(Some).collect(),
        None => shapes.iter().map(|_| None).collect(),
    };
    let layers = parts(data, values, 5)?.into_iter().zip(scales).zip(arrived);
    Ok(layers.map(|((data, scale_inv), arrived)| KvBlocks { data, scale_inv, arrived }).collect())
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::cuda::GpuModel;

    #[test]
    fn a_cache_says_whether_it_has_moved() {
        let device = Device::dry_gpu(GpuModel::h200());
        let layers = [(AttentionSpec::causal(8, 2, 128), 1000); 2];
        for dtype in [DType::BF16, DType::E4M3] {
            let cache = KvBlocks::of_layers(&device, &layers, 16, dtype).unwrap();
            let (cache, has_moved) = SuspendedKv::new(cache).unwrap().resume().unwrap();
            assert!(!has_moved, "{dtype}");
            let of_scales = cache.last().unwrap().scale_inv.as_ref().map(Tensor::len);
            let suspended = SuspendedKv::new(cache).unwrap();
            // Another tensor takes the place of the scales, or of keys and values.
            let size = of_scales.map_or(layers.len() * 1000 * 2 * 2 * 16 * 128 / 2, |scales| layers.len() * scales);
            let _other = Tensor::empty(&device, &[size], DType::F32).unwrap();
            assert!(suspended.resume().unwrap().1, "{dtype}");
        }
    }
}
