//! The settings of the environment of a run, which is a command.

use super::failure::OnError;
use super::program::CommandConfig;
use crate::environment::Environment;
use ottava_common::Result;
use schemars::JsonSchema;
use serde::{Deserialize, Serialize};

/// The `[reinforcement.environment]` table: a program that answers each turn of the model, so that a completion is a conversation of several turns. It
/// reads JSON lines from its standard input, and answers each with a line on its standard output (docs/environments.md).
#[derive(Clone, Debug, PartialEq, Serialize, Deserialize, JsonSchema)]
#[serde(deny_unknown_fields, default)]
pub struct EnvironmentConfig {
    /// The program and its arguments, without a shell: ["python3", "environment.py"]. [] has no environment: each completion is one turn.
    pub command: Vec<String>,
    /// Turns of the model at most. The environment also answers the last turn, but no turn follows.
    pub max_turns: usize,
    /// Processes that run at the same time on each rank; each answers other turns.
    pub processes: usize,
    /// The most turns of a request, each of another conversation.
    pub batch_size: usize,
    /// Seconds in which a request must be answered; after that, the process is killed.
    pub timeout: f64,
    /// Attempts for each request; each one after the first has a new process.
    pub attempts: u32,
    /// What happens to the conversations of a request after its last attempt: "stop" ends the run with the error, "zero" ends the conversations with a
    /// reward of 0 for their last turns, and "skip" ends them without a reward for their last turns.
    pub on_error: OnError,
}

impl Default for EnvironmentConfig {
    fn default() -> EnvironmentConfig {
        let CommandConfig { command, processes, batch_size, timeout, attempts, on_error } = CommandConfig::new(&[]);
        EnvironmentConfig { command, max_turns: 8, processes, batch_size, timeout, attempts, on_error }
    }
}

impl EnvironmentConfig {
    /// Whether there is an environment.
    pub fn is_on(&self) -> bool {
        !self.command.is_empty()
    }

    /// Starts the processes of the environment.
    ///
    /// Errors with [`ottava_common::Error::Config`] if they cannot be started or a setting is 0.
    pub fn start(&self) -> Result<Box<dyn Environment>> {
        let EnvironmentConfig { command, processes, batch_size, timeout, attempts, on_error, .. } = self.clone();
        CommandConfig { command, processes, batch_size, timeout, attempts, on_error }.environment("environment")
    }
}
