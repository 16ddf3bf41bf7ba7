//! `ottava download`.

use crate::output::{Transfer, print_json, stop_on_signals};
use clap::Args;
use ottava_common::{Error, Result};
use ottava_hub::{Hub, Kind, RepoId};
use serde_json::json;

/// Download a model or a data set of the Hugging Face Hub into the cache that Hugging Face's programs use too.
#[derive(Args)]
#[command(after_help = "Examples:
  ottava download Qwen/Qwen3-0.6B
  ottava download Qwen/Qwen3-0.6B@main --include '*.json'
  ottava download --dataset HuggingFaceH4/no_robots

Other commands download what they need by themselves. A download that was interrupted resumes where it ended. Of a model, its configuration, its
tokenizer, its templates and its safetensors are downloaded, unless --include names other files.
Environment: HF_TOKEN, HF_HOME, HF_HUB_CACHE, HF_ENDPOINT, HF_HUB_OFFLINE.")]
pub struct Download {
    /// The name on the Hub, OWNER/NAME or OWNER/NAME@REVISION, where REVISION is a branch, a tag or a commit.
    id: String,
    /// Download a data set; without --include, all its files.
    #[arg(long)]
    dataset: bool,
    /// Download the files whose paths match this pattern; the option may be given several times.
    #[arg(long, value_name = "PATTERN")]
    include: Vec<String>,
    /// Print one JSON object with the `folder`.
    #[arg(long)]
    json: bool,
}

impl Download {
    pub fn run(self) -> Result<()> {
        stop_on_signals("stopping; what has arrived is kept")?;
        let kind = if self.dataset { Kind::Dataset } else { Kind::Model };
        let id = RepoId::parse(kind, &self.id).ok_or_else(|| {
            Error::Config(format!("`{}` is no name of the Hub; write OWNER/NAME or OWNER/NAME@REVISION", self.id))
        })?;
        let (hub, mut transfer) = (Hub::from_env()?, Transfer::new("downloaded"));
        let folder = match self.dataset || !self.include.is_empty() {
            true => hub.files(&id, &self.include, &mut transfer)?,
            false => hub.model(&id, true, &mut transfer)?,
        };
        match self.json {
            true => print_json(&json!({"folder": folder})),
            false => out!("{}", folder.display()),
        }
        Ok(())
    }
}
