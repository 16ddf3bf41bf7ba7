//! The model card of a push, written from the run that trained the model.

use super::public_settings::public_settings;
use ottava_checkpoint::AdapterFolder;
use ottava_checkpoint::adapter::CONFIG_FILE;
use ottava_common::Result;
use ottava_hub::{Kind, RepoId};
use ottava_models::Quantization;
use ottava_settings::{ObjectiveKind, RunConfig, WeightInit};
use serde_json::Value;
use std::fmt::Write;
use std::path::{Path, PathBuf};

/// The facts of a card.
pub struct ModelCard {
    is_adapter: bool,
    /// The format of the weights, if they are quantized.
    format: Option<&'static str>,
    /// The name of the base model on the Hub, if it has one.
    base: Option<String>,
    run: Option<TrainedRun>,
}

/// What is known of the run.
struct TrainedRun {
    config: RunConfig,
    /// The last line of `metrics.jsonl` with each key.
    step: Option<u64>,
    loss: Option<f64>,
    eval_loss: Option<f64>,
}

impl ModelCard {
    /// Collects the facts about the model in `folder`. `run` is the folder of its run; by default, the folder that has the checkpoint.
    ///
    /// Errors if files of the run cannot be read.
    pub fn new(folder: &Path, run: Option<&Path>) -> Result<ModelCard> {
        let is_adapter = !folder.join("config.json").is_file() && folder.join(CONFIG_FILE).is_file();
        let folder = folder.canonicalize().unwrap_or_else(|_| folder.to_path_buf());
        let of_checkpoint = folder.parent().and_then(Path::parent).filter(|run| run.join("config.toml").is_file());
        let run = run.or(of_checkpoint).map(TrainedRun::read).transpose()?;
        let base = match (is_adapter, &run) {
            (true, Some(_)) => name_with_commit(&AdapterFolder::base(&folder)?),
            // The adapter of another program names its base without a commit.
            (true, None) => RepoId::of_path(Kind::Model, &AdapterFolder::base(&folder)?).map(|id| id.name),
            (false, Some(run)) => name_with_commit(&run.config.model.path),
            (false, None) => None,
        };
        let format = match is_adapter {
            true => None,
            false => Quantization::of_folder(&folder)?.map(|found| found.method),
        };
        Ok(ModelCard { is_adapter, format, base, run })
    }

    /// Returns the card of the repository `id`.
    pub fn text(&self, id: &RepoId) -> String {
        let mut text = String::from("---\n");
        let library = if self.is_adapter { "peft" } else { "transformers" };
        let base = self.base.as_ref();
        let is_pretrained = self.run.as_ref().is_none_or(|run| run.config.model.init == WeightInit::Pretrained);
        if let Some(base) = base.filter(|_| is_pretrained) {
            let _ = writeln!(text, "base_model: {base}");
            let relation = if self.is_adapter { "adapter" } else { "finetune" };
            let _ = writeln!(text, "base_model_relation: {relation}");
        }
        let datasets = self.run.as_ref().map(TrainedRun::datasets).unwrap_or_default();
        if !datasets.is_empty() {
            let _ = writeln!(text, "datasets:");
            for name in datasets {
                let _ = writeln!(text, "- {name}");
            }
        }
        let _ = writeln!(text, "library_name: {library}\npipeline_tag: text-generation\ntags:\n- ottava");
        if let Some(run) = &self.run {
            let _ = writeln!(text, "- {}", run.config.precision.recipe.as_str());
        }
        let name = id.name.rsplit('/').next().unwrap_or(&id.name);
        let _ = writeln!(text, "---\n\n# {name}\n");
        let what = match (self.is_adapter, &self.format) {
            (true, _) => "An adapter (LoRA)".to_string(),
            (false, Some(format)) => format!("A model with quantized weights ({format})"),
            (false, None) => "A model".to_string(),
        };
        let of = base.map_or(String::new(), |base| match is_pretrained {
            true => format!(" of [{base}](https://huggingface.co/{base})"),
            false => format!(" with the shape of [{base}](https://huggingface.co/{base})"),
        });
        let _ = writeln!(text, "{what}{of}, trained with Ottava {}.", env!("CARGO_PKG_VERSION"));
        if let Some(run) = &self.run {
            run.write(&mut text);
        }
        text
    }
}

/// Returns the name of an objective.
fn name_of(objective: ObjectiveKind) -> &'static str {
    match objective {
        ObjectiveKind::NextToken => "next token (fine-tuning or pretraining)",
        ObjectiveKind::Pairs => "preferences (pairs)",
        ObjectiveKind::Labels => "preferences (labels)",
        ObjectiveKind::Reward => "reward model",
        ObjectiveKind::Reinforcement => "reinforcement learning",
        ObjectiveKind::Distillation => "distillation",
        ObjectiveKind::Classification => "classification",
        ObjectiveKind::Embedding => "embeddings",
    }
}

