//! `ottava doctor`.

use crate::output::print_json;
use clap::Args;
use ottava_lm::Result;
use ottava_tensor::cuda::{CudaDevice, inventory};
use serde_json::json;

/// Show GPUs and CUDA libraries, what is missing, and how to get it.
#[derive(Args)]
#[command(after_help = "Libraries are looked for in OTTAVA_LIBRARY_PATH, by the dynamic linker, in Python environments
and in toolkit folders. Training on the CPU needs none of them.")]
pub struct Doctor {
    /// Print one JSON object.
    #[arg(long)]
    json: bool,
}

impl Doctor {
    pub fn run(self) -> Result<()> {
        let libraries = inventory();
        let gpus: Vec<Result<_, String>> = match CudaDevice::count() {
            Ok(n) => (0..n).map(|i| CudaDevice::open(i).map_err(|e| e.to_string())).collect(),
            Err(error) => vec![Err(error.to_string())],
        };
        if self.json {
            let gpus: Vec<_> = gpus
                .iter()
                .map(|gpu| match gpu {
                    Ok(gpu) => json!({"name": gpu.name(), "capability": gpu.capability(), "problem": null}),
                    Err(problem) => json!({"name": null, "problem": problem}),
                })
                .collect();
            let libraries: Vec<_> = libraries
                .iter()
                .map(|l| json!({"name": l.name, "version": l.version, "path": l.path, "problem": l.problem, "remedy": l.remedy}))
                .collect();
            print_json(&json!({"gpus": gpus, "libraries": libraries}));
            return Ok(());
        }
        out!("GPUs");
        for (i, gpu) in gpus.iter().enumerate() {
            match gpu {
                Ok(gpu) => {
                    let (major, minor) = gpu.capability();
                    let (free, total) = gpu.memory_info()?;
                    let fp8 = if (major, minor) >= (8, 9) { "FP8 tensor cores" } else { "no FP8 tensor cores" };
                    out!("  {i}  {}  sm_{major}{minor}, {} SMs, {fp8}", gpu.name(), gpu.sm_count());
                    out!("     {:.1} of {:.1} GiB free", free as f64 / GIB, total as f64 / GIB);
                }
                Err(problem) => out!("  none usable: {problem}"),
            }
        }
        out!("Libraries");
        for library in &libraries {
            let version = library.version.as_deref().unwrap_or("-");
            let path = library.path.as_ref().map_or("not found".into(), |p| p.display().to_string());
            out!("  {:<10} {version:<12} {path}", library.name);
            if let Some(problem) = &library.problem {
                out!("             {problem}. {}", library.remedy);
            }
        }
        out!(
            "CPU\n  {} threads; FP8 is emulated bit for bit",
            std::thread::available_parallelism().map_or(1, usize::from)
        );
        Ok(())
    }
}

const GIB: f64 = (1u64 << 30) as f64;
