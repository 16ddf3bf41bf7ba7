//! The reasons why the ranks of a job cannot continue. The first fault is final: every later call of every rank, in every group, reports it.

use crate::error::{Error, RankFault};
use std::fs;
use std::time::Duration;

#[derive(Clone, Debug, PartialEq, Eq)]
pub(super) enum Fault {
    /// A rank ended, or was `silent` for this time. The fields name the rank, its process, and `details` of its end.
    Lost { rank: usize, process: String, silent: Option<Duration>, details: Option<String> },
    /// Ranks called different collectives. The sentence names both calls.
    Desync(String),
    /// A live rank did not call a collective in time, or waits too long for its GPU. The sentence names the ranks and the call.
    Late(String),
}

impl Fault {
    /// Returns the fault of a `rank` that ended: it dropped its communicator, or its process died.
    pub fn ended(rank: usize, process: &str) -> Fault {
        Fault::Lost { rank, process: process.into(), silent: None, details: None }
    }

    /// Returns the error of the work that `during` names. `recent` are the last collectives of the rank that reports the error.
    pub fn error(&self, during: &str, recent: Vec<String>) -> Error {
        let (fault, message) = match self {
            Fault::Lost { rank, process, silent, details } => {
                let how = match silent {
                    None => "ended".into(),
                    Some(limit) => format!("sent nothing for {limit:?}"),
                };
                let details = details.as_ref().map_or(String::new(), |details| format!("; {details}"));
                (RankFault::Lost, format!("rank {rank} ({process}) {how} during {during}{details}"))
            }
            Fault::Desync(message) => (RankFault::Desync, format!("ranks disagree: {message}")),
            Fault::Late(message) => (RankFault::Late, message.clone()),
        };
        Error::Ranks { fault, message, recent }
    }
}

/// Formats ranks as "rank 1", "ranks 1, 3" or "ranks 4 to 7". Many ranks without a pattern become "ranks 0, 8, 16 and 61 others".
pub(super) fn list_ranks(ranks: &[usize]) -> String {
    /// The maximum number of runs that are listed.
    const LISTED: usize = 16;
    let runs: Vec<_> = ranks.chunk_by(|a, b| *b == a + 1).collect();
    let run = |run: &&[usize]| match run {
        [first, _, .., last] => vec![format!("{first} to {last}")],
        few => few.iter().map(usize::to_string).collect(),
    };
    let shown = if runs.len() > LISTED { 3 } else { runs.len() };
    let others: usize = runs[shown..].iter().map(|run| run.len()).sum();
    let others = if others > 0 { format!(" and {others} others") } else { String::new() };
    let list = runs[..shown].iter().flat_map(run).collect::<Vec<_>>().join(", ");
    format!("rank{} {list}{others}", if ranks.len() == 1 { "" } else { "s" })
}

/// Describes this process, for example "pid 4242 on host x".
pub(super) fn this_process() -> String {
    let host = fs::read_to_string("/proc/sys/kernel/hostname").unwrap_or_default();
    let host = if host.trim().is_empty() { "unknown" } else { host.trim() };
    format!("pid {} on host {host}", std::process::id())
}
