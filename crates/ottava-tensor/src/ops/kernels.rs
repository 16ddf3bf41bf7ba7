//! The list of all kernel modules, to compile them ahead of a run.

use crate::cuda::KernelModule;
use crate::{Capability, Feature};

/// Returns every kernel file with each set of defines that launches choose from, as the ops declare them (`declaration.rs`).
///
/// AdamW has 432 combinations of storage formats. The list has only the combinations in `variants` of `adamw/cuda.rs`, which cover all pairs of
/// formats.
pub fn kernels() -> Vec<KernelModule> {
    include!(concat!(env!("OUT_DIR"), "/declared.rs"))
}

/// The kernels of an op, and which of them run on GPUs of a compute capability.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct KernelSupport {
    /// The name of the op.
    pub op: &'static str,
    /// The number of kernel modules (a kernel file with its defines).
    pub modules: usize,
    /// The number of modules that do not run on these GPUs.
    pub unsupported: usize,
    /// The features that these GPUs lack and these modules need.
    pub lacks: Vec<Feature>,
}

/// Returns which kernels of each op run on GPUs of `capability`, in the order of [`kernels`].
pub fn kernel_support(capability: &Capability) -> Vec<KernelSupport> {
    let mut ops: Vec<KernelSupport> = Vec::new();
    for module in kernels() {
        let (op, lacks) = (module.source.name, capability.lacks(module.source.needs));
        let at = ops.iter().position(|known| known.op == op).unwrap_or_else(|| {
            ops.push(KernelSupport { op, modules: 0, unsupported: 0, lacks: vec![] });
            ops.len() - 1
        });
        let known = &mut ops[at];
        known.modules += 1;
        known.unsupported += usize::from(!lacks.is_empty());
        for feature in lacks {
            if !known.lacks.contains(&feature) {
                known.lacks.push(feature);
            }
        }
    }
    ops
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::capability::CAPABILITIES;
    use crate::cuda::{CudaDevice, Defines, Entry, GpuModel, Signature, Source, Workload, arch_of, compile_all};
    use crate::{DType, Device, Tensor};
    use std::collections::{BTreeSet, HashSet};
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

    #[test]
    fn every_kernel_file_is_listed() {
        let ops = Path::new(env!("CARGO_MANIFEST_DIR")).join("src/ops");
        let read = |path: PathBuf| std::fs::read_to_string(&path).unwrap_or_else(|e| panic!("{}: {e}", path.display()));
        let list = |folder: &Path| std::fs::read_dir(folder).unwrap().map(|entry| entry.unwrap().path());
        let files = list(&ops).filter(|path| path.is_dir()).flat_map(|folder| list(&folder).collect::<Vec<_>>());
        let listed = super::kernels();
        for file in files.filter(|path| path.extension().is_some_and(|end| end == "cu")) {
            let (name, text) = (file.display().to_string(), read(file));
            assert!(listed.iter().any(|module| module.source.text.ends_with(&text)), "no op declares {name}");
        }
    }

    static PLANTED: Source = Source {
        name: "planted",
        text: "",
        needs: &[Feature::Wgmma, Feature::BulkCopies],
        constants: &[],
        macros: &[],
        signatures: &[Signature { names: &["planted"], parameters: &[] }],
    };

    /// The error is returned before the compiler reads the kernel, on a GPU and in a dry run.
    #[test]
    fn a_kernel_with_an_unmet_need_is_an_error_of_the_launch() {
        let launch = |name: &str| {
            let gpu = CudaDevice::dry(GpuModel::named(name).unwrap());
            let kernel = PLANTED.kernel(&[("X", "e5m2")], Entry { name: "planted", args: vec![] });
            // SAFETY: a dry run enqueues nothing.
            unsafe { gpu.launch(&kernel, [1; 3], 32, 0) }
        };
        launch("H100").unwrap();
        let message = |name| launch(name).unwrap_err().to_string();
        assert_eq!(
            message("rtx-4090"),
            "the kernel `planted` needs wgmma and bulk copies (TMA), which NVIDIA RTX 4090 (compute capability 8.9) does not have; \
             `ottava plan --gpu` lists what runs there"
        );
        assert!(
            message("B200").contains("needs wgmma, which NVIDIA B200 (compute capability 10.0)"),
            "{}",
            message("B200")
        );
    }

    #[test]
    fn support_lists_what_a_gpu_lacks() {
        let of = |version, op: &str| {
            let support = kernel_support(Capability::find(version).unwrap());
            support.into_iter().find(|support| support.op == op).unwrap()
        };
        assert!(
            kernel_support(Capability::find((9, 0)).unwrap()).iter().all(|op| op.unsupported == 0 && op.modules > 0)
        );
        assert_eq!(of((8, 9), "skinny").lacks, [Feature::Wgmma, Feature::BulkCopies, Feature::Multicast]);
        assert_eq!(of((8, 0), "rmsnorm").unsupported, 0);
        let skinny = of((10, 0), "skinny");
        assert_eq!((skinny.modules, skinny.unsupported, skinny.lacks), (4, 4, vec![Feature::Wgmma]));
    }

    /// Returns whether to compile all variants of kernels: `just nightly kernels`.
    fn all_variants() -> bool {
        std::env::var("OTTAVA_KERNEL_VARIANTS").is_ok_and(|value| value == "full")
    }

    /// Returns the text of a module after the macros of its source. Sources of the same files have the same text.
    fn body(module: &KernelModule) -> &'static str {
        let text = module.source.text;
        let own = text.split_inclusive('\n').take_while(|line| line.starts_with("#define "));
        &text[own.map(str::len).sum::<usize>()..]
    }

    /// Compiles a part of the kernels for every known GPU except Hopper. Needs NVRTC, but no GPU.
    ///
    /// - Two modules of each set of files, the first without and the first with an FP8 type, are compiled for each GPU that meets their needs.
    /// - Two modules of each other source are compiled for one of these GPUs, or with [`all_variants`] for all of them.
    #[test]
    fn kernels_compile_wherever_their_needs_are_met() {
        let (mut modules, mut of_files): (Vec<KernelModule>, Vec<KernelModule>) = Default::default();
        for module in super::kernels() {
            let is_fp8 = |m: &KernelModule| m.defines.iter().any(|(_, value)| matches!(*value, "e4m3" | "e5m2"));
            let is_alike = |m: &KernelModule| body(m) == body(&module) && is_fp8(m) == is_fp8(&module);
            if !modules.iter().any(|m| is_same_source(m, &module) && is_alike(m)) {
                of_files.extend((!of_files.iter().any(is_alike)).then_some(module));
                modules.push(module);
            }
        }
        let others: Vec<_> = CAPABILITIES.iter().filter(|known| known.version != (9, 0)).collect();
        let mut compiled = HashSet::new();
        for capability in &others {
            // The sources take turns: each is compiled for one of the GPUs that meet its needs.
            let is_due = |i: usize, m: &KernelModule| {
                let able: Vec<_> = others.iter().filter(|other| other.lacks(m.source.needs).is_empty()).collect();
                let is_turn = |at: usize| all_variants() || of_files.contains(m) || i % able.len() == at;
                able.iter().position(|other| other.version == capability.version).is_some_and(is_turn)
            };
            let due = modules.iter().enumerate().filter(|(i, m)| is_due(*i, m));
            let met: Vec<_> = due.map(|(_, m)| *m).collect();
            compiled.extend(met.iter().copied());
            for (module, outcome) in met.iter().zip(compile_all(&met, &arch_of(capability.version))) {
                match outcome {
                    Err(error @ crate::Error::Library { .. }) => {
                        assert!(std::env::var_os("OTTAVA_REQUIRE_NVRTC").is_none(), "{error}");
                        return eprintln!("skipped: {error}");
                    }
                    outcome => drop(outcome.unwrap_or_else(|e| panic!("{} on {capability}: {e}", module.source.name))),
                }
            }
            println!("{} of {} kernel files compiled for {capability}", met.len(), modules.len());
        }
        let runs_elsewhere = |m: &KernelModule| others.iter().any(|other| other.lacks(m.source.needs).is_empty());
        assert!(modules.iter().filter(|m| runs_elsewhere(m)).all(|m| compiled.contains(m)), "a source had no turn");
    }

    /// A macro and its value.
    type Macro = (&'static str, &'static str);

    /// Returns the macros of a module: the macros of its source, then the macros of its variant.
    fn macros(module: &KernelModule) -> Vec<Macro> {
        let own = module.source.macros.iter().map(|&name| (name, "1"));
        own.chain(module.defines.iter().copied()).collect()
    }

    /// Returns modules that include every source and cover all pairs of macro values.
    ///
    /// A pair is covered if one returned module has both values. An undefined macro counts as a value. Modules are grouped by their files, and a pair
    /// must occur in a module of the group. The choice is greedy: the next module is the first of the modules with the most uncovered pairs.
    fn representatives() -> Vec<KernelModule> {
        let mut alike: Vec<Vec<KernelModule>> = Vec::new();
        for module in super::kernels() {
            match alike.iter_mut().find(|of_files| body(&of_files[0]) == body(&module)) {
                Some(of_files) => of_files.push(module),
                None => alike.push(vec![module]),
            }
        }
        let mut chosen: Vec<KernelModule> = Vec::new();
        for of_files in alike {
            let names: BTreeSet<&str> = of_files.iter().flat_map(macros).map(|(name, _)| name).collect();
            let pairs = |module: &KernelModule| -> HashSet<(Macro, Macro)> {
                let set = macros(module);
                let value = |name| (name, set.iter().find(|(of, _)| *of == name).map_or("", |(_, value)| *value));
                let values: Vec<Macro> = names.iter().copied().map(value).collect();
                values.iter().enumerate().flat_map(|(i, a)| values[i..].iter().map(move |b| (*a, *b))).collect()
            };
            let pairs: Vec<_> = of_files.iter().map(pairs).collect();
            let mut missing: HashSet<_> = pairs.iter().flatten().copied().collect();
            while !missing.is_empty() {
                let next = (0..of_files.len()).rev().max_by_key(|&i| pairs[i].intersection(&missing).count());
                let next = next.expect("a pair is a module's");
                missing.retain(|pair| !pairs[next].contains(pair));
                chosen.push(of_files[next]);
            }
            for module in of_files {
                if !chosen.iter().any(|other| is_same_source(other, &module)) {
                    chosen.push(module);
                }
            }
        }
        chosen
    }

    fn is_same_source(a: &KernelModule, b: &KernelModule) -> bool {
        std::ptr::eq(a.source, b.source)
    }

    #[test]
    fn representatives_have_every_source_and_every_pair_of_macros() {
        let (all, chosen) = (super::kernels(), representatives());
        let pairs = |module: &KernelModule| {
            let files = all.iter().position(|other| body(other) == body(module)).expect("it is listed");
            let set = macros(module);
            let pairs = set.iter().flat_map(|a| set.iter().map(move |b| (files, *a, *b)));
            pairs.collect::<Vec<(usize, Macro, Macro)>>()
        };
        let of_chosen: HashSet<_> = chosen.iter().flat_map(pairs).collect();
        for module in &all {
            let lost = pairs(module).into_iter().find(|pair| !of_chosen.contains(pair));
            assert_eq!(lost, None, "no representative has this pair");
            assert!(chosen.iter().any(|other| is_same_source(other, module)), "{}", module.source.name);
        }
        assert!(2 * chosen.len() < all.len(), "{} of {}", chosen.len(), all.len());
    }

    /// Compiles all modules with [`all_variants`], otherwise representatives. Needs NVRTC, but no GPU. With `OTTAVA_REQUIRE_NVRTC`, a missing NVRTC
    /// is a failure.
    #[test]
    fn every_kernel_compiles_for_hopper() {
        let modules = if all_variants() { super::kernels() } else { representatives() };
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
        println!("{} of {} kernel modules compiled for sm_90a", modules.len(), super::kernels().len());
    }
}
