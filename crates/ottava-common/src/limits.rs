//! The memory and the files that this process may still use under `ulimit` and cgroup limits.

use std::path::{Path, PathBuf};

/// Returns the bytes that the process may still allocate under its own limits: `ulimit -v` and `-d`, and the memory limits of its cgroup and of the
/// cgroups above it (containers, `systemd`, Slurm). Returns `None` without a limit.
pub fn process_memory() -> Option<u64> {
    let read = |path: &str| std::fs::read_to_string(path).unwrap_or_default();
    let limits = of_process(&read("/proc/self/limits"), &read("/proc/self/status"));
    limits.into_iter().chain(of_cgroups(&read("/proc/self/cgroup"), Path::new("/sys/fs/cgroup"))).min()
}

/// Returns the bytes that the process may still allocate under its limits and without swapping.
pub fn available_memory() -> Option<u64> {
    let info = std::fs::read_to_string("/proc/meminfo").unwrap_or_default();
    process_memory().into_iter().chain(kilobytes(&info, "MemAvailable:")).min()
}

/// Returns the number of files that the process may still open under `ulimit -n`.
pub fn free_files() -> Option<usize> {
    let limits = std::fs::read_to_string("/proc/self/limits").ok()?;
    let open = std::fs::read_dir("/proc/self/fd").ok()?.count();
    let soft =
        limits.lines().find_map(|line| line.strip_prefix("Max open files")?.split_whitespace().next()?.parse().ok());
    soft.map(|soft: usize| soft.saturating_sub(open))
}

/// Returns the memory left under the limits on address space and data.
fn of_process(limits: &str, status: &str) -> Vec<u64> {
    let left = |limit: &str, used: &str| {
        let soft = limits.lines().find_map(|line| line.strip_prefix(limit)?.split_whitespace().next()?.parse().ok());
        soft.map(|soft: u64| soft.saturating_sub(kilobytes(status, used).unwrap_or(0)))
    };
    [left("Max address space", "VmSize:"), left("Max data size", "VmData:")].into_iter().flatten().collect()
}

/// Returns the value of a line such as `VmSize:   123 kB`, in bytes.
fn kilobytes(text: &str, key: &str) -> Option<u64> {
    let value = text.lines().find_map(|line| line.strip_prefix(key))?;
    Some(value.trim().trim_end_matches("kB").trim().parse::<u64>().ok()? * 1024)
}

/// Returns the memory left under the limits of the cgroups in `own` (`/proc/self/cgroup`), below `root`.
fn of_cgroups(own: &str, root: &Path) -> Vec<u64> {
    let mut left = Vec::new();
    for line in own.lines() {
        let mut fields = line.splitn(3, ':').skip(1);
        let (Some(controllers), Some(path)) = (fields.next(), fields.next()) else { continue };
        // Version 2 has one tree and no names of controllers. Version 1 has a tree for each controller.
        let (tree, limit, used) = match controllers {
            "" => (root.to_path_buf(), "memory.max", "memory.current"),
            names if names.split(',').any(|name| name == "memory") => {
                (root.join("memory"), "memory.limit_in_bytes", "memory.usage_in_bytes")
            }
            _ => continue,
        };
        // In a container, the path of the process may not be visible. Then the limit is at the root of the visible tree.
        let own: PathBuf = tree.join(path.trim_start_matches('/'));
        for folder in own.ancestors().take_while(|folder| folder.starts_with(&tree)) {
            let number = |name: &str| std::fs::read_to_string(folder.join(name)).ok()?.trim().parse::<u64>().ok();
            let Some(limit) = number(limit) else { continue };
            // The system reclaims inactive file pages on demand.
            let stat = std::fs::read_to_string(folder.join("memory.stat")).unwrap_or_default();
            let cached = |key: &str| stat.lines().find_map(|line| line.strip_prefix(key)?.trim().parse::<u64>().ok());
            let cached = cached("total_inactive_file ").or(cached("inactive_file ")).unwrap_or(0);
            left.push(limit.saturating_sub(number(used).unwrap_or(0).saturating_sub(cached)));
        }
    }
    left
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn limits_of_the_process_count_what_is_taken() {
        let limits = "Limit                     Soft Limit           Hard Limit           Units     \n\
                      Max data size             unlimited            unlimited            bytes     \n\
                      Max address space         4096000              unlimited            bytes     \n";
        assert_eq!(of_process(limits, "VmSize:\t    1000 kB\nVmData:\t 10 kB\n"), [4_096_000 - 1_024_000]);
        assert_eq!(of_process(&limits.replace("4096000", "unlimited"), ""), [0; 0]);
        assert_eq!(of_process(limits, "VmSize:\t 9000 kB\n"), [0]);
    }

    #[test]
    fn limits_of_cgroups_of_both_versions_are_found_at_each_level() {
        let root = tempfile::tempdir().unwrap();
        let write = |name: &str, text: &str| {
            let path = root.path().join(name);
            std::fs::create_dir_all(path.parent().unwrap()).unwrap();
            std::fs::write(path, text).unwrap();
        };
        write("a/memory.max", "1000\n");
        write("a/memory.current", "700\n");
        write("a/memory.stat", "anon 5\ninactive_file 500\n");
        write("a/b/memory.max", "max\n");
        write("a/b/memory.current", "600\n");
        assert_eq!(of_cgroups("0::/a/b\n", root.path()), [800]);
        assert_eq!(of_cgroups("0::/elsewhere\n", root.path()), [0; 0]);
        write("memory.max", "300\n");
        assert_eq!(of_cgroups("0::/elsewhere\n", root.path()), [300], "the root of a container");
        write("memory/c/memory.limit_in_bytes", "900\n");
        write("memory/c/memory.usage_in_bytes", "100\n");
        write("memory/c/memory.stat", "inactive_file 1\ntotal_inactive_file 60\n");
        assert_eq!(of_cgroups("4:cpu:/c\n3:hugetlb,memory:/c\n", root.path()), [860]);
    }
}
