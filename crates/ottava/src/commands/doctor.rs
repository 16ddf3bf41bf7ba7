//! `ottava doctor`.

use crate::output::print_json;
use clap::Args;
use ottava_common::{Result, limits};
use ottava_tensor::Capability;
use ottava_tensor::cuda::{CudaDevice, LIBRARY_PATH_VARIABLE, PeerLink, inventory, searched_places};
use rustix::process::{Resource, getrlimit};
use serde::Serialize;
use serde_json::json;

/// Show GPUs, CUDA libraries, memory, disk and limits, and how to install missing libraries.
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
        let (notes, host) = (absent_folders(), Host::here());
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
            print_json(
                &json!({"verdict": verdict, "gpus": gpus, "links": links, "libraries": libraries, "notes": notes, "host": host}),
            );
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
                // The list of libraries has the sentence about the driver.
                Err(problem)
                    if libraries
                        .iter()
                        .any(|library| library.problem.as_ref().is_some_and(|found| problem.contains(found))) =>
                {
                    out!("  none usable: a library is missing, as listed below")
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
        out!("Libraries, searched for in {}", searched_places());
        for library in &libraries {
            let version = library.version.as_deref().unwrap_or("-");
            let path = library.path.as_ref().map_or("not found".into(), |p| p.display().to_string());
            out!("  {:<11} {version:<12} {path}", library.name);
            if let Some(problem) = &library.problem {
                // The heading has the places.
                let problem = problem.replace(&format!(" in {}", searched_places()), "");
                out!("              {problem}. {}", library.remedy);
            }
        }
        for note in &notes {
            out!("  {note}");
        }
        out!("Host");
        for line in host.lines() {
            out!("  {line}");
        }
        Ok(())
    }
}

/// Returns a sentence for each folder of OTTAVA_LIBRARY_PATH that does not exist.
fn absent_folders() -> Vec<String> {
    let folders = std::env::var_os(LIBRARY_PATH_VARIABLE).unwrap_or_default();
    std::env::split_paths(&folders)
        .filter(|folder| !folder.as_os_str().is_empty() && !folder.is_dir())
        .map(|folder| {
            format!("{LIBRARY_PATH_VARIABLE} names {}, which is no folder: correct the variable", folder.display())
        })
        .collect()
}

/// What runs take from the host.
#[derive(Serialize)]
struct Host {
    threads: usize,
    /// The bytes of memory that the process may allocate without swapping.
    memory_bytes: Option<u64>,
    /// The bytes that are free on the disk of the working folder.
    disk_bytes: Option<u64>,
    /// The number of files that the process may open, and the bytes that it may lock. `None` is no limit.
    open_files: Option<u64>,
    locked_bytes: Option<u64>,
}

impl Host {
    fn here() -> Host {
        let disk = rustix::fs::statvfs(".").ok();
        Host {
            threads: std::thread::available_parallelism().map_or(1, usize::from),
            memory_bytes: limits::available_memory(),
            disk_bytes: disk.map(|disk| disk.f_bavail.saturating_mul(disk.f_frsize)),
            open_files: getrlimit(Resource::Nofile).current,
            locked_bytes: getrlimit(Resource::Memlock).current,
        }
    }

    fn lines(&self) -> Vec<String> {
        let gib = |bytes: Option<u64>| {
            bytes.map_or("unknown size".to_string(), |bytes| format!("{:.1} GiB", bytes as f64 / GIB))
        };
        let limit = |limit: Option<u64>| limit.map_or("unlimited".to_string(), |limit| limit.to_string());
        let few = self.open_files.is_some_and(|files| files < FEW_FILES);
        vec![
            format!("CPU         {} threads; FP8 is emulated bit for bit", self.threads),
            format!("memory      {} available; checkpoints of a GPU run are copied there", gib(self.memory_bytes)),
            format!(
                "disk        {} free in this folder; `ottava plan` prints the size of a checkpoint",
                gib(self.disk_bytes)
            ),
            format!(
                "ulimit -n   {} open files{}",
                limit(self.open_files),
                if few {
                    format!("; raise it to {FEW_FILES} for models with many files, and for servers")
                } else {
                    String::new()
                }
            ),
            format!(
                "ulimit -l   {} of locked memory",
                self.locked_bytes.map_or("unlimited".to_string(), |bytes| gib(Some(bytes)))
            ),
        ]
    }
}

/// The number of open files below which runs and servers can fail.
const FEW_FILES: u64 = 1024;

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
        (0, true) => "This machine has no usable GPU: runs use the CPU.".into(),
        (0, false) => format!(
            "This machine has no usable GPU: runs use the CPU. A machine with a GPU also needs {}, as listed below.",
            needed.join(", ")
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
            verdict(&[], &["driver", "NCCL", "NVML"])
                .ends_with("runs use the CPU. A machine with a GPU also needs driver, as listed below.")
        );
        assert!(verdict(&[], &["NCCL", "NVML"]).ends_with("no usable GPU: runs use the CPU."));
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
