//! What every `cuda.rs` needs: sources with the common header, storage types as defines, grid sizes.

use crate::cuda::{KernelModule, Source};
use crate::{DType, Error, Result, Tensor};

pub(crate) use crate::cuda::Defines;

/// Declares `SOURCE`, the kernel file of this folder after the common header; or a static of another name, with more headers between.
macro_rules! kernel_source {
    ($name:literal) => {
        kernel_source!(SOURCE, $name);
    };
    ($static:ident, $name:literal $(, $header:literal)*) => {
        pub(crate) static $static: $crate::cuda::Source = $crate::cuda::Source {
            name: $name,
            text: concat!(
                include_str!("../common.cuh"),
                "\n",
                $(include_str!(concat!("../", $header)), "\n",)*
                include_str!(concat!($name, ".cu"))
            ),
        };
    };
}
pub(crate) use kernel_source;

/// Threads of a block, unless a kernel says otherwise.
pub(crate) const BLOCK: u32 = 256;

/// A one-dimensional grid with one thread per element, bounded so that large tensors are walked in strides.
pub(crate) fn elements(n: usize) -> [u32; 3] {
    [n.div_ceil(BLOCK as usize).clamp(1, 132 * 16) as u32, 1, 1]
}

/// As [`elements`], for kernels whose threads take eight neighbouring elements at a time.
pub(crate) fn eights(n: usize) -> [u32; 3] {
    elements(n.div_ceil(8))
}

/// A grid for kernels that only read, at most one block for each of `n` pieces. What fits on a GPU at once: more blocks cost more
/// than they bring.
pub(crate) fn readers(n: usize) -> [u32; 3] {
    [n.clamp(1, 132 * 8) as u32, 1, 1]
}

/// Threads of a block that holds a row of `n` elements in registers, `each` in a thread, as long as 8192 are enough.
pub(crate) fn row_threads(n: usize, each: usize) -> u32 {
    (n.div_ceil(each).next_multiple_of(32)).clamp(32, 8192 / each) as u32
}

/// Whether all tensors start at multiples of 16 bytes, as views of rows may not.
pub(crate) fn aligned(tensors: &[&Tensor]) -> bool {
    tensors.iter().all(|t| t.device_ptr() % 16 == 0)
}

/// `-DX=…` for the storage type. F64 exists on the CPU only.
pub(crate) fn storage(dtype: DType) -> Result<Defines> {
    Ok(match dtype {
        DType::F32 => &[("X", "f32")],
        DType::F16 => &[("X", "f16")],
        DType::BF16 => &[("X", "bf16")],
        other => {
            return Err(Error::DType {
                what: "a tensor on the GPU".into(),
                expected: "float32, float16 or bfloat16".into(),
                got: other,
            });
        }
    })
}

const STORAGE: &[Defines] = &[&[("X", "f32")], &[("X", "f16")], &[("X", "bf16")]];

/// Every kernel file with every set of defines it is compiled with, so that all can be compiled ahead of a run.
pub fn kernels() -> Vec<KernelModule> {
    use super::*;
    fn of(source: &'static Source, variants: impl IntoIterator<Item = Defines>) -> impl Iterator<Item = KernelModule> {
        variants.into_iter().map(move |defines| KernelModule { source, defines })
    }
    let typed: [&'static Source; 12] = [
        &add::SOURCE,
        &attention::SOURCE,
        &bias::SOURCE,
        &column_scales::SOURCE,
        &compress::SOURCE,
        &cross_entropy::SOURCE,
        &embedding::SOURCE,
        &gemm::SOURCE,
        &head_norm::SOURCE,
        &rmsnorm::SOURCE,
        &rope::SOURCE,
        &swiglu::SOURCE,
    ];
    let producers = [&quantize::SOURCE, &rmsnorm::FP8_SOURCE, &rope::FP8_SOURCE, &swiglu::FP8_SOURCE];
    let untyped = [&delayed_scaling::SOURCE, &random::SOURCE];
    let mut all: Vec<KernelModule> = Vec::new();
    all.extend(typed.into_iter().flat_map(|source| of(source, STORAGE.iter().copied())));
    all.extend(of(&adamw::SOURCE, adamw::variants()));
    all.extend(of(&cast::SOURCE, cast::VARIANTS.iter().copied()));
    all.extend(producers.into_iter().flat_map(|source| of(source, quantize::VARIANTS.iter().copied())));
    all.extend(of(&global_norm::SOURCE, global_norm::VARIANTS.iter().copied()));
    all.extend(of(&scaled::SOURCE, scaled::VARIANTS.iter().copied()));
    all.extend(of(&transpose::SOURCE, transpose::VARIANTS.iter().copied()));
    all.extend(untyped.into_iter().flat_map(|source| of(source, [[].as_slice()])));
    all
}

#[cfg(test)]
mod tests {
    use crate::cuda::{Defines, GpuModel, Workload, compile_all};
    use crate::{DType, Device, Tensor};

    #[test]
    fn a_dry_run_records_each_kernel_once_in_the_order_of_first_use() {
        let device = Device::dry_gpu(GpuModel::h200());
        let Device::Cuda(gpu) = &device else { panic!("not a GPU") };
        assert_eq!(gpu.workload(), Some(Workload::default()));
        let x = Tensor::zeros(&device, &[2, 64], DType::BF16).unwrap();
        for _ in 0..2 {
            crate::ops::cast(&crate::ops::add(&x, &x).unwrap(), DType::F32).unwrap();
        }
        let recorded = gpu.workload().unwrap().kernels;
        let recorded: Vec<_> = recorded.iter().map(|module| (module.source.name, module.defines)).collect();
        let expected: [(_, Defines); 2] = [("add", &[("X", "bf16")]), ("cast", &[("FROM", "bf16"), ("TO", "f32")])];
        assert_eq!(recorded, expected);
    }

    /// Needs NVRTC, but no GPU. `OTTAVA_REQUIRE_NVRTC` turns its absence into a failure.
    #[test]
    fn every_kernel_compiles_for_hopper() {
        let modules = super::kernels();
        for (module, outcome) in modules.iter().zip(compile_all(&modules, "sm_90a")) {
            match outcome {
                Ok(cubin) => assert!(cubin.starts_with(b"\x7fELF"), "{} is not a cubin", module.source.name),
                Err(error @ crate::Error::Library { .. }) => {
                    assert!(std::env::var_os("OTTAVA_REQUIRE_NVRTC").is_none(), "{error}");
                    return eprintln!("skipped: {error}");
                }
                Err(error) => panic!("{error}"),
            }
        }
        println!("{} kernel files compiled for sm_90a", modules.len());
    }
}
