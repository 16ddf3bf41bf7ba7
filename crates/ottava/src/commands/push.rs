//! `ottava push`.

use super::model_card::ModelCard;
use super::newest::with_checkpoint;
use crate::output::{Transfer, print_json, stop_on_signals};
use clap::Args;
use ottava_checkpoint::adapter::CONFIG_FILE;
use ottava_checkpoint::verify_model;
use ottava_common::{Error, Result};
use ottava_hub::{Content, Hub, Kind, PushOptions, RepoId};
use serde_json::json;
use std::collections::BTreeMap;
use std::path::{Path, PathBuf};

/// Upload a model, an adapter or an export to the Hugging Face Hub, with a model card that is written from the run.
#[derive(Args)]
#[command(after_help = "Examples:
  ottava push runs/chat OWNER/my-chat-model --private
  ottava push exported OWNER/my-model-FP8 --run runs/chat
  ottava push runs/chat OWNER/my-chat-model --card card.md

HF_TOKEN must be a token with write access. Optimizer states (training/) are not uploaded. A README.md in the folder, or the file of --card, replaces the
card. A push that was interrupted goes on with the files that are missing when the same command runs again.")]
pub struct Push {
    /// A model folder, a PEFT folder, or the folder of a run (its newest checkpoint is used).
    folder: PathBuf,
    /// The repository, OWNER/NAME or OWNER/NAME@BRANCH. It is created if it does not exist.
    id: String,
    /// Make a new repository private.
    #[arg(long)]
    private: bool,
    /// The folder of the run that the card describes; by default FOLDER, or the run that the checkpoint belongs to.
    #[arg(long, value_name = "FOLDER")]
    run: Option<PathBuf>,
    /// The model card, instead of one that is written from the run.
    #[arg(long, value_name = "FILE")]
    card: Option<PathBuf>,
    /// The first line of the commit.
    #[arg(long, default_value = "Upload with Ottava")]
    message: String,
    /// Print the card and the names of the files, and upload nothing.
    #[arg(long)]
    dry_run: bool,
    /// Print one JSON object with `commit`, `url`, `files` and `uploaded`, the bytes that the Hub did not have.
    #[arg(long)]
    json: bool,
}

/// Files and folders of a checkpoint that are of the run.
const OF_RUN: [&str; 2] = ["training", "manifest.json"];

impl Push {
    pub fn run(self) -> Result<()> {
        stop_on_signals("stopping; nothing is committed")?;
        let id = RepoId::parse(Kind::Model, &self.id).filter(|id| id.name.contains('/')).ok_or_else(|| {
            Error::Config(format!("`{}` is no name of the Hub; write OWNER/NAME or OWNER/NAME@BRANCH", self.id))
        })?;
        with_checkpoint(&self.folder, |folder| self.push(folder, &id))
    }

    fn push(&self, folder: &Path, id: &RepoId) -> Result<()> {
        if !folder.join("config.json").is_file() && !folder.join(CONFIG_FILE).is_file() {
            let what = "there is neither config.json nor adapter_config.json";
            return Err(Error::Model(format!("{}: {what}; name a model, an adapter or a run", folder.display())));
        }
        verify_model(folder)?;
        let mut files = BTreeMap::new();
        list(folder, folder, &mut files)?;
        let card = match &self.card {
            Some(path) => Some(std::fs::read(path).map_err(Error::io(path))?),
            None if files.contains_key("README.md") => None,
            None => Some(ModelCard::new(folder, self.run.as_deref())?.text(id).into_bytes()),
        };
        if self.dry_run {
            if let Some(card) = &card {
                out!("{}", String::from_utf8_lossy(card));
            }
            files.keys().for_each(|path| out!("{path}"));
            return Ok(());
        }
        files.extend(card.map(|card| ("README.md".to_string(), Content::Bytes(card))));
        let options = PushOptions { private: self.private, message: self.message.clone() };
        let pushed = Hub::from_env()?.push(id, &files, &options, &mut Transfer::new("uploaded"))?;
        match self.json {
            true => print_json(&json!({
                "commit": pushed.commit,
                "url": pushed.url,
                "files": pushed.files,
                "uploaded": pushed.uploaded,
            })),
            false => out!("{} files in commit {}: {}", pushed.files, pushed.commit, pushed.url),
        }
        Ok(())
    }
}

/// Lists the files below `folder` by their paths below `root`, except hidden files and the files of a run.
fn list(root: &Path, folder: &Path, files: &mut BTreeMap<String, Content>) -> Result<()> {
    for entry in std::fs::read_dir(folder).map_err(Error::io(folder))? {
        let path = entry.map_err(Error::io(folder))?.path();
        let name = path.strip_prefix(root).expect("the path is below its root").to_string_lossy().into_owned();
        if name.split('/').any(|part| part.starts_with('.')) || OF_RUN.contains(&name.as_str()) {
            continue;
        }
        match path.is_dir() {
            true => list(root, &path, files)?,
            false => drop(files.insert(name, Content::File(path))),
        }
    }
    Ok(())
}
