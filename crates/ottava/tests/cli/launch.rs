//! Starts the files of `configs/launch` with launchers and a program that only record how they are called.

use std::collections::BTreeSet;
use std::fs;
use std::os::unix::fs::PermissionsExt;
use std::path::{Path, PathBuf};
use std::process::Command;
use yaml_rust2::{Yaml, YamlLoader};

/// Prints the rank and its arguments in place of training.
const OTTAVA: &str =
    r#"echo "$RANK/$WORLD_SIZE local $LOCAL_RANK at $MASTER_ADDR:$MASTER_PORT secret ${#OTTAVA_SECRET} $*""#;

/// Runs a command of another host on this host.
const SSH: &str = r#"shift; exec sh -c "$*""#;

/// Prints its options, and starts two tasks with the variables of Slurm.
const SRUN: &str = r#"options=; while case $1 in --*) ;; *) false ;; esac; do options="$options $1"; shift; done; echo "srun$options"; for RANK in 0 1; do export RANK; WORLD_SIZE=2 LOCAL_RANK=$RANK MASTER_ADDR=n1 MASTER_PORT=1 "$@"; done"#;

fn file(name: &str) -> PathBuf {
    Path::new(env!("CARGO_MANIFEST_DIR")).join("../../configs/launch").join(name)
}

/// Returns a command that runs in `folder`, with `programs` (names and shell code) first in its PATH.
fn command(shell: &str, folder: &Path, programs: [(&str, &str); 3]) -> Command {
    for (name, text) in programs {
        let path = folder.join(name);
        fs::write(&path, format!("#!/bin/sh\n{text}\n")).unwrap();
        fs::set_permissions(&path, fs::Permissions::from_mode(0o755)).unwrap();
    }
    let mut command = Command::new(shell);
    let path = format!("{}:{}", folder.display(), std::env::var("PATH").unwrap());
    command.env("PATH", path).current_dir(folder);
    command
}

/// Runs `shell` with `arguments`, the recorders first in its PATH, and `variables`. Returns the lines of its output.
fn lines(shell: &str, arguments: &[&str], variables: &[(&str, &str)]) -> BTreeSet<String> {
    let folder = tempfile::tempdir().unwrap();
    let mut command = command(shell, folder.path(), [("ottava", OTTAVA), ("ssh", SSH), ("srun", SRUN)]);
    let output = command.args(arguments).envs(variables.iter().copied()).output().unwrap();
    assert!(output.status.success(), "{}", String::from_utf8_lossy(&output.stderr));
    String::from_utf8(output.stdout).unwrap().lines().map(String::from).collect()
}

/// Returns the lines of `ranks`, each with its local rank, of a job of `world` ranks whose rank 0 is at `address`.
fn expected(ranks: std::ops::Range<usize>, gpus: usize, world: usize, address: &str, rest: &str) -> BTreeSet<String> {
    ranks.map(|rank| format!("{rank}/{world} local {} at {address} secret 32 {rest}", rank % gpus)).collect()
}

#[test]
fn ssh_starts_a_rank_for_each_gpu() {
    let script = file("ssh.sh").display().to_string();
    let job = [("HOSTS", "n1 n2"), ("GPUS", "2")];
    let found = lines("sh", &[&script, "my run.toml", "--set", "output_dir=a'b"], &job);
    assert_eq!(found, expected(0..4, 2, 4, "n1:29400", "train my run.toml --set output_dir=a'b --resume=auto"));
}

#[test]
fn ssh_passes_a_signal_on_that_comes_before_rank_0_runs() {
    let folder = tempfile::tempdir().unwrap();
    let started = folder.path().join("started");
    let ssh = format!("echo > {}; sleep 1; {SSH}", started.display());
    let ottava = "trap 'exit 75' TERM; for i in $(seq 600); do sleep 0.1; done";
    let mut command = command("sh", folder.path(), [("ottava", ottava), ("ssh", &ssh), ("srun", SRUN)]);
    let mut job = command.arg(file("ssh.sh")).arg("run.toml").envs([("HOSTS", "n1"), ("GPUS", "1")]).spawn().unwrap();
    while !started.exists() {
        std::thread::sleep(std::time::Duration::from_millis(10));
    }
    assert!(Command::new("kill").args(["-TERM", &job.id().to_string()]).status().unwrap().success());
    assert_eq!(job.wait().unwrap().code(), Some(75), "the exit code of rank 0");
}

