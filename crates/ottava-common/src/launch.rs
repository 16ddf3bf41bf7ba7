//! The place of this process among the ranks of its job, from the environment variables of launchers.
//!
//! Recognised launchers are torchrun, Open MPI, MPICH and Intel MPI, MVAPICH, Slurm and indexed jobs of Kubernetes, in this order, as in Hugging Face
//! Accelerate. The launchers define the variables; see [docs/parallelism.md](../../../docs/parallelism.md).

use crate::error::{Error, Result};
use std::os::unix::process::parent_id;

/// The default port at which ranks meet.
const PORT: u16 = 29_400;

/// The place of a process in its job.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct Place {
    /// The name of the launcher, for messages.
    pub launcher: &'static str,
    /// The number of this process, from 0.
    pub rank: usize,
    /// The number of processes of the job.
    pub size: usize,
    /// The number of this process among the processes of its machine. It selects the GPU.
    pub local_rank: usize,
    /// The host and the port at which rank 0 listens.
    pub address: String,
}

/// The variables of a launcher that starts one process per rank.
struct Launcher {
    name: &'static str,
    rank: &'static str,
    size: &'static str,
    /// The variables of the local rank. The first variable that is set counts.
    local_rank: &'static [&'static str],
    /// The variable of the number of processes on this machine.
    local_size: Option<&'static str>,
    /// The variable without which the other variables describe the surroundings of the process, not a rank.
    needs: Option<&'static str>,
}

/// The name of this program as the launcher of its own processes.
pub const OWN: &str = "ottava";
/// The variable with the address, for processes that this program starts.
pub const OWN_ADDRESS: &str = "OTTAVA_ADDRESS";
/// The variable with the rank of such a process.
pub const OWN_RANK: &str = "OTTAVA_RANK";
/// The variable with the number of such processes.
pub const OWN_SIZE: &str = "OTTAVA_RANKS";

/// The variable with the id of the process that has started such a process.
pub const OWN_PARENT: &str = "OTTAVA_PARENT";

/// A launcher without variables, from which the rows below are made.
const LAUNCHER: Launcher = Launcher { name: "", rank: "", size: "", local_rank: &[], local_size: None, needs: None };

const LAUNCHERS: [Launcher; 7] = [
    Launcher { name: OWN, rank: OWN_RANK, size: OWN_SIZE, local_rank: &[OWN_RANK], ..LAUNCHER },
    Launcher { name: "torchrun", rank: "RANK", size: "WORLD_SIZE", local_rank: &["LOCAL_RANK"], ..LAUNCHER },
    Launcher {
        name: "Open MPI",
        rank: "OMPI_COMM_WORLD_RANK",
        size: "OMPI_COMM_WORLD_SIZE",
        local_rank: &["OMPI_COMM_WORLD_LOCAL_RANK"],
        local_size: Some("OMPI_COMM_WORLD_LOCAL_SIZE"),
        ..LAUNCHER
    },
    Launcher {
        name: "MPI",
        rank: "PMI_RANK",
        size: "PMI_SIZE",
        local_rank: &["MPI_LOCALRANKID", "SLURM_LOCALID"],
        local_size: Some("MPI_LOCALNRANKS"),
        ..LAUNCHER
    },
    Launcher {
        name: "MVAPICH",
        rank: "MV2_COMM_WORLD_RANK",
        size: "MV2_COMM_WORLD_SIZE",
        local_rank: &["MV2_COMM_WORLD_LOCAL_RANK"],
        local_size: Some("MV2_COMM_WORLD_LOCAL_SIZE"),
        ..LAUNCHER
    },
    // A batch script also has most of Slurm's variables. Only a task of `srun` has the number of its step.
    Launcher {
        name: SLURM,
        rank: "SLURM_PROCID",
        size: "SLURM_STEP_NUM_TASKS",
        local_rank: &["SLURM_LOCALID"],
        needs: Some(SLURM_STEP),
        ..LAUNCHER
    },
    // Without the number of processes, the processes of such a job do not belong together.
    Launcher {
        name: "a Kubernetes indexed job",
        rank: "JOB_COMPLETION_INDEX",
        size: "WORLD_SIZE",
        needs: Some("WORLD_SIZE"),
        ..LAUNCHER
    },
];

const SLURM: &str = "Slurm";
const SLURM_STEP: &str = "SLURM_STEP_ID";

