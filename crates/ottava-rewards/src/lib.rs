//! Scores of completions for reinforcement learning.
//!
//! ```
//! use ottava_rewards::{Deadline, Prompt, RewardSpec, Sample};
//!
//! let spec = serde_json::json!({"type": "math", "weight": 2.0});
//! let mut rewards = RewardSpec::build(&[serde_json::from_value(spec).unwrap()])?;
//! let prompt = Prompt::Text("What is 17 + 25?".into());
//! let record = serde_json::json!({"answer": "42"}).as_object().unwrap().clone();
//! let sample = Sample {
//!     prompt: &prompt,
//!     completion: "It is \\boxed{84/2}.",
//!     completion_ids: &[],
//!     model_scores: &[],
//!     truncated: false,
//!     group: 0,
//!     index: 0,
//!     step: 1,
//!     environment: None,
//!     record: &record,
//! };
//! assert_eq!(rewards.score(&[sample], Deadline::never())?.totals, [Some(2.0)]);
//! # Ok::<(), ottava_common::Error>(())
//! ```
//!
//! A [`Reward`] scores a batch of [`Sample`]s, and [`Rewards`] adds several by weight, as the settings [`RewardSpec`] say. `docs/rewards.md` describes
//! every reward for users.
//!
//! - `rules/`: rewards that compute their score here. They are total: any completion is scored in time and memory linear in its length. A rule
//!   has no opinion only about right answers that it cannot read, so that no policy can choose to be not scored.
//! - `math/`: exact equality of mathematical answers.
//! - `external/`: a command, an HTTP server or a judge, with deadlines, attempts and [`OnError`]. A command is also the environment of several turns.
//!
//! The score by a reward model (`rules/model.rs`) comes with the [`Sample`]: the program that draws completions runs the model on its device.
//!
//! To add a rule: a file in `rules/` with its settings and its `Rule`, a variant of `RewardKind` in `spec.rs`, and a section of `docs/rewards.md`.
#![forbid(unsafe_code)]

mod deadline;
mod environment;
mod external;
mod math;
mod reward;
mod rules;
mod sample;
mod spec;
mod weighted;

pub use deadline::Deadline;
pub use environment::{Environment, Episode, Step, Steps};
pub use external::{CommandConfig, EnvironmentConfig, HttpConfig, JudgeConfig, OnError};
pub use reward::{Reward, Scores};
pub use rules::{
    EnvironmentRewardConfig, ExactConfig, Extract, FormatConfig, LengthConfig, MathConfig, ModelConfig, NumberConfig,
    OverlongConfig, RegexConfig, RegexMatch, RepetitionConfig,
};
pub use sample::{Prompt, Sample};
pub use spec::{RewardKind, RewardSpec};
pub use weighted::{Rewards, Scored};