/// Returns the name on the Hub of a model that a run has read from the cache, or that an adapter names with its commit. A path without a commit is a
/// folder, which may be absent on this machine.
fn name_with_commit(path: &Path) -> Option<String> {
    let of_cache = RepoId::of_snapshot(path).map(|(id, _)| id.name);
    let named = || RepoId::parse(Kind::Model, path.to_str()?).filter(RepoId::is_commit);
    of_cache.or_else(|| Some(named()?.name))
}

impl TrainedRun {
    fn read(folder: &Path) -> Result<TrainedRun> {
        let config = RunConfig::load(&folder.join("config.toml"), &[])?.config;
        let metrics = std::fs::read_to_string(folder.join("metrics.jsonl")).unwrap_or_default();
        let lines: Vec<Value> = metrics.lines().filter_map(|line| serde_json::from_str(line).ok()).collect();
        let last = |key: &str| lines.iter().rev().find_map(|line| line[key].as_f64());
        Ok(TrainedRun {
            config,
            step: last("step").map(|step| step as u64),
            loss: last("loss"),
            eval_loss: last("eval_loss"),
        })
    }

    /// Returns the files with training data.
    fn files(&self) -> Vec<PathBuf> {
        self.config.datasets().into_iter().flat_map(|set| set.train_files).collect()
    }

    /// Returns the data sets of the Hub.
    fn datasets(&self) -> Vec<String> {
        let mut names: Vec<String> =
            self.files().iter().filter_map(|path| RepoId::of_snapshot(path).map(|(id, _)| id.name)).collect();
        names.dedup();
        names
    }

    fn write(&self, text: &mut String) {
        let (config, number) =
            (&self.config, |value: Option<f64>| value.map_or("unknown".into(), |value| format!("{value:.4}")));
        let names: Vec<String> = self
            .files()
            .iter()
            .map(|path| match RepoId::of_snapshot(path) {
                Some((id, commit)) => format!("{} ({})", id.name, &commit[..8]),
                // Folders of the machine are nobody's business.
                None => path.file_name().unwrap_or_default().to_string_lossy().into_owned(),
            })
            .collect();
        let mut names = names;
        names.dedup();
        let method = match config.lora.r {
            0 => name_of(config.objective()).to_string(),
            r => format!("{}, LoRA with r = {r} and alpha = {}", name_of(config.objective()), config.lora.lora_alpha),
        };
        let rows = [
            ("Objective", method),
            ("Recipe", config.precision.recipe.as_str().to_string()),
            ("Data", names.join(", ")),
            ("Steps", self.step.map_or("unknown".into(), |step| step.to_string())),
            ("Tokens per step", config.tokens_per_step().to_string()),
            ("Sequence length", config.data.max_length.to_string()),
            ("Learning rate", format!("{:e}", config.optimizer.learning_rate)),
            ("Training loss", number(self.loss)),
            ("Validation loss", number(self.eval_loss)),
        ];
        let _ = writeln!(text, "\n## Training\n\n| | |\n|---|---|");
        for (name, value) in rows {
            let _ = writeln!(text, "| {name} | {value} |");
        }
        let _ = writeln!(
            text,
            "\nRepeat with `ottava train run.toml`, where `run.toml` has:\n\n```toml\n{}```",
            self.settings()
        );
    }

    /// Returns the settings without paths of the machine.
    fn settings(&self) -> String {
        let default = public_settings(&RunConfig::default());
        let (mut text, mut table) = (String::new(), String::new());
        for (key, value) in public_settings(&self.config).into_iter().filter(|setting| !default.contains(setting)) {
            let (of, last) = key.rsplit_once('.').unwrap_or(("", &key));
            if of != table {
                table = of.to_string();
                let _ = writeln!(text, "\n[{table}]");
            }
            let _ = writeln!(text, "{last} = {value}");
        }
        text.trim_start().to_string()
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn only_a_model_with_a_commit_has_a_name() {
        let commit = "0123456789abcdef0123456789abcdef01234567";
        let name = |text: &str| name_with_commit(Path::new(text));
        assert_eq!(name(&format!("/hub/models--a--b/snapshots/{commit}")).as_deref(), Some("a/b"));
        assert_eq!(name(&format!("a/b@{commit}")).as_deref(), Some("a/b"));
        // Relative folders, which may be absent here.
        assert_eq!((name("models/qwen"), name("/data/qwen")), (None, None));
    }
}