/// Returns the number of tasks, if Slurm has started this process as a batch script with several tasks, outside of any step of `srun`. Only `srun`
/// starts the ranks of these tasks.
pub fn tasks_of_batch_script(variable: impl Fn(&str) -> Option<String>) -> Option<usize> {
    let tasks = variable("SLURM_NTASKS")?.trim().parse().ok()?;
    (tasks > 1 && variable(SLURM_STEP).is_none()).then_some(tasks)
}

impl Place {
    /// Returns the place that the environment `variable` describes. Returns `None` if no launcher started this process, or if it is the only process.
    ///
    /// Errors if the variables of a launcher are incomplete or contradict each other.
    pub fn from_variables(variable: impl Fn(&str) -> Option<String>) -> Result<Option<Place>> {
        let number = |name: &str| -> Result<Option<usize>> {
            let Some(text) = variable(name) else { return Ok(None) };
            let parsed = text.trim().parse();
            parsed.map(Some).map_err(|_| Error::Config(format!("environment variable {name}={text:?} is not a number")))
        };
        let is_set = |name: &str| variable(name).is_some();
        let Some(launcher) =
            LAUNCHERS.iter().find(|launcher| is_set(launcher.rank) && launcher.needs.is_none_or(is_set))
        else {
            return Ok(None);
        };
        let rank = number(launcher.rank)?.expect("it is set");
        // Slurm before version 14.03 does not set the number of the step's tasks.
        let of_job = || if launcher.name == SLURM { number("SLURM_NTASKS") } else { Ok(None) };
        let size = match number(launcher.size)? {
            None => of_job()?,
            size => size,
        };
        let Some(size) = size else {
            return Err(Error::Config(format!(
                "{} is set, which {} does, and {} is not; set it to the number of processes",
                launcher.rank, launcher.name, launcher.size
            )));
        };
        if rank >= size {
            return Err(Error::Config(format!(
                "{}={rank} is no rank of {size} processes ({}); ranks count from 0",
                launcher.rank, launcher.size
            )));
        }
        if size == 1 {
            return Ok(None);
        }
        let mut local_rank = 0;
        for name in launcher.local_rank.iter().rev() {
            local_rank = number(name)?.unwrap_or(local_rank);
        }
        let address = Place::address(launcher, &variable, &number)?;
        Ok(Some(Place { launcher: launcher.name, rank, size, local_rank, address }))
    }

    fn address(
        launcher: &Launcher,
        variable: &impl Fn(&str) -> Option<String>,
        number: &impl Fn(&str) -> Result<Option<usize>>,
    ) -> Result<String> {
        if let (true, Some(address)) = (launcher.rank == OWN_RANK, variable(OWN_ADDRESS)) {
            return Ok(address);
        }
        let in_slurm = variable(SLURM_STEP).is_some();
        let nodes = || variable("SLURM_STEP_NODELIST").or_else(|| variable("SLURM_JOB_NODELIST"));
        let local_size = launcher.local_size.map(number).transpose()?.flatten();
        let on_one_host = local_size.is_some() && local_size == number(launcher.size)?;
        let host = match variable("MASTER_ADDR") {
            Some(host) => host,
            None if on_one_host => "127.0.0.1".into(),
            None if in_slurm => nodes().as_deref().and_then(first_host).ok_or_else(|| {
                Error::Config(
                    "Slurm's SLURM_STEP_NODELIST names no host; set MASTER_ADDR to the host of rank 0".to_string(),
                )
            })?,
            None => {
                return Err(Error::Config(format!(
                    "{} started this process and MASTER_ADDR is not set; set it to the host of rank 0",
                    launcher.name
                )));
            }
        };
        let port = match number("MASTER_PORT")? {
            // torchrun itself listens at this port.
            Some(port) if launcher.name == "torchrun" => port + 1,
            Some(port) => port,
            // Jobs that share a host use different ports.
            None if on_one_host => 20_000 + parent_id() as usize % 20_000,
            None if in_slurm => 20_000 + number("SLURM_JOB_ID")?.unwrap_or(0) % 20_000,
            None => usize::from(PORT),
        };
        match u16::try_from(port) {
            Ok(port) if port > 0 => Ok(format!("{host}:{port}")),
            _ => Err(Error::Config(format!("MASTER_PORT gives port {port}; choose one from 1 to 65534"))),
        }
    }
}

