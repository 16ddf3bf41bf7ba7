//! Shared by all launches: kernel sources with the common header, storage types as defines, grid sizes.

use crate::cuda::CudaDevice;
use crate::{DType, Error, Result, Tensor};

pub(crate) use crate::cuda::Defines;

/// Declares a static `SOURCE` (or another name): the common header, optional further headers, and the kernel file of this folder.
/// Names after a plus are macros of value 1 in the kernel source; those after `needs` are [`Feature`](crate::Feature)s of a GPU; constants after a semicolon are declared in Rust and as macros there.
macro_rules! kernel_source {
    ($name:literal $(needs [$($need:ident),*])? $(; $(#[$meta:meta])* const $constant:ident: $type:ty = $value:literal)*) => {
        kernel_source!(SOURCE, $name $(needs [$($need),*])? $(; $(#[$meta])* const $constant: $type = $value)*);
    };
    ($static:ident, $name:literal $(, $header:literal)* $(+ $define:ident)* $(needs [$($need:ident),*])? $(; $(#[$meta:meta])* const $constant:ident: $type:ty = $value:literal)*) => {
        $($(#[$meta])* const $constant: $type = $value;)*
        pub(crate) static $static: $crate::cuda::Source = $crate::cuda::Source {
            name: $name,
            text: concat!(
                $("#define ", stringify!($define), " 1\n",)*
                $("#define ", stringify!($constant), " ", $value, "\n",)*
                include_str!("../common.cuh"),
                "\n",
                $(include_str!(concat!("../", $header)), "\n",)*
                include_str!(concat!($name, ".cu"))
            ),
            needs: &[$($($crate::Feature::$need),*)?],
        };
    };
}
pub(crate) use kernel_source;

/// Default number of threads per block.
pub(crate) const BLOCK: u32 = 256;

/// Side of the tiles in `destination.cuh`.
pub(crate) const TILE: usize = 128;

/// A one-dimensional grid with one thread per element and at most 16 blocks per multiprocessor, whose threads stride over larger tensors.
pub(crate) fn elements(gpu: &CudaDevice, n: usize) -> [u32; 3] {
    at_most(gpu, 16, n.div_ceil(BLOCK as usize))
}

/// As [`elements`], for kernels whose threads take eight neighbouring elements at a time.
pub(crate) fn elements_by_eight(gpu: &CudaDevice, n: usize) -> [u32; 3] {
    elements(gpu, n.div_ceil(8))
}

/// A grid for kernels that only read: one block for each of `n` pieces, at most the 8 per multiprocessor that run at once.
pub(crate) fn readers(gpu: &CudaDevice, n: usize) -> [u32; 3] {
    at_most(gpu, 8, n)
}

fn at_most(gpu: &CudaDevice, per_multiprocessor: usize, blocks: usize) -> [u32; 3] {
    [blocks.clamp(1, gpu.sm_count() * per_multiprocessor) as u32, 1, 1]
}

/// Threads of a block that keeps a row of `n` elements in registers, `each` per thread, up to 8192 elements.
pub(crate) fn row_threads(n: usize, each: usize) -> u32 {
    (n.div_ceil(each).next_multiple_of(32)).clamp(32, 8192 / each) as u32
}

/// Whether all tensors are aligned to 16 bytes, which views of rows may not be.
pub(crate) fn aligned(tensors: &[&Tensor]) -> bool {
    tensors.iter().all(|t| t.device_ptr() % 16 == 0)
}

/// `-DX=…` for the storage type. F64 exists on the CPU only.
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

pub(crate) const STORAGE: &[Defines] = &[&[("X", "f32")], &[("X", "f16")], &[("X", "bf16")]];

#[cfg(test)]
mod tests {
    use crate::DType;
    use crate::cuda::{CudaDevice, GpuModel};

    #[test]
    fn grids_are_bounded_by_the_multiprocessors_of_the_device() {
        let gpu = |sm_count| CudaDevice::dry(GpuModel { sm_count, ..GpuModel::h200() });
        let h200 = gpu(132);
        assert_eq!([1, 256, 257, 1 << 30].map(|n| super::elements(&h200, n)[0]), [1, 1, 2, 2112]);
        assert_eq!(super::readers(&h200, 1 << 30), [1056, 1, 1]);
        assert_eq!(super::elements_by_eight(&gpu(10), 1 << 30), [160, 1, 1]);
    }

    #[test]
    fn headers_agree_with_rust_on_constants() {
        let (common, destination) = (include_str!("common.cuh"), include_str!("destination.cuh"));
        for (name, dtype) in [("f16", DType::F16), ("e4m3", DType::E4M3), ("e5m2", DType::E5M2)] {
            let largest = dtype.max_finite().unwrap();
            let line =
                format!("template <> __device__ constexpr float max_finite<{name}>() {{ return {largest:.1}f; }}");
            assert!(common.contains(&line), "{line}");
        }
        assert!(destination.contains(&format!("#define TILE {}\n", super::TILE)));
        let line = format!("#define STRIP {}\n", crate::ops::rmsnorm::STRIP);
        assert!(include_str!("rmsnorm/rmsnorm.cu").contains(&line));
        let line = format!("#define IGNORE_INDEX {}\n", crate::ops::IGNORE_INDEX);
        assert!(include_str!("cross_entropy/cross_entropy.cu").contains(&line));
    }
}
