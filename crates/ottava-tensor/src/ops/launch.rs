//! Helpers for all launches: storage types as defines, and grid sizes.

use crate::cuda::CudaDevice;
use crate::{DType, Error, Result, Tensor};

pub(crate) use crate::cuda::Defines;

/// The default number of threads per block.
pub(crate) const BLOCK: u32 = 256;

/// The side of the tiles in `destination.cuh`.
pub(crate) const TILE: usize = 128;

/// Returns a one-dimensional grid with one thread per element, but at most 16 blocks per multiprocessor. Threads stride over larger tensors.
pub(crate) fn elements(gpu: &CudaDevice, n: usize) -> [u32; 3] {
    at_most(gpu, 16, n.div_ceil(BLOCK as usize))
}

/// Returns the grid of [`elements`] for kernels in which each thread processes eight neighbouring elements at a time.
pub(crate) fn elements_by_eight(gpu: &CudaDevice, n: usize) -> [u32; 3] {
    elements(gpu, n.div_ceil(8))
}

/// Returns a grid for kernels that only read: one block for each of `n` pieces, but at most the 8 blocks per multiprocessor that run at once.
pub(crate) fn readers(gpu: &CudaDevice, n: usize) -> [u32; 3] {
    at_most(gpu, 8, n)
}

fn at_most(gpu: &CudaDevice, per_multiprocessor: usize, blocks: usize) -> [u32; 3] {
    [blocks.clamp(1, gpu.sm_count() * per_multiprocessor) as u32, 1, 1]
}

/// Returns the number of threads of a block that keeps a row of `n` elements in registers, `each` per thread. A row has up to 8192 elements.
pub(crate) fn row_threads(n: usize, each: usize) -> u32 {
    (n.div_ceil(each).next_multiple_of(32)).clamp(32, 8192 / each) as u32
}

/// Returns whether all tensors are aligned to 16 bytes. Views of rows may be unaligned.
pub(crate) fn aligned(tensors: &[&Tensor]) -> bool {
    tensors.iter().all(|t| t.device_ptr() % 16 == 0)
}

/// Returns `-DX=…` for a storage type. F64 exists on the CPU only.
pub(crate) fn storage(dtype: DType) -> Result<Defines> {
    Ok(match dtype {
        DType::F32 => STORAGE[0],
        DType::F16 => STORAGE[1],
        DType::BF16 => STORAGE[2],
        other => {
            return Err(Error::DType {
                what: "a tensor on the GPU".into(),
                expected: "float32, float16 or bfloat16".into(),
                got: other,
            });
        }
    })
}

/// Returns the variant of a kernel for a storage type and the value of its second define. `variants` lists all pairs.
pub(crate) fn variant(variants: &[Defines], dtype: DType, value: &str) -> Result<Defines> {
    let storage = storage(dtype)?[0];
    let is_wanted = |variant: &&Defines| variant[0] == storage && variant[1].1 == value;
    Ok(variants.iter().find(is_wanted).expect("all are listed"))
}

/// The variants of kernels, one for each storage type.
pub(crate) const STORAGE: &[Defines] = &[&[("X", "f32")], &[("X", "f16")], &[("X", "bf16")]];

/// The only variant of kernels with fixed types.
pub(crate) const UNTYPED: &[Defines] = &[&[]];

#[cfg(test)]
mod tests {
    use crate::cuda::{CudaDevice, GpuModel, Source};

    #[test]
    fn grids_are_bounded_by_the_multiprocessors_of_the_device() {
        let gpu = |sm_count| CudaDevice::dry(GpuModel { sm_count, ..GpuModel::h200() });
        let h200 = gpu(132);
        assert_eq!([1, 256, 257, 1 << 30].map(|n| super::elements(&h200, n)[0]), [1, 1, 2, 2112]);
        assert_eq!(super::readers(&h200, 1 << 30), [1056, 1, 1]);
        assert_eq!(super::elements_by_eight(&gpu(10), 1 << 30), [160, 1, 1]);
    }

    /// Constants that kernels share with Rust are passed to the compiler as macros, so no kernel file repeats their values.
    #[test]
    fn no_kernel_file_repeats_a_constant_of_rust() {
        for module in crate::ops::kernels() {
            let Source { name, text, constants, .. } = module.source;
            for (constant, _) in *constants {
                assert!(!text.contains(&format!("#define {constant} ")), "{name} defines {constant} itself");
            }
            for literal in ["448.0f", "57344.0f", "65504.0f"] {
                assert!(!text.contains(literal), "{name} says {literal}, which is MAX_E4M3, MAX_E5M2 or MAX_F16");
            }
        }
    }
}