/// Returns the first host of a list in Slurm's abbreviation: `n[01-03,7],login` begins with `n01`.
fn first_host(nodes: &str) -> Option<String> {
    let end = nodes.find([',', '[']).unwrap_or(nodes.len());
    let (prefix, rest) = nodes.split_at(end);
    let Some(numbers) = rest.strip_prefix('[') else { return Some(prefix.to_string()).filter(|host| !host.is_empty()) };
    let (numbers, rest) = numbers.split_once(']')?;
    let first = numbers.split([',', '-']).next().filter(|number| !number.is_empty())?;
    // The text after a bracket belongs to each name.
    let suffix = rest.split(',').next().unwrap_or_default();
    Some(format!("{prefix}{first}{suffix}"))
}

#[cfg(test)]
mod tests {
    use super::*;

    fn place(variables: &[(&str, &str)]) -> Result<Option<Place>> {
        Place::from_variables(|name| variables.iter().find(|(key, _)| *key == name).map(|(_, value)| value.to_string()))
    }

    fn found(launcher: &'static str, [rank, size, local_rank]: [usize; 3], address: &str) -> Option<Place> {
        Some(Place { launcher, rank, size, local_rank, address: address.into() })
    }

    #[test]
    fn launchers_are_recognised_by_their_variables() {
        let torchrun = [
            ("RANK", "3"),
            ("WORLD_SIZE", "4"),
            ("LOCAL_RANK", "1"),
            ("MASTER_ADDR", "node0"),
            ("MASTER_PORT", "29500"),
            ("SLURM_PROCID", "0"),
            ("SLURM_NTASKS", "2"),
        ];
        // torchrun listens at MASTER_PORT itself. It takes precedence over the Slurm that started it.
        assert_eq!(place(&torchrun).unwrap(), found("torchrun", [3, 4, 1], "node0:29501"));
        let mpi = [
            ("OMPI_COMM_WORLD_RANK", "1"),
            ("OMPI_COMM_WORLD_SIZE", "2"),
            ("OMPI_COMM_WORLD_LOCAL_RANK", "1"),
            ("MASTER_ADDR", "10.0.0.1"),
        ];
        assert_eq!(place(&mpi).unwrap(), found("Open MPI", [1, 2, 1], "10.0.0.1:29400"));
        let mpich = [
            ("PMI_RANK", "1"),
            ("PMI_SIZE", "2"),
            ("MPI_LOCALRANKID", "0"),
            ("MASTER_ADDR", "a"),
            ("MASTER_PORT", "7"),
        ];
        assert_eq!(place(&mpich).unwrap(), found("MPI", [1, 2, 0], "a:7"));
        let slurm = [
            ("SLURM_STEP_ID", "0"),
            ("SLURM_PROCID", "5"),
            ("SLURM_NTASKS", "8"),
            ("SLURM_LOCALID", "1"),
            ("SLURM_JOB_NODELIST", "gpu[07-08,11]"),
            ("SLURM_JOB_ID", "123456"),
        ];
        assert_eq!(place(&slurm).unwrap(), found("Slurm", [5, 8, 1], "gpu07:23456"));
        let kubernetes = [("JOB_COMPLETION_INDEX", "1"), ("WORLD_SIZE", "2"), ("MASTER_ADDR", "job-0.svc")];
        assert_eq!(place(&kubernetes).unwrap(), found("a Kubernetes indexed job", [1, 2, 0], "job-0.svc:29400"));
    }

    #[test]
    fn a_process_alone_has_no_place() {
        for alone in [
            &[][..],
            &[("RANK", "0"), ("WORLD_SIZE", "1")],
            // These are batch scripts, a shell that `srun --pty` has started in an allocation of four tasks, and an index without a group.
            &[("SLURM_PROCID", "0"), ("SLURM_NTASKS", "4"), ("SLURM_JOB_NODELIST", "n1")],
            &[("SLURM_PROCID", "0")],
            &[("SLURM_PROCID", "0"), ("SLURM_NTASKS", "4"), ("SLURM_STEP_ID", "4"), ("SLURM_STEP_NUM_TASKS", "1")],
            &[("JOB_COMPLETION_INDEX", "3")],
        ] {
            assert_eq!(place(alone).unwrap(), None, "{alone:?}");
        }
    }