/// Returns the exit code of `script` with four ranks on one host. Rank 1 ends with code 5, rank 2 with code 75, and the other ranks with code 0.
fn code_of_ranks(script: &str) -> Option<i32> {
    let folder = tempfile::tempdir().unwrap();
    let ottava = "case $RANK in 1) exit 5;; 2) exit 75;; *) exit 0;; esac";
    let mut command = command("sh", folder.path(), [("ottava", ottava), ("ssh", SSH), ("srun", SRUN)]);
    let variables = [
        ("JOB_COMPLETION_INDEX", "0"),
        ("HOSTS", "1"),
        ("GPUS", "4"),
        ("SKYPILOT_NODE_IPS", "10.0.0.1"),
        ("SKYPILOT_NODE_RANK", "0"),
        ("SKYPILOT_NUM_GPUS_PER_NODE", "4"),
    ];
    command.args(["-c", script]).envs(variables).status().unwrap().code()
}

#[test]
fn a_launcher_ends_with_the_first_code_that_is_not_0() {
    let (pods, nodes) = (yaml("jobset.yaml"), yaml("skypilot.yaml"));
    let pods = at(&pods, "spec.replicatedJobs.0.template.spec.template.spec.containers.0.args.0");
    for script in [pods, at(&nodes, "run")] {
        assert_eq!(code_of_ranks(script.as_str().unwrap()), Some(5));
    }
    assert_eq!(code_of_ranks(&format!("sh {} run.toml", file("ssh.sh").display())), Some(5));
}

#[test]
fn slurm_starts_tasks_that_it_does_not_kill() {
    let script = file("slurm.sbatch").display().to_string();
    let mut wanted = expected(0..2, 2, 2, "n1:1", "train run.toml --resume=auto");
    wanted.insert("srun --cpus-per-task=8 --kill-on-bad-exit=0".into());
    assert_eq!(lines("bash", &[&script, "run.toml"], &[("SLURM_CPUS_PER_TASK", "8")]), wanted);
    let text = fs::read_to_string(file("slurm.sbatch")).unwrap();
    for option in
        ["nodes", "ntasks-per-node", "gpus-per-node", "cpus-per-task", "time", "signal", "open-mode", "requeue"]
    {
        assert!(text.lines().any(|line| line.starts_with(&format!("#SBATCH --{option}"))), "no --{option}");
    }
}

/// Returns the lines of the keepers of `hosts`, of a job of `world` hosts whose host 0 is at `address`. A keeper has no local rank.
fn expected_keepers(hosts: std::ops::Range<usize>, world: usize, address: &str, rest: &str) -> BTreeSet<String> {
    hosts.map(|host| format!("{host}/{world} local  at {address} secret 32 {rest}")).collect()
}

#[test]
fn ssh_starts_a_keeper_for_each_host() {
    let script = file("ssh-recovery.sh").display().to_string();
    let job = [("HOSTS", "n1 n2 n3"), ("GPUS", "8")];
    let found = lines("sh", &[&script, "my run.toml"], &job);
    assert_eq!(found, expected_keepers(0..3, 3, "n1:29400", "train my run.toml --gpus 8 --resume=auto"));
}

/// ssh ends with code 255 if it loses a host, and the job goes on without it.
#[test]
fn ssh_stops_all_keepers_and_a_lost_host_does_not_hide_their_code() {
    let folder = tempfile::tempdir().unwrap();
    let ottava =
        "trap 'exit 75' TERM; echo > started-$RANK; [ $RANK = 2 ] && exit 255; for i in $(seq 600); do sleep 0.1; done";
    let mut command = command("sh", folder.path(), [("ottava", ottava), ("ssh", SSH), ("srun", SRUN)]);
    let script = file("ssh-recovery.sh");
    let mut job = command.arg(script).arg("run.toml").envs([("HOSTS", "n1 n2 n3"), ("GPUS", "1")]).spawn().unwrap();
    let have_started = || (0..3).all(|host| folder.path().join(format!("started-{host}")).exists());
    let begin = std::time::Instant::now();
    while !have_started() && begin.elapsed() < std::time::Duration::from_secs(60) {
        std::thread::sleep(std::time::Duration::from_millis(10));
    }
    if !have_started() {
        job.kill().unwrap();
        panic!("a keeper does not start");
    }
    assert!(Command::new("kill").args(["-TERM", &job.id().to_string()]).status().unwrap().success());
    assert_eq!(job.wait().unwrap().code(), Some(75));
}

#[test]
fn slurm_starts_a_keeper_for_each_host_and_keeps_the_other_hosts() {
    let script = file("slurm-recovery.sbatch").display().to_string();
    let variables = [("SLURM_CPUS_PER_TASK", "64"), ("SLURM_GPUS_ON_NODE", "8")];
    let mut wanted = expected(0..2, 2, 2, "n1:1", "train run.toml --gpus 8 --resume=auto");
    wanted.insert("srun --cpus-per-task=64 --no-kill --kill-on-bad-exit=0 --wait=0".into());
    assert_eq!(lines("bash", &[&script, "run.toml"], &variables), wanted);
    let text = fs::read_to_string(file("slurm-recovery.sbatch")).unwrap();
    for option in ["nodes=3", "ntasks-per-node=1", "gpus-per-node", "signal=TERM", "no-kill", "requeue"] {
        assert!(text.lines().any(|line| line.starts_with(&format!("#SBATCH --{option}"))), "no --{option}");
    }
}

