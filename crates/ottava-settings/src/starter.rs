//! Generates the configuration file of a first run from a model and data.

use crate::load::Resolve;
use crate::{RunConfig, WeightInit};
use ottava_checkpoint::ModelFiles;
use ottava_common::error::{Error, Result};
use ottava_data::{ChatTemplate, Clock, Formatting};
use ottava_recipe::RecipeName;
use std::fmt::Write;
use std::path::{Path, PathBuf};

/// The name of the schema file, which is in the same folder as the run's file.
pub const SCHEMA: &str = "run.schema.json";

/// The number of tokens of a row, unless the model has fewer positions.
const ROW: usize = 2048;

/// The learning rate of adapters.
const RATE_OF_ADAPTERS: &str = "2e-4";

/// The generated file of a first run.
pub struct Starter {
    /// The text of the file.
    pub toml: String,
    /// Facts about the model and the data, one sentence each.
    pub found: Vec<String>,
}

/// Settings of a first run that its user chooses.
pub struct StarterOptions {
    /// The recipe.
    pub recipe: RecipeName,
    /// Whether the run trains adapters and not all weights.
    pub lora: bool,
}

/// Generates the file of a first run of `model` (a folder or a `config.json`) with the data `files`. `resolve` replaces names of remote models and data
/// by local paths, which are read; the file has the names.
///
/// Errors with [`Error::Model`] if the model cannot be read, with [`Error::Data`] if a file cannot be read, and with [`Error::Config`] for adapters of
/// a model without weights.
pub fn starter(model: &Path, files: &[PathBuf], options: &StarterOptions, resolve: &mut Resolve) -> Result<Starter> {
    let mut config = RunConfig::default();
    config.model.path = model.to_path_buf();
    config.data.train_files = files.to_vec();
    resolve(&mut config)?;
    let folder = config.model.path.clone();
    let data = config.resolve_data()?;
    let sizes = config.decoder_config()?;
    config.model.init =
        if folder.is_dir() && ModelFiles::open(&folder).is_ok() { WeightInit::Pretrained } else { WeightInit::Random };
    let chats = data.iter().any(|(_, formatting)| formatting.has_prompts());
    let talks = data.iter().any(|(_, formatting)| *formatting == Formatting::Messages);
    let name = model.file_name().unwrap_or_default().to_string_lossy();
    let name = name.strip_suffix(".json").unwrap_or(&name).to_string();
    let pretrained = config.model.init == WeightInit::Pretrained;
    let found = data
        .iter()
        .map(|(file, formatting)| format!("{}: records of formatting `{}`", file.display(), formatting.as_str()));
    if options.lora && !pretrained {
        return Err(Error::Config(format!(
            "{}: adapters need the weights of a model, and there are none; leave out --lora, or name a folder with weights",
            model.display()
        )));
    }
    let weights = if pretrained { "weights of the folder" } else { "random weights, since the folder has none" };
    let found: Vec<String> =
        [format!("{}: {weights}, {} positions", model.display(), sizes.context())].into_iter().chain(found).collect();
    let found = found.into_iter().chain(missing(&config, talks)).collect();
    let mut names: Vec<_> = data.iter().map(|(_, formatting)| formatting.as_str()).collect();
    names.dedup();
    let quoted = |path: &Path| toml::Value::String(path.display().to_string()).to_string();
    let mut toml = String::new();
    let rate = match (pretrained, options.lora) {
        (true, true) => RATE_OF_ADAPTERS,
        (true, false) => "2e-5",
        (false, _) => "3e-4",
    };
    let lora = match options.lora {
        true => "# Adapters instead of all weights: less memory.\n[lora]\nr = 16\nlora_alpha = 32.0\n".to_string(),
        false => format!(
            "# Adapters instead of all weights: less memory. They take a larger rate: also set `learning_rate = {RATE_OF_ADAPTERS}` above.\n\
             # [lora]\n# r = 16\n# lora_alpha = 32.0\n"
        ),
    };
    let epochs = if chats { "3.0" } else { "1.0" };
    write!(
        toml,
        "#:schema {SCHEMA}\n# Settings that are not here have their defaults; configs/reference.toml shows and explains all.\n\
         output_dir = {}\n\n\
         [model]\npath = {}\ninit = \"{}\"\n{}\n\
         [data]\ntrain_files = [{}]\n# Fields of the records: {}.\n\
         max_length = {}\nval_set_size = 0.01\n\n\
         [training]\nnum_train_epochs = {epochs}\n# Sequences per forward and backward, and how many of these make a step.\n\
         per_device_train_batch_size = 4\ngradient_accumulation_steps = 4\n\n\
         [optimizer]\nlearning_rate = {rate}\nweight_decay = 0.0\n\n\
         [lr_scheduler]\n# A share of the run's steps.\nwarmup_steps = 0.03\n\n\
         [evaluation]\neval_steps = 100\n\n\
         [precision]\n# \"bf16\", or an FP8 recipe: \"fp8-current\", \"fp8-delayed\", \"fp8-row\" or \"fp8-block\". `ottava plan` says what each linear gains.\nrecipe = \"{}\"\n\n\
         [memory]\n# The cheapest recomputation that fits the device.\nrecompute = \"auto\"\n\n\
         {lora}",
        quoted(&Path::new("runs").join(&name)),
        quoted(model),
        if pretrained { "pretrained" } else { "random" },
        if folder.is_dir() { "" } else { "# A tokenizer.json or a folder with one.\ntokenizer = \"\"\n" },
        files.iter().map(|file| quoted(file)).collect::<Vec<_>>().join(", "),
        names.join(", "),
        sizes.context().min(ROW),
        options.recipe.as_str(),
    )
    .expect("a text takes any length");
    match toml::from_str::<RunConfig>(&toml).map(|config| config.problems()) {
        Ok(problems) if problems.is_empty() => Ok(Starter { toml, found }),
        Ok(problems) => Err(Error::Config(problems.join("\n"))),
        Err(error) => Err(Error::Config(error.to_string())),
    }
}

/// Returns a sentence for each file of texts that the run needs and its model does not have. `talks` says whether the data are conversations.
fn missing(config: &RunConfig, talks: bool) -> Vec<String> {
    let path = config.model.tokenizer_path();
    let (shown, folder) = (path.display(), path.is_dir());
    let mut missing = Vec::new();
    if !folder || !path.join("tokenizer.json").is_file() {
        let what =
            if folder { format!("{shown}: there is no tokenizer.json") } else { "the model has no folder".into() };
        missing.push(format!(
            "{what}; before you train, set `model.tokenizer` to a tokenizer.json or to a folder with one"
        ));
    }
    if talks && folder && !matches!(ChatTemplate::load(path, None, Clock::Fixed), Ok(Some(_))) {
        missing.push(format!(
            "{shown}: there is no chat template, which the conversations need; before you train, set `tokenizer.chat_template`, for example to \"chatml\""
        ));
    }
    missing
}