    #[test]
    fn incomplete_variables_are_errors_that_name_them() {
        for (variables, says) in [
            (&[("RANK", "0")][..], "WORLD_SIZE is not"),
            (&[("RANK", "x"), ("WORLD_SIZE", "2")], "RANK=\"x\" is not a number"),
            (&[("RANK", "2"), ("WORLD_SIZE", "2")], "RANK=2 is no rank of 2"),
            (&[("RANK", "1"), ("WORLD_SIZE", "2")], "MASTER_ADDR is not set"),
            (&[("RANK", "1"), ("WORLD_SIZE", "2"), ("MASTER_ADDR", "a"), ("MASTER_PORT", "65535")], "port 65536"),
            (
                &[("SLURM_PROCID", "1"), ("SLURM_NTASKS", "2"), ("SLURM_STEP_ID", "0")],
                "SLURM_STEP_NODELIST names no host",
            ),
        ] {
            let error = place(variables).unwrap_err();
            assert_eq!(error.exit_code(), 1);
            assert!(error.to_string().contains(says), "{error}");
        }
    }

    #[test]
    fn ranks_of_one_host_need_no_address() {
        let port = 20_000 + parent_id() as usize % 20_000;
        for (name, variables) in [
            (
                "Open MPI",
                [
                    "OMPI_COMM_WORLD_RANK",
                    "OMPI_COMM_WORLD_SIZE",
                    "OMPI_COMM_WORLD_LOCAL_RANK",
                    "OMPI_COMM_WORLD_LOCAL_SIZE",
                ],
            ),
            ("MPI", ["PMI_RANK", "PMI_SIZE", "MPI_LOCALRANKID", "MPI_LOCALNRANKS"]),
            (
                "MVAPICH",
                [
                    "MV2_COMM_WORLD_RANK",
                    "MV2_COMM_WORLD_SIZE",
                    "MV2_COMM_WORLD_LOCAL_RANK",
                    "MV2_COMM_WORLD_LOCAL_SIZE",
                ],
            ),
        ] {
            let [rank, size, local_rank, local_size] = variables;
            let all = [(rank, "1"), (size, "4"), (local_rank, "1"), (local_size, "4")];
            assert_eq!(place(&all).unwrap(), found(name, [1, 4, 1], &format!("127.0.0.1:{port}")));
            let elsewhere = [(rank, "1"), (size, "4"), (local_rank, "1"), (local_size, "2")];
            assert!(place(&elsewhere).unwrap_err().to_string().contains("MASTER_ADDR is not set"));
        }
    }

    #[test]
    fn tasks_with_pmi_meet_on_slurms_first_host() {
        let pmi2 = [
            ("PMI_RANK", "3"),
            ("PMI_SIZE", "4"),
            ("SLURM_PROCID", "3"),
            ("SLURM_NTASKS", "4"),
            ("SLURM_LOCALID", "1"),
            ("SLURM_STEP_ID", "0"),
            ("SLURM_STEP_NODELIST", "n[3-4]"),
            ("SLURM_JOB_ID", "7"),
        ];
        assert_eq!(place(&pmi2).unwrap(), found("MPI", [3, 4, 1], "n3:20007"));
    }

    #[test]
    fn a_batch_script_with_several_tasks_is_known() {
        let tasks = |variables: &[(&str, &str)]| {
            tasks_of_batch_script(|name| {
                variables.iter().find(|(key, _)| *key == name).map(|(_, value)| value.to_string())
            })
        };
        assert_eq!(tasks(&[("SLURM_NTASKS", "4")]), Some(4));
        assert_eq!(tasks(&[("SLURM_NTASKS", "4"), ("SLURM_STEP_ID", "0")]), None);
        assert_eq!(tasks(&[("SLURM_NTASKS", "1")]), None);
    }

    #[test]
    fn the_first_host_of_a_list_is_found() {
        for (nodes, first) in [
            ("n1", "n1"),
            ("n1,n2", "n1"),
            ("n[01-03,7]", "n01"),
            ("n[7]", "n7"),
            ("rack[2-3].cluster,login", "rack2.cluster"),
            ("a,b[1-2]", "a"),
        ] {
            assert_eq!(first_host(nodes).as_deref(), Some(first), "{nodes}");
        }
        for nonsense in ["", "n[", "n[]"] {
            assert_eq!(first_host(nonsense), None, "{nonsense}");
        }
    }
}