#[test]
fn pods_of_a_job_set_start_a_keeper_each_and_start_again_one_by_one() {
    let job = yaml("jobset-recovery.yaml");
    let hosts = at(&job, "spec.replicatedJobs.0");
    let pods = at(hosts, "template.spec");
    assert_eq!(at(&job, "spec.failurePolicy.maxRestarts").as_i64(), Some(0), "pods never start again together");
    assert!(at(pods, "backoffLimitPerIndex").as_i64() > Some(0));
    assert!(pods["backoffLimit"].is_badvalue(), "the limit of all pods would end the job");
    let rule = at(pods, "podFailurePolicy.rules.0");
    assert_eq!((at(rule, "action").as_str(), at(rule, "onExitCodes.operator").as_str()), (Some("FailJob"), Some("In")));
    let codes: Vec<_> = at(rule, "onExitCodes.values").as_vec().unwrap().iter().filter_map(Yaml::as_i64).collect();
    assert_eq!(codes, [4, 76, 77], "codes that a person has to look at (docs/reliability.md)");
    let container = at(pods, "template.spec.containers.0");
    assert_eq!(at(rule, "onExitCodes.containerName"), at(container, "name"));
    let memory = at(pods, "template.spec.volumes.1.emptyDir.medium");
    assert_eq!(memory.as_str(), Some("Memory"), "/dev/shm of a pod is small");
    let variables = at(container, "env").as_vec().unwrap();
    let of_name = |name: &str| {
        variables.iter().find(|variable| variable["name"].as_str() == Some(name)).and_then(|it| it["value"].as_str())
    };
    assert_eq!(of_name("HOSTS"), at(pods, "completions").as_i64().map(|hosts| hosts.to_string()).as_deref());
    let pod = [
        ("JOB_COMPLETION_INDEX", "2"),
        ("HOSTS", "3"),
        ("GPUS", "8"),
        ("MASTER_ADDR", "ottava-hosts-0-0.ottava"),
        ("MASTER_PORT", "29400"),
        ("OTTAVA_SECRET", "0123456789abcdef0123456789abcdef"),
    ];
    let found = lines("sh", &["-c", at(container, "args.0").as_str().unwrap()], &pod);
    let arguments = "train run.toml --gpus 8 --resume=auto";
    assert_eq!(found, expected_keepers(2..3, 3, "ottava-hosts-0-0.ottava:29400", arguments));
}

#[test]
fn nodes_of_skypilot_start_a_keeper_each() {
    let job = yaml("skypilot-recovery.yaml");
    let node = [
        ("SKYPILOT_NODE_IPS", "10.0.0.1\n10.0.0.2"),
        ("SKYPILOT_NODE_RANK", "1"),
        ("SKYPILOT_NUM_GPUS_PER_NODE", "8"),
        ("OTTAVA_SECRET", "0123456789abcdef0123456789abcdef"),
    ];
    let found = lines("sh", &["-c", at(&job, "run").as_str().unwrap()], &node);
    let arguments = "train run.toml --gpus 8 --resume=auto --set output_dir=/runs/ottava";
    assert_eq!(found, expected_keepers(1..2, 2, "10.0.0.1:29400", arguments));
}

fn yaml(name: &str) -> Yaml {
    let mut documents = YamlLoader::load_from_str(&fs::read_to_string(file(name)).unwrap()).unwrap();
    assert_eq!(documents.len(), 1, "{name}");
    documents.remove(0)
}

/// Returns the value at `path`. A part of the path that is a number is an index.
#[track_caller]
fn at<'a>(mut value: &'a Yaml, path: &str) -> &'a Yaml {
    for part in path.split('.') {
        value = match part.parse::<usize>() {
            Ok(index) => &value[index],
            Err(_) => &value[part],
        };
        assert!(!value.is_badvalue(), "no {part} of {path}");
    }
    value
}

