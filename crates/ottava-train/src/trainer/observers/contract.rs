//! What an observer is, and what it may do.

use crate::objective::LoadedRows;
use crate::trainer::current_run::CurrentRun;
use crate::trainer::environment::Environment;
use crate::trainer::files::RunFiles;
use crate::trainer::report::StepReport;
use ottava_checkpoint::Progress;
use ottava_common::error::Result;
use ottava_recipe::scaling::CastRecord;
use ottava_sentinel::{AlarmMemory, NormAlarmPolicy};
use serde_json::json;

/// Findings that are named in the log of the program; all findings are in the logs of the run.
pub(super) const SHOWN: usize = 4;

/// Watches the steps of a run.
pub(in crate::trainer) trait Observer {
    /// Before `step`, whose `rows` are loaded.
    fn before_step(&mut self, _step: u64, _rows: &LoadedRows, _run: &mut Watched) -> Result<()> {
        Ok(())
    }

    /// After the update of a step.
    fn after_step(&mut self, _done: &StepReport, _run: &mut Watched) -> Result<()> {
        Ok(())
    }

    /// When the statistics of casts up to `step` are logged.
    fn statistics(&mut self, _step: u64, _casts: &[CastRecord], _run: &mut Watched) -> Result<()> {
        Ok(())
    }

    /// Writes what it compares later steps with into the `memory` that a checkpoint saves. `casts` are the statistics up to now, empty without a log
    /// of casts.
    fn remember(&self, _casts: &[CastRecord], _memory: &mut AlarmMemory) {}
}

/// The run, as observers see it.
pub(in crate::trainer) struct Watched<'a> {
    pub(in crate::trainer) environment: &'a Environment,
    pub(in crate::trainer) run: &'a mut CurrentRun,
    pub(in crate::trainer) progress: &'a mut Progress,
    /// The files of the run, on the rank that writes them.
    pub(in crate::trainer) files: Option<&'a mut RunFiles>,
    pub(in crate::trainer) requests: &'a mut Requests,
}

/// What observers ask of the run after the step in progress, each with the reason.
#[derive(Default)]
pub(in crate::trainer) struct Requests {
    /// Saves a checkpoint and ends.
    pub(in crate::trainer) pause: Option<String>,
    /// Goes back to an earlier checkpoint.
    pub(in crate::trainer) rollback: Option<String>,
    /// Ends without a checkpoint.
    pub(in crate::trainer) stop: Option<String>,
}

/// Something out of the ordinary in a step.
pub(super) struct Alarm<'a> {
    /// The name under which it is recorded.
    pub(super) name: &'a str,
    /// The tensors or layers that it is about.
    pub(super) tensors: &'a [&'a str],
    /// The number that is out of the ordinary.
    pub(super) value: f64,
    /// A sentence about it.
    pub(super) text: String,
}

impl Watched<'_> {
    /// Logs an alarm of `step`, and asks for what its `policy` says.
    pub(super) fn raise(&mut self, step: u64, policy: NormAlarmPolicy, alarm: Alarm) -> Result<()> {
        if policy == NormAlarmPolicy::Off {
            return Ok(());
        }
        let (Environment { config, ranks, .. }, Alarm { name, tensors, value, text }) = (self.environment, alarm);
        if ranks.leads() {
            tracing::warn!("step {step}: {text}");
        }
        if let Some(files) = &mut self.files {
            let fields = [
                ("alarm", json!(name)),
                ("tensors", json!(tensors)),
                ("value", json!(value)),
                ("policy", json!(policy.as_str())),
                ("text", json!(text)),
            ];
            files.log_alarm(&config.output_dir, step, &fields)?;
        }
        let request = match policy {
            NormAlarmPolicy::Off | NormAlarmPolicy::Warn | NormAlarmPolicy::Skip => return Ok(()),
            NormAlarmPolicy::Rollback => &mut self.requests.rollback,
            NormAlarmPolicy::Pause => &mut self.requests.pause,
            NormAlarmPolicy::Stop => &mut self.requests.stop,
        };
        request.get_or_insert(text);
        Ok(())
    }
}

/// The first of `found`, and how many more `things` there are.
pub(super) fn listed<T: ToString>(found: &[T], things: &str) -> String {
    let shown = found.iter().take(SHOWN).map(T::to_string).collect::<Vec<_>>().join("; ");
    match found.len().saturating_sub(SHOWN) {
        0 => shown,
        more => format!("{shown}; and {more} more {things}"),
    }
}
