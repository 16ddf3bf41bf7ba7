//! Checks of `[recovery]`: settings that a recovery would contradict.

use crate::RunConfig;
use crate::demands::Problems;

/// The maximum timeout in seconds, thirty days.
const MAX_TIMEOUT: u64 = 30 * 86_400;

impl RunConfig {
    /// Lists the problems of the table `[recovery]`, one sentence each.
    pub(super) fn recovery_problems(&self) -> Vec<String> {
        let (mut problems, recovery) = (Problems::default(), &self.recovery);
        problems.demand_steps("recovery.snapshot_steps", recovery.snapshot_steps);
        let timeouts = [
            ("silence_timeout", recovery.silence_timeout),
            ("host_timeout", recovery.host_timeout),
            ("start_timeout", recovery.start_timeout),
        ];
        for (key, seconds) in timeouts {
            problems.demand(
                (1..=MAX_TIMEOUT).contains(&seconds),
                format!("`recovery.{key}` is {seconds}; set it to 1 to {MAX_TIMEOUT} seconds"),
            );
        }
        problems.demand(
            recovery.spares <= 10_000,
            format!("`recovery.spares` is {}; it is at most 10000", recovery.spares),
        );
        problems.demand(
            recovery.memory_dir.is_absolute(),
            format!(
                "`recovery.memory_dir` is {:?}; name a folder of a memory file system, such as /dev/shm",
                recovery.memory_dir.display().to_string()
            ),
        );
        if recovery.is_on() {
            problems.demand(
                recovery.min_hosts == 0 || self.training.global_batch_size.is_some(),
                "`recovery.min_hosts` is set, and with fewer hosts a step would have fewer rows; set `training.global_batch_size`",
            );
            problems.demand(
                recovery.min_hosts == 0 || self.parallel.data == 0,
                "`recovery.min_hosts` is set, and `parallel.data` fixes the number of ranks; leave `parallel.data` out",
            );
            problems.demand(
                !self.alarms.rolls_back(),
                "`recovery.snapshot_steps` is set, and alarms return the run to earlier checkpoints: a recovery would undo this; set the alarms to \"warn\" or \"stop\"",
            );
            problems.demand(
                !self.reinforcement.endpoint.is_on(),
                "`recovery.snapshot_steps` is set, and the clients of `reinforcement.endpoint` would lose their server in a recovery; set snapshot_steps to 0",
            );
            problems.demand(
                !self.parallel.auto,
                "`recovery.snapshot_steps` is set, and ranks that start again need the division that they had; set the keys that `ottava plan` prints instead of `parallel.auto`",
            );
        }
        problems.0
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    fn problems(change: impl Fn(&mut RunConfig)) -> String {
        let mut config = RunConfig::default();
        config.recovery.snapshot_steps = 5;
        change(&mut config);
        config.recovery_problems().join("\n")
    }

    #[test]
    fn settings_that_a_recovery_would_contradict_are_errors() {
        assert_eq!(problems(|_| {}), "");
        assert!(problems(|config| config.parallel.auto = true).contains("instead of `parallel.auto`"));
        assert!(
            problems(|config| config.reinforcement.endpoint.address = "127.0.0.1:0".into())
                .contains("reinforcement.endpoint")
        );
        assert!(problems(|config| config.recovery.memory_dir = "shm".into()).contains("recovery.memory_dir"));
        assert!(problems(|config| config.recovery.silence_timeout = 0).contains("recovery.silence_timeout"));
        let smaller = |config: &mut RunConfig| {
            config.recovery.min_hosts = 2;
            config.training.global_batch_size = Some(8);
        };
        assert_eq!(problems(smaller), "");
        assert!(problems(|config| config.recovery.min_hosts = 2).contains("set `training.global_batch_size`"));
        let fixed = |config: &mut RunConfig| {
            smaller(config);
            config.parallel.data = 4;
        };
        assert!(problems(fixed).contains("leave `parallel.data` out"));
        assert!(problems(|config| config.recovery.spares = 20_000).contains("recovery.spares"));
        let off = |config: &mut RunConfig| {
            config.recovery.snapshot_steps = 0;
            config.parallel.auto = true;
        };
        assert_eq!(problems(off), "", "without snapshots, nothing is recovered");
    }
}
