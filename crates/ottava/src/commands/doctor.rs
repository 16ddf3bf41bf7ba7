//! `ottava doctor`.

use crate::output::print_json;
use clap::Args;
use ottava_common::Result;
use ottava_tensor::Capability;
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
        let found: Vec<_> = gpus.iter().flatten().map(|gpu| gpu.capability()).collect();
        let missing: Vec<&str> =
            libraries.iter().filter(|found| found.problem.is_some()).map(|found| found.name).collect();
        let verdict = verdict(&found, &missing);
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
            print_json(&json!({"verdict": verdict, "gpus": gpus, "links": links, "libraries": libraries}));
            return Ok(());
        }
        out!("{verdict}\n");
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

/// Says in one sentence what this machine can do with GPUs of these compute capabilities and without these libraries.
fn verdict(gpus: &[(i32, i32)], missing: &[&str]) -> String {
    // The others only report what GPUs do, or join several GPUs.
    let needed: Vec<&str> = missing.iter().copied().filter(|name| !OPTIONAL.contains(name)).collect();
    let rest: Vec<&str> = missing.iter().copied().filter(|name| OPTIONAL.contains(name)).collect();
    type Versions<'a> = Vec<&'a (i32, i32)>;
    let (usable, unsupported): (Versions, Versions) =
        gpus.iter().partition(|version| Capability::find(**version).is_ok());
    let with_fp8 = usable.iter().filter(|version| ***version >= (8, 9)).count();
    let sentence = match (usable.len(), needed.is_empty()) {
        (0, _) if missing.is_empty() => "This machine has no usable GPU: runs use the CPU.".into(),
        (0, _) => format!(
            "This machine has no usable GPU: runs use the CPU. A machine with a GPU also needs {}, as listed below.",
            missing.join(", ")
        ),
        (_, false) => format!("GPUs cannot be used yet: install {}, as listed below.", needed.join(", ")),
        (count, true) => {
            let fp8 = format!("{with_fp8} of {count} GPUs have FP8 tensor cores.");
            let rest = match rest.is_empty() {
                true => String::new(),
                false => format!(" Without {}, some features are missing, as listed below.", rest.join(", ")),
            };
            format!("This machine is ready to train: {fp8}{rest}")
        }
    };
    let mut versions: Vec<String> = unsupported.iter().map(|(major, minor)| format!("{major}.{minor}")).collect();
    versions.dedup();
    match versions.is_empty() {
        true => sentence,
        false => format!("{sentence} GPUs of compute capability {} are not supported.", versions.join(", ")),
    }
}

/// Libraries that a run on one GPU does not need.
const OPTIONAL: [&str; 2] = ["NCCL", "NVML"];

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

#[cfg(test)]
mod tests {
    use super::verdict;

    #[test]
    fn one_sentence_says_what_is_missing() {
        assert!(
            verdict(&[], &["driver", "NCCL"])
                .contains("runs use the CPU. A machine with a GPU also needs driver, NCCL")
        );
        assert!(verdict(&[(9, 0)], &["NVRTC", "NCCL"]).contains("install NVRTC, as listed"));
        assert!(verdict(&[(9, 0), (8, 0)], &[]).ends_with("1 of 2 GPUs have FP8 tensor cores."));
        let mixed = verdict(&[(9, 0), (6, 1), (6, 1)], &[]);
        assert!(
            mixed.contains("1 of 1 GPUs have FP8") && mixed.ends_with("capability 6.1 are not supported."),
            "{mixed}"
        );
        let old = verdict(&[(6, 1)], &[]);
        assert!(old.contains("no usable GPU") && old.ends_with("6.1 are not supported."), "{old}");
        assert!(
            verdict(&[(9, 0)], &["NCCL"]).contains("ready to train")
                && verdict(&[(9, 0)], &["NCCL"]).contains("Without NCCL")
        );
    }
}