#[test]
fn pods_of_a_job_set_start_a_rank_for_each_gpu() {
    let job = yaml("jobset.yaml");
    assert_eq!(at(&job, "apiVersion").as_str(), Some("jobset.x-k8s.io/v1alpha2"));
    assert_eq!(at(&job, "spec.network.enableDNSHostnames").as_bool(), Some(true));
    assert!(at(&job, "spec.failurePolicy.maxRestarts").as_i64() > Some(0));
    let hosts = at(&job, "spec.replicatedJobs.0");
    let pods = at(hosts, "template.spec");
    let address = format!(
        "{}-{}-0-0.{}",
        at(&job, "metadata.name").as_str().unwrap(),
        at(hosts, "name").as_str().unwrap(),
        at(&job, "metadata.name").as_str().unwrap()
    );
    let container = at(pods, "template.spec.containers.0");
    let of_name = |name: &str| {
        let variables = at(container, "env").as_vec().unwrap();
        let variable = variables.iter().find(|variable| variable["name"].as_str() == Some(name));
        variable.unwrap_or_else(|| panic!("no variable {name}"))["value"].as_str()
    };
    assert_eq!(of_name("HOSTS"), at(pods, "completions").as_i64().map(|hosts| hosts.to_string()).as_deref());
    assert_eq!(of_name("MASTER_ADDR"), Some(address.as_str()));
    let limit = at(container, "resources.limits")["nvidia.com/gpu"].as_i64();
    assert_eq!(of_name("GPUS"), limit.map(|gpus| gpus.to_string()).as_deref());
    let memory = at(pods, "template.spec.volumes.1.emptyDir.medium");
    assert_eq!(memory.as_str(), Some("Memory"), "/dev/shm of a pod is small");
    let secret = "0123456789abcdef0123456789abcdef";
    let pod = [
        ("JOB_COMPLETION_INDEX", "1"),
        ("HOSTS", "2"),
        ("GPUS", "8"),
        ("MASTER_ADDR", address.as_str()),
        ("MASTER_PORT", "29400"),
        ("OTTAVA_SECRET", secret),
    ];
    let found = lines("sh", &["-c", at(container, "args.0").as_str().unwrap()], &pod);
    assert_eq!(found, expected(8..16, 8, 16, &format!("{address}:29400"), "train run.toml --resume=auto"));
}

#[test]
fn nodes_of_a_train_job_start_a_keeper_each() {
    let job = yaml("trainjob.yaml");
    assert_eq!(at(&job, "apiVersion").as_str(), Some("trainer.kubeflow.org/v1alpha1"));
    assert_eq!(
        (at(&job, "kind").as_str(), at(&job, "spec.runtimeRef.name").as_str()),
        (Some("TrainJob"), Some("torch-distributed"))
    );
    let trainer = at(&job, "spec.trainer");
    for key in ["image", "command", "env.0.valueFrom.secretKeyRef"] {
        at(trainer, key);
    }
    let spec = "spec.runtimePatches.0.trainingRuntimeSpec.template.spec.replicatedJobs.0";
    assert_eq!(at(&job, &format!("{spec}.name")).as_str(), Some("node"), "the name in the runtime");
    let pod = at(&job, &format!("{spec}.template.spec.template.spec"));
    assert_eq!(at(pod, "volumes.1.emptyDir.medium").as_str(), Some("Memory"), "/dev/shm of a pod is small");
    assert_eq!(at(pod, "containers.0.volumeMounts.1.mountPath").as_str(), Some("/dev/shm"));
    let script = at(trainer, "args.0").as_str().unwrap().replace("cd /work", "");
    let node = [
        ("PET_NODE_RANK", "2"),
        ("PET_NNODES", "3"),
        ("PET_MASTER_ADDR", "n0"),
        ("PET_MASTER_PORT", "29400"),
        ("OTTAVA_SECRET", "0123456789abcdef0123456789abcdef"),
    ];
    let gpus = at(trainer, "resourcesPerNode.limits")["nvidia.com/gpu"].as_i64().unwrap();
    let expected = format!("2/3 local  at n0:29400 secret 32 train run.toml --gpus {gpus} --resume=auto");
    assert_eq!(lines("sh", &["-c", &script], &node), BTreeSet::from([expected]));
}

#[test]
fn nodes_of_skypilot_start_a_rank_for_each_gpu() {
    let job = yaml("skypilot.yaml");
    for key in
        ["name", "num_nodes", "resources.accelerators", "resources.job_recovery", "secrets.OTTAVA_SECRET", "setup"]
    {
        at(&job, key);
    }
    let node = [
        ("SKYPILOT_NODE_IPS", "10.0.0.1\n10.0.0.2"),
        ("SKYPILOT_NODE_RANK", "1"),
        ("SKYPILOT_NUM_GPUS_PER_NODE", "8"),
        ("OTTAVA_SECRET", "0123456789abcdef0123456789abcdef"),
    ];
    let found = lines("sh", &["-c", at(&job, "run").as_str().unwrap()], &node);
    let arguments = "train run.toml --resume=auto --set output_dir=/runs/ottava";
    assert_eq!(found, expected(8..16, 8, 16, "10.0.0.1:29400", arguments));
}
