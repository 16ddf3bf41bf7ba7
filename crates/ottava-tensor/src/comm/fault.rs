//! Why a group cannot go on. The first fault is final: every later collective of every rank reports it.

use super::call::Call;
use crate::error::{Error, RankFault};
use std::fs;
use std::time::Duration;

#[derive(Clone, Debug, PartialEq, Eq)]
pub(super) enum Fault {
    /// A rank ended or was silent for a limit: the rank and its process, and which of the two.
    Lost { rank: usize, process: String, silent: Option<Duration> },
    /// Ranks called different collectives; the sentence names both sides.
    Desync(String),
}

impl Fault {
    /// `rank` ended: it dropped its communicator, or its process died.
    pub fn ended(rank: usize, process: &str) -> Fault {
        Fault::Lost { rank, process: process.into(), silent: None }
    }

    /// The error of what `during` names; `recent` are the last collectives of the rank that reports it.
    pub fn error(&self, during: &str, recent: Vec<String>) -> Error {
        match self {
            Fault::Lost { rank, process, silent } => {
                let how = match silent {
                    None => "ended".into(),
                    Some(limit) => format!("sent nothing for {limit:?}"),
                };
                let message = format!("rank {rank} ({process}) {how} during {during}");
                Error::Ranks { fault: RankFault::Lost, message, recent }
            }
            Fault::Desync(message) => {
                Error::Ranks { fault: RankFault::Desync, message: format!("ranks disagree: {message}"), recent }
            }
        }
    }
}

/// "all_reduce `grad norm`, collective 17".
pub(super) fn during(call: &Call, number: u64) -> String {
    format!("{}, collective {number}", call.title())
}

/// This process, as "pid 4242 on host x".
pub(super) fn this_process() -> String {
    let host = fs::read_to_string("/proc/sys/kernel/hostname").unwrap_or_default();
    let host = if host.trim().is_empty() { "unknown" } else { host.trim() };
    format!("pid {} on host {host}", std::process::id())
}
