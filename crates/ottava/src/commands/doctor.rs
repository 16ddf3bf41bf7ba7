//! `ottava doctor`.

use crate::output::print_json;
use clap::Args;
use ottava_common::Result;
use ottava_tensor::cuda::{CudaDevice, PeerLink, inventory};
use serde_json::json;

/// Show GPUs and CUDA libraries, and how to install missing ones.
#[derive(Args)]
#[command(after_help = "Libraries are looked for in OTTAVA_LIBRARY_PATH, by the dynamic linker, in Python environments
(first in that of this program, as `uv tool` and `pipx` make it) and in toolkit folders. Training on the CPU needs none of them.")]
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
        let links = links(gpus.len());
        if self.json {
            let links: Vec<_> =
                links.iter().map(|(from, to, link)| json!({"from": from, "to": to, "link": link})).collect();
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
            print_json(&json!({"gpus": gpus, "links": links, "libraries": libraries}));
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
        if let [(.., first), rest @ ..] = &links[..] {
            out!("Links between GPUs");
            match rest.iter().all(|(.., link)| link == first) {
                true => out!("  all pairs: {first}"),
                false => links.iter().for_each(|(from, to, link)| out!("  {from} to {to}: {link}")),
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

/// Lists the link between each ordered pair of `gpus` GPUs.
fn links(gpus: usize) -> Vec<(usize, usize, String)> {
    let pairs = (0..gpus).flat_map(|from| (0..gpus).filter(move |&to| to != from).map(move |to| (from, to)));
    let words = |(from, to)| match CudaDevice::peer_link(from, to) {
        Ok(PeerLink::NvLink) => "NVLink".to_string(),
        Ok(PeerLink::Pcie) => "PCIe".to_string(),
        Ok(PeerLink::None) => "none: collectives go through the memory of the host".to_string(),
        Err(error) => error.to_string(),
    };
    pairs.map(|(from, to)| (from, to, words((from, to)))).collect()
}

const GIB: f64 = (1u64 << 30) as f64;
