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

    /// Returns the blocks of all layers. The content of keys and values is undefined.
    ///
    /// Errors as [`Suspended::resume`].
    pub fn resume(self) -> Result<Vec<KvBlocks>> {
        let scale_inv = self.scale_inv.map(|scale_inv| scale_inv.resume()).transpose()?;
        divide(self.data.resume()?, scale_inv, self.arrived, &self.shapes)
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
