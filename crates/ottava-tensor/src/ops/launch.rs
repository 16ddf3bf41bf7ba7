//! What every `cuda.rs` needs: sources with the common header, storage types as defines, grid sizes.

use crate::cuda::{CudaDevice, KernelModule, Source};
use crate::{DType, Error, Result, Tensor};

pub(crate) use crate::cuda::Defines;

/// Declares `SOURCE`, the kernel file of this folder after the common header; or a static of another name, with more headers between.
/// A constant after a semicolon is declared in Rust, and as a macro of the same name in front of the kernel file.
macro_rules! kernel_source {
    ($name:literal $(; $(#[$meta:meta])* const $constant:ident: $type:ty = $value:literal)*) => {
        kernel_source!(SOURCE, $name $(; $(#[$meta])* const $constant: $type = $value)*);
    };
    ($static:ident, $name:literal $(, $header:literal)* $(; $(#[$meta:meta])* const $constant:ident: $type:ty = $value:literal)*) => {
        $($(#[$meta])* const $constant: $type = $value;)*
        pub(crate) static $static: $crate::cuda::Source = $crate::cuda::Source {
            name: $name,
            text: concat!(
                $("#define ", stringify!($constant), " ", $value, "\n",)*
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

/// Side of the tiles in `destination.cuh`.
pub(crate) const TILE: usize = 128;

/// A one-dimensional grid with one thread per element and at most 16 blocks per multiprocessor, whose threads stride over larger tensors.
pub(crate) fn elements(gpu: &CudaDevice, n: usize) -> [u32; 3] {
    at_most(gpu, 16, n.div_ceil(BLOCK as usize))
}

/// As [`elements`], for kernels whose threads take eight neighbouring elements at a time.
pub(crate) fn eights(gpu: &CudaDevice, n: usize) -> [u32; 3] {
    elements(gpu, n.div_ceil(8))
}

/// A grid for kernels that only read: one block for each of `n` pieces, at most the 8 per multiprocessor that run at once.
pub(crate) fn readers(gpu: &CudaDevice, n: usize) -> [u32; 3] {
    at_most(gpu, 8, n)
}

fn at_most(gpu: &CudaDevice, per_multiprocessor: usize, blocks: usize) -> [u32; 3] {
    [blocks.clamp(1, gpu.sm_count() * per_multiprocessor) as u32, 1, 1]
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

const STORAGE: &[Defines] = &[&[("X", "f32")], &[("X", "f16")], &[("X", "bf16")]];

/// Every kernel file with the sets of defines that launches choose from, so that all can be compiled ahead of a run. Of the 432 ways to
/// keep a parameter in AdamW it has those of [`adamw::variants`], in which every two formats meet.
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
    use std::path::{Path, PathBuf};

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

    /// What each `kernel_source!` of the crate declares, read from the files: name, text and constants.
    fn declared() -> Vec<(String, String)> {
        let ops = Path::new(env!("CARGO_MANIFEST_DIR")).join("src/ops");
        let read = |path: PathBuf| std::fs::read_to_string(&path).unwrap_or_else(|e| panic!("{}: {e}", path.display()));
        let mut declared = Vec::new();
        for folder in std::fs::read_dir(&ops).unwrap().map(|entry| entry.unwrap().path()).filter(|path| path.is_dir()) {
            let name = folder.file_name().unwrap().to_str().unwrap().to_string();
            let rust = read(folder.join("cuda.rs"));
            let of_folder: Vec<_> = rust.split("kernel_source!(").skip(1).collect();
            assert!(!of_folder.is_empty(), "ops/{name}/cuda.rs declares no kernel");
            for call in of_folder {
                let call = call.split(");").next().unwrap();
                let literals = call.split('"').skip(1).step_by(2);
                let headers = literals.filter(|literal| literal.ends_with(".cuh"));
                let files = std::iter::once("common.cuh").chain(headers).map(|header| read(ops.join(header)) + "\n");
                let kernel = read(folder.join(format!("{name}.cu")));
                declared.push((name.clone(), files.collect::<String>() + &kernel));
            }
        }
        declared
    }

    #[test]
    fn every_kernel_file_is_listed() {
        let mut listed: Vec<_> = super::kernels().iter().map(|module| module.source).collect();
        listed.dedup_by_key(|source| source.text.as_ptr());
        let declared = declared();
        for (name, text) in &declared {
            assert!(
                listed.iter().any(|source| source.text.ends_with(text)),
                "ops::kernels() lacks a source of ops/{name}"
            );
        }
        assert_eq!(listed.len(), declared.len());
    }

    #[test]
    fn headers_agree_with_rust_on_constants() {
        let (common, destination) = (include_str!("common.cuh"), include_str!("destination.cuh"));
        for (name, dtype) in [("f16", DType::F16), ("e4m3", DType::E4M3), ("e5m2", DType::E5M2)] {
            let largest = dtype.max_finite().unwrap();
            let line =
                format!("template <> struct Format<{name}> {{ static constexpr float largest = {largest:.1}f; }};");
            assert!(common.contains(&line), "{line}");
        }
        assert!(destination.contains(&format!("#define TILE {}\n", super::TILE)));
        let line = format!("#define IGNORE_INDEX {}\n", crate::ops::IGNORE_INDEX);
        assert!(include_str!("cross_entropy/cross_entropy.cu").contains(&line));
    }

    #[test]
    fn grids_are_bounded_by_the_multiprocessors_of_the_device() {
        let gpu = |sm_count| crate::cuda::CudaDevice::dry(GpuModel { sm_count, ..GpuModel::h200() });
        let h200 = gpu(132);
        assert_eq!([1, 256, 257, 1 << 30].map(|n| super::elements(&h200, n)[0]), [1, 1, 2, 2112]);
        assert_eq!(super::readers(&h200, 1 << 30), [1056, 1, 1]);
        assert_eq!(super::eights(&gpu(10), 1 << 30), [160, 1, 1]);
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
