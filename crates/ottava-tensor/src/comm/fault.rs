//! Why a group cannot go on. The first fault is final: every later collective of every rank reports it.

use super::call::Call;
use crate::error::{Error, RankFault};
use std::fs;
use std::time::Duration;

#[derive(Clone, Debug, PartialEq, Eq)]
pub(super) enum Fault {
    /// A rank ended or was silent for a limit: the rank and its process, which of the two, and what else is known of its end.
    Lost { rank: usize, process: String, silent: Option<Duration>, details: Option<String> },
    /// Ranks called different collectives; the sentence names both sides.
    Desync(String),
    /// A rank that lives did not come to a collective, or waits for its GPU; the sentence names who waits where.
    Late(String),
}

impl Fault {
    /// `rank` ended: it dropped its communicator, or its process died.
    pub fn ended(rank: usize, process: &str) -> Fault {
        Fault::Lost { rank, process: process.into(), silent: None, details: None }
    }

    /// The error of what `during` names; `recent` are the last collectives of the rank that reports it.
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

/// "all_reduce `grad norm`, collective 17".
pub(super) fn during(call: &Call, number: u64) -> String {
    format!("{}, collective {number}", call.title())
}

/// "rank 1" or "ranks 1, 3".
pub(super) fn list_ranks(ranks: &[usize]) -> String {
    let list: Vec<_> = ranks.iter().map(usize::to_string).collect();
    format!("rank{} {}", if ranks.len() == 1 { "" } else { "s" }, list.join(", "))
}

/// This process, as "pid 4242 on host x".
pub(super) fn this_process() -> String {
    let host = fs::read_to_string("/proc/sys/kernel/hostname").unwrap_or_default();
    let host = if host.trim().is_empty() { "unknown" } else { host.trim() };
    format!("pid {} on host {host}", std::process::id())
}
